"""Without a clock the radix tree and the coordinator hit exactly what a plain block LRU hits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest

from hisparse_sgl.integrity import check_integrity
from hisparse_sgl.replay.prompts import replay_prompts
from hisparse_sgl.replay.sequences import Sequences
from hisparse_sgl.replay.setup import Setup, Size
from hisparse_sgl.replay.sweep import hit_rate_ceiling, replay_once
from hisparse_sgl.replay.traces import Trace, read_trace

# Rates of a plain block LRU over the prompts, in percent, published with the traces.
PUBLIC_RATES = {
    "conversation": {500: 4.30, 2000: 5.54, 10000: 21.57, 50000: 36.15, None: 37.36},
    "synthetic": {500: 4.60, 2000: 14.92, 10000: 43.18, 50000: 65.12, None: 65.12},
}


def plain_lru(trace: Trace, capacity: int | None) -> list[int]:
    """Cached tokens of each prompt: leading blocks in the cache; then all are touched, the tail first."""
    cache: OrderedDict[int, None] = OrderedDict()
    cached = []
    for request in trace.requests:
        blocks = request.blocks.tolist()
        hits = next((n for n, block in enumerate(blocks) if block not in cache), len(blocks))
        cached.append(min(hits * trace.block_size, request.input_tokens))
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
            if capacity is not None and len(cache) > capacity:
                cache.popitem(last=False)
    return cached


def unlimited_device(pages: int | None, policy: str = "lru") -> Setup:
    return Setup(host=Size(pages=pages), device=Size(), policy=policy, timed=False)


@pytest.mark.parametrize("dialect", ["mooncake", "qwen", "kvcache-simulator"])
def test_every_prompt_hits_what_a_plain_lru_hits(make_trace: Callable[..., Trace], dialect: str) -> None:
    trace = make_trace(150, 8, dialect, mean_new_tokens=3000.0 if dialect == "mooncake" else 400.0)
    sequences = Sequences(trace)
    longest = sequences.most_pages
    for capacity in (longest, 2 * longest, 5 * longest, None):
        engine, cached = replay_prompts(unlimited_device(capacity), sequences)
        assert cached == plain_lru(trace, capacity), capacity
        check_integrity(engine.coordinator)
    assert hit_rate_ceiling(sequences) >= round(sum(cached) / trace.input_tokens, 6)


def test_lfu_keeps_what_is_used_often(make_trace: Callable[..., Trace]) -> None:
    sequences = Sequences(make_trace(250, 8))
    rates = [replay_once(unlimited_device(300, p), sequences)["token_hit_rate"] for p in ("lru", "lfu")]
    assert rates[0] != rates[1] and min(rates) > 0


@pytest.mark.parametrize("pages", [500, 2000, 10000, 50000, None])
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_public_traces_give_the_published_rates(public_traces: Path, name: str, pages: int | None) -> None:
    sequences = Sequences(read_trace(str(public_traces / f"mooncake_{name}.jsonl")))
    rate = 100 * replay_once(unlimited_device(pages), sequences)["token_hit_rate"]
    assert rate == pytest.approx(PUBLIC_RATES[name][pages], abs=0.01)
    if pages is None:
        assert rate == pytest.approx(100 * hit_rate_ceiling(sequences), abs=1e-4)
