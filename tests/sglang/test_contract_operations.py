"""Ways to use a server that lead past the parts of SGLang that the other contracts are about.

| contract | test |
|---|---|
| sessions | ``test_turns_of_a_session_*`` |
| n > 1 | ``test_parallel_samples_*`` |
| weight updates | ``test_weights_*`` |
| ``Scheduler.release_host_resources`` | ``test_shutdown_*`` |
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from drive import Script
from engine import PAGE
from scripted import LATE, OVERLAP, ROOMY, ask, cached, decoding, play, steps, words
from sglang.srt.managers.io_struct import (
    CloseSessionReqInput,
    ContinueGenerationReqInput,
    OpenSessionReqInput,
    PauseGenerationReqInput,
    SessionParams,
    UpdateWeightFromDiskReqInput,
)


def test_turns_of_a_session_share_their_prefix() -> None:
    """A session that is no streaming session keeps tokens, and each turn is a request with all of them."""

    def script(drive: Any) -> Iterator[None]:
        drive.outgoing.append(OpenSessionReqInput(capacity_of_str_len=10**6, session_id="s"))
        prompt, parent = words(2 * PAGE + 10), None
        for turn in range(4):
            new = [2 + turn] * (PAGE + 5) if turn else prompt
            prompt = [*prompt, *new] if turn else prompt
            rid = ask(drive, prompt, PAGE)
            drive.outgoing[-1].input_ids = array("q", new)
            drive.outgoing[-1].session_params = SessionParams(id="s", rid=parent)
            client = drive.traffic.live[rid]
            held = len(prompt) - len(new)
            yield from steps(drive, rid)
            # The last token of an answer is not computed in its own turn.
            assert drive.forwards.cached[rid] == max(0, held - 1) // PAGE * PAGE
            if turn != 1:  # the next one branches off where this one did
                prompt, parent = [*prompt, *client.said], rid
            else:
                prompt = prompt[:held]
        drive.outgoing.append(CloseSessionReqInput(session_id="s"))
        yield
        assert [reply.success for reply in drive.replies] == [True]

    play(ROOMY, script)


@LATE
def test_parallel_samples_share_the_prompt_that_was_computed_first(copy_rate: float) -> None:
    """SGLang asks for the prompt without an answer, then for all answers at once. Of samples that had to
    compute the prompt again all copies but one are freed."""

    def script(drive: Any) -> Iterator[None]:
        prompt = words(4 * PAGE + 10)
        first = ask(drive, prompt, 0)
        yield from steps(drive, first)
        rids = [ask(drive, prompt, PAGE) for _ in range(4)]
        yield from steps(drive, *rids)
        assert [drive.forwards.cached[rid] for rid in rids] == [4 * PAGE if copy_rate else 0] * 4

    assert play(replace(ROOMY, copy_rate=copy_rate), script)["ended by length"] == 5


def update_weights(drive: Any, flush: bool) -> Iterator[None]:
    drive.scheduler.tp_worker.model_runner.weight_updater = SimpleNamespace(
        update_weights_from_disk=lambda *args, **kwargs: (True, "updated")
    )
    drive.outgoing.append(UpdateWeightFromDiskReqInput(model_path="", flush_cache=flush))
    yield
    yield


@LATE
@pytest.mark.parametrize("flush", [True, False])
def test_weights_are_updated_with_and_without_a_flush(flush: bool, copy_rate: float) -> None:
    """With one, nothing that was computed before is found later, also what was being copied then."""

    def script(drive: Any) -> Iterator[None]:
        prompt = words(4 * PAGE + 10)
        rid = ask(drive, prompt, 5)
        yield from steps(drive, rid)
        yield from update_weights(drive, flush)
        assert drive.replies[-1].success
        drive.scheduler.hisparse_coordinator.transfers.rate = 1.0
        for _ in range(30):
            yield
        assert (yield from cached(drive, prompt)) == (0 if flush else 4 * PAGE)

    play(replace(ROOMY, copy_rate=copy_rate), script)


@OVERLAP
def test_weights_are_updated_under_requests_that_are_retracted_for_it(overlap: bool) -> None:
    """Their prefixes were published, and are gone when they go on. Without the pause the flush is refused."""

    def script(drive: Any) -> Iterator[None]:
        counters = drive.scheduler.hisparse_coordinator.counters
        rids = [drive.send(4 * PAGE + 10, PAGE) for _ in range(3)]
        for rid in rids:
            yield from decoding(drive, rid)
        yield from update_weights(drive, flush=True)
        assert not drive.replies[-1].success
        drive.outgoing.append(PauseGenerationReqInput(mode="retract"))
        yield from update_weights(drive, flush=True)
        assert drive.replies[-1].success and counters.retractions == 3
        drive.outgoing.append(ContinueGenerationReqInput(torch_empty_cache=False))
        yield from steps(drive, *rids)
        assert counters.prefix_hit_tokens == 0

    assert play(replace(ROOMY, overlap=overlap), script)["ended by length"] == 3


@LATE
def test_shutdown_gives_the_host_memory_back(copy_rate: float) -> None:
    """Also with copies in flight, and twice."""
    drive = Script(replace(ROOMY, copy_rate=copy_rate), lambda drive: steps(drive, drive.send(4 * PAGE, 3)))
    scheduler = drive.scheduler
    try:
        drive.engine.run()
        for _ in range(2):
            scheduler.release_host_resources()
            with pytest.raises(ValueError, match="before close"):
                _ = scheduler.hisparse_coordinator.host_pool.buffer
    finally:
        drive.engine.close()
