"""Single situations in SGLang's scheduler with the plugin, played from a script."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from drive import Script, run
from engine import PAGE
from scenarios import HYBRID
from sglang.srt.managers.schedule_policy import PrefillAdder

from hisparse_sgl.integrations.sglang.adder import adder_class
from hisparse_sgl.integrations.sglang.admission import Admission
from hisparse_sgl.integrations.sglang.tree import GatedRadixCache

Patch = pytest.MonkeyPatch
NO_COPIES = replace(HYBRID, tokens=20 * PAGE, copy_rate=0.0)  # but those that somebody waits for


def publications_fill_the_host(drive: Script) -> Iterator[None]:
    """Two requests leave 18 of 24 host pages with publications that wait for copies; two others grow.

    All pages but one of the first publication are durable, so the device has room.
    """
    for _ in range(2):
        rid = drive.send(9 * PAGE, 0)
        yield
        while drive.is_live(rid):
            yield
        drive.scheduler.hisparse_coordinator.transfers.land("to_host", 1)
    assert len(drive.scheduler.tree_cache.detached) == 2
    rids = [drive.send(10, 3 * PAGE) for _ in range(2)]
    yield
    while any(map(drive.is_live, rids)):
        yield


FULL_HOST = replace(
    NO_COPIES, tokens=24 * PAGE, ratio=1, conservativeness=0.1, hisparse=(("max_spill_pages", 8),)
)


def test_a_publication_gives_way_to_a_request_that_grows() -> None:
    assert Script(FULL_HOST, publications_fill_the_host).run()["retractions"] == 0


def test_without_that_a_request_is_retracted(monkeypatch: Patch) -> None:
    monkeypatch.setattr(GatedRadixCache, "_give_up", lambda self: False)
    assert Script(FULL_HOST, publications_fill_the_host).run()["retractions"] > 0


def wait_for_copies(drive: Script) -> Generator[None, None, tuple[str, str]]:
    """A long prompt has to wait for copies while another request decodes; the ids of the other and of it."""
    dirty = drive.send(9 * PAGE, 0)
    yield
    while drive.is_live(dirty):
        yield
    decoding = drive.send(10, 3 * PAGE)
    yield
    while not drive.has_started(decoding):
        yield
    waiting = drive.send(9 * PAGE, 0)
    for _ in range(5):
        yield
    assert not drive.has_started(waiting), "the device had room"
    return decoding, waiting


def copies_fill_the_device(drive: Script) -> Iterator[None]:
    """It starts when they are through."""
    decoding, waiting = yield from wait_for_copies(drive)
    drive.scheduler.hisparse_coordinator.transfers.rate = 1.0
    for _ in range(20):
        yield
    assert drive.is_live(decoding)
    assert drive.has_started(waiting), "admission is closed until a request leaves"


def test_a_request_that_waits_for_copies_does_not_close_admission() -> None:
    Script(NO_COPIES, copies_fill_the_device).run()


def test_it_would_if_nobody_looked_whether_there_may_be_room(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Admission, "may_have_room", lambda self, queue: False)
    with pytest.raises(AssertionError, match="admission is closed"):
        Script(NO_COPIES, copies_fill_the_device).run()


def another_waits_instead(drive: Script) -> Iterator[None]:
    """In one step the request that waits for copies goes away and another comes, for which there is room."""
    decoding, waiting = yield from wait_for_copies(drive)
    drive.abort(waiting)
    small = drive.send(10, 3)
    for _ in range(5):
        yield
    assert drive.is_live(decoding)
    assert drive.has_started(small), "nobody asked about the one that came"


def test_a_request_that_comes_as_the_waiting_one_goes_is_asked_about() -> None:
    Script(NO_COPIES, another_waits_instead).run()


def nobody_waits_any_more(drive: Script) -> Iterator[None]:
    _, waiting = yield from wait_for_copies(drive)
    coordinator = drive.scheduler.hisparse_coordinator
    assert coordinator.admission.is_waiting
    drive.abort(waiting)
    for _ in range(3):
        yield
    assert not coordinator.admission.is_waiting, "ranks go on agreeing on copies in each step"
    small = drive.send(10, 3)
    for _ in range(5):
        yield
    assert drive.has_started(small)


def test_nothing_waits_for_a_request_that_went() -> None:
    Script(NO_COPIES, nobody_waits_any_more).run()


def copies_fill_the_host(drive: Script) -> Iterator[None]:
    """Pages of a request that has left wait for copies; a prompt waits for them, and another decodes."""
    dirty = drive.send(12 * PAGE, 0)
    yield
    decoding = drive.send(10, 4 * PAGE)
    while drive.is_live(dirty) or not drive.has_started(decoding):
        yield
    waiting = drive.send(10 * PAGE, 0)
    for _ in range(5):
        yield
    assert not drive.has_started(waiting), "the host had room"
    assert not drive.scheduler.hisparse_coordinator.admission.is_waiting, "the device had none"
    drive.scheduler.hisparse_coordinator.transfers.rate = 1.0
    for _ in range(20):
        yield
    assert drive.is_live(decoding)
    assert drive.has_started(waiting), "admission is closed until a request leaves"


@pytest.mark.parametrize("radix", [True, False])
def test_nor_does_one_that_waits_for_host_pages(radix: bool) -> None:
    settings = replace(NO_COPIES, tokens=22 * PAGE, ratio=1, conservativeness=0.1, radix=radix)
    Script(settings, copies_fill_the_host).run()


@pytest.mark.parametrize(
    "scenario", ["tight device", "tight device, shared prefixes", "slow copies, python core", "retractions"]
)
def test_a_request_that_was_deferred_is_asked_about_when_the_answer_changes(
    scenario: str, monkeypatch: Patch
) -> None:
    """Here it is asked about in each step: where nothing was said to have changed, it is deferred again."""

    def may_have_room(self: Admission, queue: Any) -> bool:
        waits = self.is_waiting
        unchanged[:] = [waits and not real_may(self, queue)]
        return True

    def has_room(self: Admission, req: Any) -> bool:
        room = real_has(self, req)
        if unchanged == [True] and req.rid == deferred[-1]:
            outcomes.append(room)
        unchanged.clear()  # the next one is asked after this one was let in
        if not room:
            deferred.append(req.rid)
        return room

    real_may, real_has = Admission.may_have_room, Admission.has_room
    unchanged: list[bool] = []
    deferred: list[str] = []
    outcomes: list[bool] = []
    monkeypatch.setattr(Admission, "may_have_room", may_have_room)
    monkeypatch.setattr(Admission, "has_room", has_room)
    for seed in range(3):
        run(scenario, seed, 300)
    assert len(outcomes) > 10
    assert not any(outcomes), f"{sum(outcomes)} of {len(outcomes)} would have waited for nothing"


def memory_ends(drive: Script) -> Iterator[None]:
    """SGLang retracts until one request is left, and gives that one up too."""
    rids = [drive.send(3 * PAGE + 10, 5 * PAGE) for _ in range(3)]
    yield
    while not all(map(drive.has_started, rids)):
        yield
    for _ in range(70):
        yield
    coordinator = drive.scheduler.hisparse_coordinator
    assert coordinator.lifecycle.requests
    for client in drive.traffic.live.values():
        client.aborted = True
    coordinator.can_decode = lambda reqs: False
    yield
    del coordinator.can_decode
    while any(map(drive.is_live, rids)):
        yield


@pytest.mark.parametrize("overlap", [True, False])
def test_the_last_request_that_is_given_up_leaves_nothing(overlap: bool) -> None:
    seen = Script(replace(HYBRID, tokens=20 * PAGE, overlap=overlap), memory_ends).run()
    assert seen["retractions"] == 3, seen


def test_a_preemption_lets_in_the_request_it_is_for(monkeypatch: Patch) -> None:
    """Or else the victims are computed again for nothing, and again in the next step."""

    def preempt(self: Any, req: Any) -> bool:
        done = real_preempt(self, req)
        self.preempted_for = req if done else None
        return done

    def add(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        result = real_add(self, req, *args, **kwargs)
        if getattr(self, "preempted_for", None) is req:
            outcomes.append(req in self.can_run_list)
        return result

    ours: Any = adder_class(PrefillAdder)
    real_preempt, real_add = ours.preempt_to_schedule, ours.add_one_req
    monkeypatch.setattr(ours, "preempt_to_schedule", preempt)
    monkeypatch.setattr(ours, "add_one_req", add)
    outcomes: list[bool] = []
    run("preemption", 7, 330)
    assert outcomes
    assert all(outcomes), f"{outcomes.count(False)} of {len(outcomes)} preemptions were for nothing"
