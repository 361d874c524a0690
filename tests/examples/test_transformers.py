"""Hugging Face models on the pool, token for token against the same model alone, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conversations import Request, encode
from scheduler import Scheduler
from tiny_models import build, deepseek_config, generate_alone, glm_config, precision

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.integrations.transformers import PooledModel, index_groups, layout_of
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.requests import Deferred

TEXT = encode("The pool keeps every row on the host, and hot rows on the device. " * 20)
CONFIGS = {"glm": glm_config, "deepseek": deepseek_config}


@functools.cache
def model_pair(name: str) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    pooled, alone = (build(CONFIGS[name](), torch.float64, seed=3) for _ in range(2))
    return pooled, alone


def prompt(length: int, own: int) -> list[int]:
    """`length` tokens whose first 64 all prompts share."""
    noise = torch.randint(0, 256, (length - 64,), generator=torch.Generator().manual_seed(own))
    return TEXT[:64] + noise.tolist()


def make_pool(model: Any, **changes: Any) -> HiSparsePool:
    sizes = {"device_pages": 24, "host_pages": 200, "device_buffer_size": 32, "max_requests": 4}
    config = HiSparseConfig(
        **{"top_k": 16, "context_len": 512, "poison": True, "kernels": "reference", **sizes, **changes}
    )
    return HiSparsePool(layout_of(model.config, model.dtype, page_size=16), config)


Spoil = Callable[[HiSparsePool], None]


def serve(name: str, lengths: list[int], spoil: Spoil | None = None) -> SimpleNamespace:
    """Serves prompts of these lengths and a second turn of the first; compares each with the model alone."""
    pooled, alone = model_pair(name)
    requests = [Request(f"r{i}", prompt(length, i), 12) for i, length in enumerate(lengths)]
    requests[0].rid, requests[0].follow_up = "t0", TEXT[100:130]
    with make_pool(pooled) as pool, precision(torch.float64):
        if spoil:
            spoil(pool)
        model = PooledModel(pooled, pool)
        ended = Scheduler(model, requests, 37, max_running=4, on_step=pool.check_integrity).run()
        model.close()
        equal = [generate_alone(alone, r.prompt, len(r.tokens)) == r.tokens for r in ended]
        return SimpleNamespace(ended=ended, equal=equal, counters=pool.counters)


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_chunked_and_reused_prefixes_equal_the_model_alone(name: str) -> None:
    run = serve(name, [150, 257, 67])
    assert run.equal == [True] * 4
    assert run.counters.hot_misses > 0, "no row came from the host"
    second_turn = next(r for r in run.ended if r.rid == "t1")
    assert second_turn.cached_tokens >= 150, "the second turn did not find the pages that decoding filled"


def _starve(pool: HiSparsePool) -> None:
    """Refuses all growth for a while in mid-decode, longer than any copy takes."""
    extend, calls = pool.extend, iter(range(10**6))

    def starved(rid: str, n: int) -> torch.Tensor | Deferred:
        return Deferred("device pages") if 30 <= next(calls) < 40 else extend(rid, n)

    pool.extend = starved  # type: ignore[method-assign]


def test_a_starved_request_is_retracted_and_still_equal() -> None:
    run = serve("deepseek", [150, 257], _starve)
    assert run.equal == [True] * 3
    assert run.counters.retractions > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_larger_than_the_device_is_computed_out_of_its_hot_region(name: str) -> None:
    run = serve(name, [380])
    assert run.ended[0].hot
    assert run.equal == [True] * 2


def _drop_one_row(pool: HiSparsePool) -> None:
    swap_in = pool.swap_in

    def spoiled(group: int, positions: torch.Tensor) -> torch.Tensor:
        rows = swap_in(group, positions)
        rows[:, 0] = -1
        return rows

    pool.swap_in = spoiled  # type: ignore[method-assign]


def _skip_a_follower(pool: HiSparsePool) -> None:
    gather = pool.runtime._gather

    def spoiled(layer: int, plan: Any, **options: Any) -> None:
        if layer != 3:
            gather(layer, plan, **options)

    pool.runtime._gather = spoiled  # type: ignore[method-assign]


def _last_k(pool: HiSparsePool) -> None:
    """Attend to the newest tokens, whatever the indexer says."""
    swap_in = pool.swap_in

    def spoiled(group: int, positions: torch.Tensor) -> torch.Tensor:
        newest = torch.tensor([request.num_tokens - 1 for request in pool._step])
        return swap_in(group, (newest[:, None] - torch.arange(positions.shape[1])).int())

    pool.swap_in = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [_drop_one_row, _skip_a_follower, _last_k])
def test_the_comparison_can_fail(spoil: Spoil) -> None:
    assert not all(serve("glm", [150, 257], spoil).equal)


def test_index_groups_follow_the_indexer_types() -> None:
    groups = index_groups(glm_config())
    assert [group.layers for group in groups] == [(0,), (1, 2, 3), (4, 5)]
    assert [group.layers for group in index_groups(deepseek_config())] == [(0,), (1,), (2,), (3,)]


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match="model_type is 'llama', without index_topk and kv_lora_rank"):
        index_groups(SimpleNamespace(model_type="llama", num_hidden_layers=2))


def test_a_first_layer_without_an_indexer_is_refused() -> None:
    types = ["shared", "full"]
    config = SimpleNamespace(index_topk=4, kv_lora_rank=8, num_hidden_layers=2, indexer_types=types)
    with pytest.raises(ValueError, match=r"indexer_types\[0\] is 'shared'"):
        index_groups(config)


def test_another_top_k_or_layout_is_refused_and_the_model_stays_as_it_was() -> None:
    pooled, _ = model_pair("glm")
    before = pooled.config._attn_implementation
    with make_pool(pooled, top_k=8) as pool, pytest.raises(ValueError, match="top_k of the pool is 8"):
        PooledModel(pooled, pool)
    other, _ = model_pair("deepseek")
    with make_pool(other) as pool, pytest.raises(ValueError, match="layout of the pool is"):
        PooledModel(pooled, pool)
    assert pooled.config._attn_implementation == before


def test_close_gives_the_model_back() -> None:
    pooled, alone = model_pair("deepseek")
    with make_pool(pooled) as pool:
        PooledModel(pooled, pool).close()
    with precision(torch.float64):
        assert generate_alone(pooled, TEXT[:40], 4) == generate_alone(alone, TEXT[:40], 4)
