"""Replay without a clock: prompts one after the other, each admitted, published and finished at once."""

from __future__ import annotations

from collections.abc import Callable

from hisparse_sgl.replay.sequences import Sequences
from hisparse_sgl.replay.setup import Engine, Setup, make_engine
from hisparse_sgl.requests import Deferred


def replay_prompts(
    setup: Setup, sequences: Sequences, on_request: Callable[[], None] = lambda: None
) -> tuple[Engine, list[int]]:
    """Cached tokens of each prompt under a cache of the host pool's size that holds prompts only."""
    engine = make_engine(setup, sequences)
    cached = []
    for index, request in enumerate(sequences.trace.requests):
        pages = _serve(engine, str(index), request.blocks.tolist())
        cached.append(sequences.prompt_tokens(index, pages))
        on_request()
    return engine, cached


def _serve(engine: Engine, rid: str, blocks: list[int]) -> int:
    """Let one prompt through and return how many of its pages were there."""
    coordinator = engine.coordinator
    # The last token is always computed: one that nobody stores stands behind the prompt.
    admission = coordinator.admit(rid, [*blocks, 2**31 - 1])
    if isinstance(admission, Deferred):
        raise RuntimeError(f"prompt {rid} does not get in with nothing else running: {admission.reason}")
    if len(blocks) > admission.cached_tokens:
        slots = coordinator.extend(rid, len(blocks) - admission.cached_tokens)
        assert not isinstance(slots, Deferred), slots
        request = coordinator.request(rid)
        coordinator.begin_step([request])
        coordinator.step_done([request])
        coordinator.collect()
    coordinator.finish(rid)
    coordinator.take_deltas()
    return admission.cached_tokens
