"""Life-cycle cases, each once a fault or the reason for a rule, with copies that land when told to."""

from __future__ import annotations

import pytest
import torch
from bench import PAGE, Bench, fail_once, hot_request

from hisparse_sgl.pages import PageState
from hisparse_sgl.requests import Admission, Deferred


def test_extend_waits_for_the_restore_however_often_it_is_asked() -> None:
    bench = Bench()
    bench.publish("a", list(range(9)))
    bench.push_out()
    assert bench.pool.admit("b", list(range(9))) == Admission(cached_tokens=8, resident_tokens=0)
    for _ in range(4):
        assert bench.pool.extend("b", 1) == Deferred("restoring")
    bench.land()
    assert isinstance(bench.pool.extend("b", 1), torch.Tensor)


def test_a_second_rewind_still_waits_for_pages_of_the_first() -> None:
    bench = Bench()
    hot_request(bench, "a", 12)
    request = bench.coordinator.requests["a"]
    bench.pool.rewind("a", 7 * PAGE)
    assert bench.pool.extend("a", 1) == Deferred("restoring")
    bench.pool.rewind("a", 5 * PAGE + 2)
    bench.transfers.failures["to_device"] = 1  # pages 5 and 6: retried behind the restore of page 4
    assert bench.pool.extend("a", 1) == Deferred("restoring")
    bench.transfers.land("to_device", 2)
    assert bench.pool.extend("a", 1) == Deferred("restoring")
    assert request.restoring == [request.pages[5]]
    bench.pool.check_integrity()
    bench.land()
    assert isinstance(bench.pool.extend("a", 1), torch.Tensor)


def test_a_page_that_waits_for_its_spill_is_not_spilled_while_it_is_written_again() -> None:
    bench = Bench(max_spill_pages=1)
    bench.pool.admit("a", [1])
    bench.forward("a", 3 * PAGE, land=False)
    page = bench.coordinator.requests["a"].pages[2]
    assert bench.coordinator.pages.states[page] is PageState.DIRTY
    bench.pool.rewind("a", 2 * PAGE + 1)
    bench.pool.extend("a", 1)
    bench.land()
    assert bench.coordinator.pages.states[page] is PageState.DIRTY
    bench.pool.begin_step(["a"])
    bench.pool.step_done()
    bench.forward("a", 2)
    assert bench.coordinator.pages.states[page] is PageState.DURABLE


def test_a_step_under_pressure_spills_no_more_than_it_may() -> None:
    bench = Bench(device_pages=12, max_spill_pages=2)
    bench.pool.admit("a", list(range(32)))
    bench.forward("a", 32, land=False)
    pages = bench.coordinator.pages
    assert not bench.coordinator.residency.relieve(11, bench.coordinator.requests.values())
    assert (len(pages.spill_ids), len(pages.to_spill)) == (2, 6)
    bench.land()
    assert bench.pool.counters.pages_spilled == 8


def test_a_page_rewritten_while_it_is_spilled_is_not_durable_by_that_copy() -> None:
    bench = Bench()
    bench.pool.admit("a", [1])
    bench.forward("a", 2 * PAGE, land=False)
    page = bench.coordinator.requests["a"].pages[1]
    assert bench.coordinator.pages.states[page] is PageState.SPILLING
    bench.pool.rewind("a", PAGE + 1)
    bench.pool.extend("a", 1)
    bench.land()
    assert bench.coordinator.pages.states[page] is PageState.DIRTY
    assert bench.coordinator.tree.num_pages == 0


def test_rewind_to_the_present_length_keeps_the_tokens_that_are_known() -> None:
    bench = Bench()
    bench.pool.admit("a", list(range(9)))
    bench.forward("a", 5)
    bench.pool.rewind("a", 5)
    bench.forward("a", 4)
    assert bench.coordinator.tree.num_pages == 2


