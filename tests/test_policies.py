"""What a random driver cannot tell apart: choices that change who waits or is found, never the bytes."""

from __future__ import annotations

import torch
from bench import PAGE, Bench, hot_request

from hisparse_sgl.requests import Admission, Deferred


def running(bench: Bench, rid: str, pages: int) -> None:
    """A request that has computed a prompt of its own."""
    assert isinstance(bench.pool.admit(rid, [ord(rid)] * pages * PAGE), Admission)
    bench.forward(rid, pages * PAGE)


def test_the_largest_context_is_given_a_hot_region_first() -> None:
    bench = Bench()
    for rid, pages in (("a", 5), ("b", 7), ("c", 6)):
        running(bench, rid, pages)
    requests = bench.coordinator.requests
    assert bench.coordinator.residency.relieve(9, requests.values())
    assert [rid for rid, request in requests.items() if request.hot_pages] == ["b"]


def test_a_step_gives_a_hot_region_where_few_pages_are_free() -> None:
    bench = Bench(device_pages=101, host_pages=120, max_requests=6)
    for rid in "abcdef":
        running(bench, rid, 15)
    requests = bench.coordinator.requests
    assert not any(request.hot_pages for request in requests.values())
    bench.push_out()
    hot = bench.coordinator.leases.lease_hot(1)  # nine pages are free, the watermark is ten
    bench.pool.step_done()
    assert [rid for rid, request in requests.items() if request.hot_pages] == ["a"]
    bench.coordinator.leases.release_hot(hot)
    bench.pool.check_integrity()


def test_a_retraction_publishes_what_became_known_since_the_last_step() -> None:
    bench = Bench()
    bench.pool.admit("a", [1])
    bench.forward("a", 3 * PAGE)
    bench.pool.append_tokens("a", list(range(3 * PAGE - 1)))
    bench.pool.retract("a")
    again = bench.pool.admit("a", [1, *range(3 * PAGE - 1)])
    assert again == Admission(cached_tokens=2 * PAGE, resident_tokens=2 * PAGE)


def test_a_flush_empties_the_hot_regions() -> None:
    bench = Bench()
    hot_request(bench, "a", 12)
    region = bench.coordinator.requests["a"].region
    bench.pool.begin_step(["a"])
    bench.pool.swap_in(0, torch.tensor([[3, 9]], dtype=torch.int32))
    bench.pool.step_done()
    assert int((bench.pool.runtime.hot.keys[0, region] >= 0).sum()) == 2
    bench.pool.flush()
    bench.pool.begin_step(["a"])
    assert int((bench.pool.runtime.hot.keys[0, region] >= 0).sum()) == 0


def test_the_page_table_forgets_pages_that_are_taken_back_and_requests_that_end() -> None:
    bench = Bench()
    for rid in "ab":
        running(bench, rid, 1)
        bench.forward(rid, 3 * PAGE)
    bench.pool.rewind("a", 2 * PAGE)
    bench.pool.finish("b")
    assert bench.pool.audit() == 0  # brings the tables up to date
    table = bench.pool.runtime.tables.page_table
    assert table[0, :2].tolist() == bench.coordinator.requests["a"].pages
    assert not table[0, 2:].any()
    assert not table[1:].any()


def test_the_admission_window_counts_prompts_until_they_are_computed() -> None:
    bench = Bench(admission_window=20)
    assert isinstance(bench.pool.admit("a", [1] * 24), Admission)  # one prompt is always let in
    assert bench.pool.admit("b", [2] * 4) == Deferred("admission window")
    bench.forward("a", 24)
    assert isinstance(bench.pool.admit("b", [2] * 12), Admission)
    assert bench.pool.admit("c", [3] * 9) == Deferred("admission window")
    assert isinstance(bench.pool.admit("c", [3] * 8), Admission)


def test_a_prompt_in_a_hot_region_takes_no_part_in_the_admission_window() -> None:
    bench = Bench(admission_window=20, device_pages=12)
    assert bench.pool.admit("a", [1] * 48) == Admission(0, 0, hot=True)
    assert isinstance(bench.pool.admit("b", [2] * 12), Admission)


def test_an_unpinned_page_of_the_prefix_counts_as_one_that_is_taken() -> None:
    bench = Bench(device_pages=12)
    bench.publish("a", [1] * 17)
    running(bench, "b", 3)
    assert bench.pool.admit("c", [1] * 28) == Deferred("device pages")
    assert bench.pool.admit("c", [1] * 24) == Admission(cached_tokens=16, resident_tokens=16)


def test_a_spill_moves_no_bytes_of_a_page_whose_rows_were_mirrored() -> None:
    bench = Bench(eager_host_mirror=True)
    bench.pool.admit("a", [1])
    for _ in range(PAGE):
        bench.forward("a", 1)
    assert bench.pool.counters.pages_spilled == 1
    assert bench.pool.counters.device_to_host_bytes == PAGE * 16


def test_a_context_that_would_gain_nothing_is_given_no_hot_region() -> None:
    bench = Bench(top_k=12)  # hot regions of 6 pages
    running(bench, "a", 8)
    requests = bench.coordinator.requests
    assert not bench.coordinator.residency.relieve(1000, requests.values())
    assert not requests["a"].hot_pages
    bench.forward("a", 1)
    assert not bench.coordinator.residency.relieve(1000, requests.values())
    assert requests["a"].hot_pages


