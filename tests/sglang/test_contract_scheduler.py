"""What SGLang's scheduler expects of coordinator, allocator and tree together.

| contract | test |
|---|---|
| ``request_finished`` is before ``release_kv_cache`` | ``test_request_finished_comes_before_the_release`` |
| one more step may be in flight at an end | ``test_a_step_that_is_in_flight_at_an_end_*`` |
| an abort between chunks reaches the tree only | ``test_an_abort_between_chunks_*`` |
| ``retract_req`` | ``test_a_retraction_publishes_the_durable_prefix_*`` |
| ``flush_cache`` | ``test_flush_cache_*`` |
| every rank decides alike | ``test_ranks.py`` |
| mixed chunks, DCP, PP, PD, speculation | refused: ``test_validation.py`` |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from engine import PAGE
from scenarios import HYBRID
from scripted import LATE, OVERLAP, ROOMY, ask, cached, decoding, play, steps, words
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
)


@OVERLAP
def test_request_finished_comes_before_the_release(overlap: bool) -> None:
    order: list[tuple[str, str]] = []

    def script(drive: Any) -> Iterator[None]:
        tree, coordinator = drive.scheduler.tree_cache, drive.scheduler.hisparse_coordinator
        finished, free = coordinator.request_finished, tree.on_release

        def request_finished(req: Any) -> None:
            order.append(("finished", req.rid))
            finished(req)

        def on_release(req: Any, **kwargs: Any) -> None:
            order.append(("released", req.rid))
            free(req, **kwargs)

        coordinator.request_finished, tree.on_release = request_finished, on_release
        rids = [drive.send(PAGE, tokens) for tokens in (0, 1, 30)]
        yield from steps(drive, *rids)
        assert sorted(order) == sorted((what, rid) for rid in rids for what in ("finished", "released"))
        assert all(order.index(("finished", rid)) < order.index(("released", rid)) for rid in rids)

    play(replace(ROOMY, overlap=overlap), script)


@OVERLAP
def test_a_step_that_is_in_flight_at_an_end_reads_what_was_there(overlap: bool) -> None:
    """Another request takes the memory in the same step; ``forwards.py`` compares every row that is read."""
    tight = replace(HYBRID, tokens=19 * PAGE, chunk=8 * PAGE, copy_rate=1.0, overlap=overlap)

    def script(drive: Any) -> Iterator[None]:
        for _ in range(3):
            drive.traffic.load = replace(drive.traffic.load, stop_every=15)
            ending = drive.send(6 * PAGE, 300)
            drive.outgoing[-1].sampling_params.ignore_eos = False
            client = drive.traffic.live[ending]
            drive.traffic.load = replace(drive.traffic.load, stop_every=10**9)
            other = drive.send(14 * PAGE, 3)
            yield from steps(drive, ending, more=0)
            assert not drive.has_started(other), "both had room"
            yield from steps(drive, other)
            ran = sum(entry[0] == "DECODE" and ending in entry for entry in drive.forwards.log)
            assert ran == len(client.said) - 1 + overlap

    assert play(tight, script)["ended by stop"] == 3


def test_an_abort_between_chunks_reaches_us_through_the_tree_only() -> None:
    told: list[str] = []

    def script(drive: Any) -> Iterator[None]:
        coordinator = drive.scheduler.hisparse_coordinator
        for name in ("request_finished", "retract_req"):
            setattr(coordinator, name, lambda req: told.append(req.rid))
        rid = drive.send(12 * PAGE, 5)
        yield
        while not (drive.scheduler.chunked_req and drive.has_started(rid)):
            yield
        drive.traffic.live[rid].aborted = True
        drive.outgoing.append(AbortReq(rid=rid))
        yield from steps(drive, rid)
        life = coordinator.lifecycle
        held = (told, life.requests, life.rows, life.residency.promised, drive.scheduler.tree_cache.open)
        assert not any(held), held

    play(replace(ROOMY, chunk=2 * PAGE), script)


@OVERLAP
@LATE
def test_a_retraction_publishes_the_durable_prefix_and_the_next_admission_finds_it(
    overlap: bool, copy_rate: float
) -> None:
    def script(drive: Any) -> Iterator[None]:
        coordinator = drive.scheduler.hisparse_coordinator
        rid = drive.send(4 * PAGE + 10, PAGE)
        yield from decoding(drive, rid)
        drive.outgoing.append(PauseGenerationReqInput(mode="retract"))
        yield
        yield
        assert coordinator.counters.retractions == 1 and not coordinator.lifecycle.requests
        drive.outgoing.append(ContinueGenerationReqInput(torch_empty_cache=False))
        yield from decoding(drive, rid)
        assert coordinator.counters.prefix_hit_tokens == (4 * PAGE if copy_rate else 0)
        yield from steps(drive, rid)

    play(replace(ROOMY, copy_rate=copy_rate, overlap=overlap), script)


@LATE
def test_flush_cache_is_refused_while_a_request_runs_and_forgets_all_afterwards(copy_rate: float) -> None:
    def script(drive: Any) -> Iterator[None]:
        scheduler, prompt = drive.scheduler, words(4 * PAGE + 10)
        allocator = scheduler.token_to_kv_pool_allocator
        rid = ask(drive, prompt, 30)
        yield from decoding(drive, rid)
        drive.outgoing.append(FlushCacheReqInput())
        yield
        yield
        assert [reply.success for reply in drive.replies] == [False]
        yield from steps(drive, rid)
        assert scheduler.tree_cache.detached or copy_rate
        drive.outgoing.append(FlushCacheReqInput())
        yield
        yield
        assert drive.replies[-1].success
        assert allocator.available_size() == allocator.size_full
        assert (yield from cached(drive, prompt)) == 0

    play(replace(ROOMY, copy_rate=copy_rate), script)