def test_rows_taken_back_in_an_open_step_do_not_count_as_written() -> None:
    bench = Bench()
    bench.pool.admit("a", [1])
    bench.pool.extend("a", 6)
    bench.pool.begin_step(["a"])
    bench.pool.rewind("a", 3)
    bench.coordinator.extend("a", 3)  # an engine that schedules ahead
    bench.pool.step_done()
    request = bench.coordinator.requests["a"]
    assert (request.num_settled, request.num_tokens) == (3, 6)


def test_no_page_is_handed_out_while_a_step_is_open() -> None:
    bench = Bench()
    bench.pool.admit("a", [1])
    bench.pool.extend("a", 6)
    bench.pool.begin_step(["a"])
    calls = {
        "admit": lambda: bench.pool.admit("b", [1]),
        "extend": lambda: bench.pool.extend("a", 1),
        "begin_step": lambda: bench.pool.begin_step(["a"]),
        "wait": lambda: bench.pool.wait(),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} was called while a step is open"):
            call()
    bench.pool.abort("a")  # the forward failed: its requests end, and so does the step
    bench.pool.admit("b", [1])
    bench.forward("b", 1)


def test_begin_step_refuses_a_request_whose_prefix_is_on_its_way() -> None:
    bench = Bench()
    bench.publish("a", list(range(9)))
    bench.push_out()
    bench.pool.admit("b", list(range(9)))
    with pytest.raises(ValueError, match="wait for pages to be restored"):
        bench.pool.begin_step(["b"])
    bench.land()
    bench.pool.begin_step(["b"])


@pytest.mark.parametrize("lost", ["mirror", "spill"])
def test_rows_whose_copy_cannot_start_reach_the_host_later(lost: str) -> None:
    bench = Bench(eager_host_mirror=True)
    bench.pool.admit("a", list(range(9)))
    slots = bench.pool.extend("a", 7)
    assert isinstance(slots, torch.Tensor)
    bench.pool.begin_step(["a"])
    bench.pool.write(0, slots, torch.full((7, 16), 7, dtype=torch.uint8))
    fail_once(bench.transfers, lost)
    with pytest.raises(MemoryError):
        bench.pool.step_done()
    bench.pool.check_integrity()
    slots = bench.pool.extend("a", 1)
    assert isinstance(slots, torch.Tensor)
    bench.pool.begin_step(["a"])
    bench.pool.write(0, slots, torch.full((1, 16), 7, dtype=torch.uint8))
    bench.pool.step_done()
    bench.land()
    pages = bench.coordinator.requests["a"].pages
    assert [bench.coordinator.pages.states[page] for page in pages] == [PageState.DURABLE] * 2
    assert bench.pool.host_pool.buffer[0, pages].eq(7).all()
    assert bench.pool.audit() == 0


def test_tables_that_could_not_be_brought_up_to_date_are_so_at_the_next_try() -> None:
    bench = Bench()
    bench.pool.admit("a", [1])
    bench.pool.extend("a", 7)
    fail_once(bench.pool.runtime, "apply")
    with pytest.raises(MemoryError):
        bench.pool.begin_step(["a"])
    bench.forward("a", 6)
    tables, leases = bench.pool.runtime.tables, bench.coordinator.leases
    assert tables.resident_page.tolist() == leases.resident_page
    assert tables.page_table[0, :4].tolist() == bench.coordinator.requests["a"].pages


def test_an_admission_whose_restore_cannot_start_leaves_nothing_behind() -> None:
    bench = Bench()
    tokens = list(range(13))
    bench.publish("a", tokens)
    [last, *_] = reversed([node.page for node in bench.coordinator.tree.nodes.values()])
    bench.push_out()
    bench.pool.admit("b", tokens[:5])  # one page of the prefix is on the device again
    bench.land()
    bench.pool.abort("b")
    fail_once(bench.transfers, "restore")
    with pytest.raises(MemoryError):
        bench.pool.admit("c", tokens)
    bench.pool.check_integrity()
    assert not bench.coordinator.requests
    assert not bench.coordinator.leases.device_page_of(last)
    assert bench.pool.admit("c", tokens) == Admission(12, 4)
    bench.land()
    bench.forward("c", 1)