def sharing(bench: Bench, prefix_pages: int, own_pages: int, rids: str = "ab") -> None:
    """Requests that have all but their last ``own_pages`` pages in common."""
    prefix = [1] * prefix_pages * PAGE
    bench.publish("first", [*prefix, 2])
    for rid in rids:
        admitted = bench.pool.admit(rid, [*prefix, *[ord(rid)] * own_pages * PAGE])
        assert admitted == Admission(prefix_pages * PAGE, prefix_pages * PAGE)
        bench.forward(rid, own_pages * PAGE)


def test_requests_that_share_their_pages_keep_them_where_regions_would_take_more() -> None:
    bench = Bench(top_k=12, device_pages=40)  # hot regions of 6 pages
    sharing(bench, prefix_pages=11, own_pages=2)
    requests, residency = bench.coordinator.requests, bench.coordinator.residency
    assert len(requests["a"].pages) > residency.sizes.hot_pages + 2
    available = residency.available
    assert not residency.relieve(1000, requests.values())
    assert not any(request.hot_pages for request in requests.values())
    assert residency.available == available


def test_sharers_whose_share_is_less_than_a_region_are_not_looked_at_page_by_page() -> None:
    for prefix_pages, pays in ((11, False), (13, True)):
        bench = Bench(top_k=12, device_pages=40)
        sharing(bench, prefix_pages, own_pages=2)
        residency = bench.coordinator.residency
        assert residency.available >= 2 * residency.sizes.hot_pages
        assert residency._can_pay(list(bench.coordinator.requests.values())) == pays


def test_requests_that_share_their_pages_yield_together_where_that_gives_pages_back() -> None:
    bench = Bench(top_k=12, device_pages=40)
    sharing(bench, prefix_pages=13, own_pages=2)
    requests, residency = bench.coordinator.requests, bench.coordinator.residency
    available = residency.available
    residency.relieve(1000, requests.values())
    assert all(request.hot_pages for request in requests.values())
    assert residency.available == available + 13 - 2 * residency.sizes.hot_pages
    bench.pool.check_integrity()


def test_requests_that_share_their_pages_keep_them_where_one_region_fits_and_not_both() -> None:
    bench = Bench(top_k=12, device_pages=28)
    sharing(bench, prefix_pages=13, own_pages=2)
    requests, residency = bench.coordinator.requests, bench.coordinator.residency
    assert residency.sizes.hot_pages <= residency.available < 2 * residency.sizes.hot_pages
    residency.relieve(1000, requests.values())
    assert not any(request.hot_pages for request in requests.values())


def test_a_request_that_shares_its_pages_grows_into_the_last_ones() -> None:
    bench = Bench(top_k=12, device_pages=28, context_len=128, host_pages=60)
    sharing(bench, prefix_pages=11, own_pages=2)
    leases = bench.coordinator.leases
    while leases.num_free:
        for rid in "ab"[: leases.num_free]:
            bench.forward(rid, PAGE)
    assert isinstance(bench.pool.extend("a", 1), Deferred)
    bench.pool.retract("b")
    bench.forward("a", 1)
    assert len(bench.coordinator.requests) == 1


def test_a_request_that_shares_its_pages_stays_able_to_yield_when_it_is_alone() -> None:
    bench = Bench(top_k=12, device_pages=28, context_len=128, host_pages=60)
    sharing(bench, prefix_pages=16, own_pages=1)
    for _ in range(40):
        if isinstance(bench.pool.extend("a", PAGE), Deferred):
            if "b" not in bench.coordinator.requests:
                break
            bench.pool.retract("b")
            continue
        bench.pool.begin_step(["a"])
        bench.pool.step_done()
        bench.land()
        if len(bench.coordinator.requests["a"].pages) == 32:
            break
    assert len(bench.coordinator.requests["a"].pages) == 32 and bench.coordinator.requests["a"].hot_pages


def test_requests_hold_the_lowest_free_regions_and_no_more_than_are_allowed() -> None:
    bench = Bench(device_pages=60, host_pages=60, max_requests=6, max_hot_requests=2)
    for rid in "abc":
        running(bench, rid, 9)
    requests, residency = bench.coordinator.requests, bench.coordinator.residency
    residency.relieve(1000, requests.values())
    assert {rid: request.region for rid, request in requests.items()} == {"a": 0, "b": 1, "c": -1}
    assert residency.available >= residency.sizes.hot_pages and not residency.can_give_hot
    bench.pool.finish("a")
    residency.relieve(1000, requests.values())
    assert {rid: request.region for rid, request in requests.items()} == {"b": 1, "c": 0}
    bench.pool.check_integrity()


def test_a_prompt_that_needs_a_hot_region_waits_for_a_free_one() -> None:
    bench = Bench(device_pages=14, max_hot_requests=1)
    assert bench.pool.admit("a", [1] * 52) == Admission(0, 0, hot=True)
    assert bench.pool.admit("b", [2] * 52) == Deferred("device pages")
    bench.pool.abort("a")
    assert bench.pool.admit("b", [2] * 52) == Admission(0, 0, hot=True)


def test_an_admission_evicts_no_more_of_the_tree_than_it_lacks() -> None:
    bench = Bench(context_len=44, host_pages=12)
    bench.publish("a", [1] * 17)
    assert isinstance(bench.pool.admit("b", [2] * 32), Admission)
    assert bench.coordinator.tree.num_pages == 3