def test_a_request_ends_after_the_copies_into_its_hot_region(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    calls: list[str] = []
    monkeypatch.setattr(bench.pool.runtime, "join", lambda: calls.append("join"))
    for how in ("retract", "finish", "abort"):
        monkeypatch.setattr(bench.coordinator, how, lambda rid, how=how: calls.append(how))
        getattr(bench.pool, how)("a")
    assert calls == ["join", "retract", "join", "finish", "join", "abort"]


def test_growth_that_can_never_fit_is_refused_and_not_deferred() -> None:
    bench = Bench(device_pages=9)
    bench.pool.admit("a", [1])
    with pytest.raises(ValueError, match="smaller pieces"):
        bench.pool.extend("a", 7 * PAGE)
    bench.forward("a", 5 * PAGE)
    assert bench.coordinator.requests["a"].num_tokens == 5 * PAGE


@pytest.mark.parametrize("chunk", [1, 2, 7, 8])
@pytest.mark.parametrize("eager", [True, False])
def test_a_lone_request_runs_to_its_longest_context_in_the_smallest_pool(chunk: int, eager: bool) -> None:
    bench = Bench(device_pages=6, host_pages=17, eager_host_mirror=eager, max_spill_pages=1)
    bench.pool.admit("a", list(range(16)))
    for first, end in ((0, 16), (16, 64)):
        for start in range(first, end, chunk):
            bench.forward("a", min(chunk, end - start), land=False)
    assert bench.coordinator.requests["a"].hot_pages


def test_a_prompt_extended_past_its_end_before_its_step_leaves_room_for_the_region() -> None:
    bench = Bench(device_pages=12)
    bench.pool.admit("a", list(range(32)))
    bench.pool.extend("a", 32)
    while isinstance(bench.pool.extend("a", PAGE), torch.Tensor):
        pass
    bench.pool.begin_step(["a"])
    bench.pool.step_done()
    while bench.coordinator.requests["a"].num_tokens < 64:
        bench.forward("a", PAGE)


def test_a_lone_request_gets_in_after_others_whose_copies_are_not_through() -> None:
    bench = Bench(context_len=44, device_pages=13, host_pages=12, max_spill_pages=1)
    for rid in "abc":
        bench.pool.admit(rid, [ord(rid)] * 12)
        bench.forward(rid, 12, land=False)
        bench.pool.finish(rid)
    assert bench.coordinator.gate.num_detached == 3
    assert isinstance(bench.pool.admit("d", [1] * 40), Admission)
    bench.forward("d", 40)


def test_a_deferred_admission_evicts_nothing() -> None:
    bench = Bench(context_len=44, host_pages=12)
    bench.publish("a", list(range(17)))
    bench.pool.admit("b", [7] * 28)
    bench.forward("b", 28)
    pages = bench.coordinator.tree.num_pages
    assert bench.pool.admit("c", [8] * 44) == Deferred("host pages")
    assert bench.coordinator.tree.num_pages == pages


def test_a_deferred_admission_counts_as_no_use_of_the_prefix() -> None:
    bench = Bench(max_requests=1)
    bench.publish("a", list(range(17)))
    bench.pool.admit("b", [7])
    uses = [node.uses for node in bench.coordinator.tree.nodes.values()]
    assert bench.pool.admit("c", list(range(17))) == Deferred("request rows")
    assert [node.uses for node in bench.coordinator.tree.nodes.values()] == uses


def test_several_requests_wait_for_one_restore_that_fails_twice() -> None:
    bench = Bench()
    bench.publish("a", list(range(9)))
    bench.push_out()
    for rid in "bcd":
        bench.pool.admit(rid, list(range(9)))
    assert len(bench.transfers.queues["to_device"]) == 1
    bench.transfers.failures["to_device"], bench.transfers.failure = 2, "garbage"
    bench.pool.abort("b")
    for _ in range(2):
        bench.transfers.land("to_device", 1)
        assert bench.pool.extend("c", 1) == bench.pool.extend("d", 1) == Deferred("restoring")
        bench.pool.check_integrity()
    bench.pool.finish("c")
    bench.land()
    assert isinstance(bench.pool.extend("d", 1), torch.Tensor)
    assert bench.pool.counters.restore_failures == 2
    assert bench.pool.audit() == 0


@pytest.mark.parametrize("end", ["finish", "abort", "retract"])
@pytest.mark.parametrize("fails", [0, 1])
def test_a_request_may_end_while_its_prefix_is_restored(end: str, fails: int) -> None:
    bench = Bench()
    bench.publish("a", list(range(9)))
    bench.push_out()
    bench.pool.admit("b", list(range(9)))
    getattr(bench.pool, end)("b")
    bench.transfers.failures["to_device"], bench.transfers.failure = fails, "garbage"
    bench.land()
    assert bench.pool.audit() == 0
    assert bench.pool.admit("c", list(range(9))) == Admission(8, 0 if fails else 8)


def test_flush_cancels_what_is_detached_and_running() -> None:
    bench = Bench()
    bench.pool.admit("a", list(range(9)))
    bench.forward("a", 9, land=False)
    bench.pool.admit("b", list(range(20, 29)))
    bench.forward("b", 9, land=False)
    bench.pool.finish("a")
    bench.pool.flush()
    bench.land()
    bench.pool.finish("b")
    assert bench.coordinator.tree.num_pages == 0
    assert bench.coordinator.allocator.num_free == 39


def test_two_requests_that_compute_the_same_prefix_share_one_copy_afterwards() -> None:
    bench = Bench()
    for rid in "ab":
        bench.pool.admit(rid, list(range(9)))
    for rid in "ab":
        bench.forward(rid, 9)
    assert bench.coordinator.tree.num_pages == 2
    for rid in "ab":
        bench.pool.finish(rid)
    assert bench.coordinator.allocator.num_free == 37
    bench.pool.check_integrity()


def test_retries_end_when_the_copies_succeed_again() -> None:
    bench = Bench(device_pages=6, host_pages=17)
    bench.transfers.failures["to_host"], bench.transfers.failure = 50, "garbage"
    bench.pool.admit("a", list(range(16)))
    bench.forward("a", 16, land=False)
    assert bench.pool.extend("a", 5) == Deferred("device pages")
    bench.pool.finish("a")
    assert bench.pool.admit("b", [9] * 16) == Deferred("device pages")
    bench.land()
    assert bench.coordinator.tree.num_pages == 4
    assert isinstance(bench.pool.admit("b", [9] * 16), Admission)
    assert bench.pool.counters.spill_failures == 50


def test_the_audit_leaves_out_hot_rows_of_a_page_that_is_not_durable() -> None:
    bench = Bench()
    hot_request(bench, "a", 12)
    bench.pool.begin_step(["a"])
    assert bench.pool.swap_in(0, torch.tensor([[20, 21]], dtype=torch.int32)).min() > 0
    bench.pool.step_done()
    bench.pool.rewind("a", 22)
    assert bench.pool.extend("a", 2) == Deferred("restoring")
    bench.land()
    bench.transfers.failures["to_host"], bench.transfers.failure = 3, "garbage"
    bench.forward("a", 2, land=False)
    for _ in range(3):  # the rows, the page without bytes, the page with all of them
        bench.transfers.land("to_host", 1)
        bench.coordinator.collect()
        assert bench.pool.audit() == 0
    page = bench.coordinator.requests["a"].pages[5]
    assert bench.pool.host_pool.buffer[0, page].eq(0xA5).all()
    bench.land()
    assert bench.pool.audit() == 0
