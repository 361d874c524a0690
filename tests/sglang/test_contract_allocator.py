"""What SGLang expects of its allocator of slots.

| contract | test |
|---|---|
| ``size``, ``size_full``, ``page_size``, ``get_kvcache`` | ``test_sizes`` |
| page 0 is padding | ``test_page_0_is_never_handed_out`` |
| ``available_size`` | ``test_available_size_leaves_out_promised_pages`` |
| ``alloc_extend`` | ``test_alloc_extend_*`` |
| ``alloc_decode`` | ``test_alloc_decode_*`` |
| ``free``, ``free_segment(s)``, free groups | ``test_free_*``, ``test_segments_*``, ``test_a_free_group_*`` |
| ``clear`` | ``test_clear_*`` |
| ``request_slot_reserve``, ``get_extend_allocation_demand`` | ``test_nothing_is_reserved_*`` |
| ``create_prefill_budget`` | ``test_create_prefill_budget_*`` |
| ``evict_to_free_tokens`` | ``test_evict_to_free_tokens_*`` |
| ``check_decode_capacity`` | ``test_check_decode_capacity_*`` |
| ``max_new_tokens_for_memory`` | ``test_max_new_tokens_for_memory_*`` |
| ``alloc_logical_only``, ``configure_spec_scratch``: speculation, PD | refused: ``test_validation.py`` |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import LAYERS, ByHand
from engine import CONTEXT, PAGE, Engine
from scenarios import HYBRID
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from hisparse_sgl import transfers
from hisparse_sgl.transfers import upload_pair

PAGES, RATIO = 20, 2
SETTINGS = replace(HYBRID, tokens=PAGES * PAGE, ratio=RATIO, copy_rate=0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    built = Engine(SETTINGS, seed=0)
    yield built
    built.close()


@pytest.fixture
def hand(engine: Engine) -> Iterator[ByHand]:
    """Nothing is in use before a test, and after it, once its requests are released."""
    hand = ByHand(engine)
    yield hand
    hand.coordinator.check_integrity()
    hand.land()
    for request in list(hand.life.requests.values()):
        hand.release(request.req)
    hand.tree.reset()
    hand.allocator.clear()
    assert hand.allocator.available_size() == hand.allocator.size_full


def fill_host(hand: ByHand, free: int) -> None:
    """Leave so many host pages free; what fills them is not on the device."""
    while hand.life.allocator.num_free > free:
        req = hand.prefill(min(10, hand.life.allocator.num_free - free) * PAGE)
        hand.land()
        hand.coordinator.request_finished(req)


def test_sizes(hand: ByHand) -> None:
    allocator = hand.allocator
    assert allocator.size == allocator.size_full == RATIO * PAGES * PAGE
    assert (allocator.page_size, allocator.compress_ratio) == (PAGE, 1)
    assert allocator.get_kvcache() is hand.pool
    assert allocator.available_size() == allocator.size_full


def test_page_0_is_never_handed_out(hand: ByHand) -> None:
    fill_host(hand, 0)
    held = [page for request in hand.life.requests.values() for page in request.pages]
    assert sorted(held) == list(range(1, RATIO * PAGES + 1))
    assert hand.allocator.available_size() == 0


def test_available_size_leaves_out_promised_pages(hand: ByHand) -> None:
    full = hand.allocator.size_full
    req = hand.admit(5 * PAGE + 1)
    assert hand.allocator.available_size() == full - 6 * PAGE
    hand.extend([(req, 2 * PAGE)])
    assert hand.allocator.available_size() == full - 6 * PAGE
    hand.extend([(req, 5 * PAGE + 1)])
    assert hand.allocator.available_size() == full - 6 * PAGE
    hand.release(req)
    assert hand.allocator.available_size() == full


def test_alloc_extend_answers_slots_in_batch_and_position_order(hand: ByHand) -> None:
    one, two = hand.admit(200), hand.admit(90)
    first = hand.extend([(one, 70)])
    second = hand.extend([(two, 90), (one, 200)])
    assert first is not None and second is not None
    assert first.dtype == second.dtype == torch.int64
    assert torch.equal(first, hand.slots(one)[:70])
    assert torch.equal(second, torch.cat([hand.slots(two), hand.slots(one)[70:]]))
    assert torch.equal(hand.slots(one) % PAGE, torch.arange(200) % PAGE)


def test_alloc_extend_without_host_pages_answers_none_and_can_be_undone(hand: ByHand) -> None:
    fill_host(hand, 12)
    one, two = hand.admit(), hand.admit()
    assert hand.extend([(one, 8 * PAGE), (two, 5 * PAGE)]) is None
    last = hand.life.requests[two.rid]
    assert (last.pages, last.num_tokens) == ([], 0)
    hand.coordinator.check_integrity()
    for req in (one, two):
        hand.release(req)
    assert hand.allocator.available_size() == 12 * PAGE


def test_alloc_decode_answers_the_slot_of_each_new_position(hand: ByHand) -> None:
    reqs = [hand.prefill(tokens) for tokens in (PAGE - 1, 10, 2 * PAGE)]
    for _ in range(3):
        slots = hand.decode(reqs)
        assert slots.dtype == torch.int64
        assert slots.tolist() == [int(hand.slots(req)[-1]) for req in reqs]
        hand.forward(slots)
    for req in reqs:
        slots = hand.slots(req)
        assert torch.equal(slots % PAGE, torch.arange(len(slots)) % PAGE)


def test_alloc_decode_uploads_what_the_mirror_of_its_step_needs(
    hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = hand.coordinator
    monkeypatch.setattr(coordinator, "config", replace(coordinator.config, eager_host_mirror=True))
    monkeypatch.setattr(hand.life.pages, "eager_host_mirror", True)
    reqs = [hand.prefill(tokens) for tokens in (PAGE - 2, 10, 2 * PAGE)]
    uploads: list[tuple[Any, ...]] = []
    monkeypatch.setattr(transfers, "upload_pair", lambda *args: uploads.append(args) or upload_pair(*args))
    for count in range(1, 4):
        hand.forward(hand.decode(reqs))
        assert len(uploads) == count
    slots = hand.decode(reqs)
    hand.coordinator.request_finished(reqs[1])
    hand.forward(slots)
    assert len(uploads) == 5
    hand.land()
    durable = hand.slots(reqs[0])[:PAGE]
    for layer in LAYERS:
        host = hand.coordinator.host_pool.buffer[layer].view(torch.int64).view(-1, hand.pool.row_bytes // 8)
        for req in (reqs[0], reqs[2]):
            assert torch.equal(host[hand.slots(req)], hand.expected(hand.slots(req), layer))
    assert hand.life.pages.is_durable(int(durable[0]) // PAGE)


def test_free_of_a_segment_that_ends_mid_page_frees_the_page_once(hand: ByHand) -> None:
    req = hand.admit(PAGE + 6)
    slots = hand.extend([(req, PAGE + 6)])
    hand.coordinator.request_finished(req)
    hand.allocator.free_segment(slots, start_pos=0)
    assert hand.allocator.available_size() == hand.allocator.size_full
    hand.life.forget(req.rid)


def test_segments_free_each_page_once(hand: ByHand) -> None:
    req = hand.admit(4 * PAGE)
    slots = hand.extend([(req, 4 * PAGE)])
    assert slots is not None
    hand.coordinator.request_finished(req)
    hand.allocator.free_segments([(slots[: PAGE + 6], 0), (slots[2 * PAGE : -1], 2 * PAGE)])
    assert hand.allocator.available_size() == hand.allocator.size_full
    hand.life.forget(req.rid)


def test_a_free_group_frees_what_was_freed_in_it(hand: ByHand) -> None:
    req = hand.admit(3 * PAGE)
    slots = hand.extend([(req, 3 * PAGE)])
    assert slots is not None
    hand.coordinator.request_finished(req)
    hand.allocator.free_group_begin()
    hand.allocator.free(slots[:PAGE])
    hand.allocator.free(slots[PAGE:])
    hand.allocator.free_group_end()
    assert hand.allocator.available_size() == hand.allocator.size_full
    hand.life.forget(req.rid)


def test_free_of_no_slots(hand: ByHand) -> None:
    hand.allocator.free(torch.empty(0, dtype=torch.int64))
    assert hand.allocator.available_size() == hand.allocator.size_full


def test_clear_frees_all_but_the_pages_of_running_requests(hand: ByHand) -> None:
    hand.publish(range(2, 2 + 3 * PAGE))
    running = hand.prefill(PAGE)
    with pytest.raises(RuntimeError, match="while requests"):
        hand.allocator.clear()
    assert hand.allocator.available_size() == hand.allocator.size_full - 4 * PAGE
    hand.release(running)  # its copies are still in flight
    hand.tree.reset()
    hand.allocator.clear()
    assert hand.allocator.available_size() == hand.allocator.size_full
    assert hand.life.leases.num_free == PAGES and not hand.life.pages.flights


def test_nothing_is_reserved_besides_the_tokens(hand: ByHand) -> None:
    allocator, lens = hand.allocator, torch.tensor([100])
    assert allocator.request_slot_reserve(has_req_pool_slot=False, prefill_tokens=100) == 0
    assert allocator.request_slot_reserve(has_req_pool_slot=True) == 0
    demand = allocator.get_extend_allocation_demand(lens, lens, conservative_num_tokens=164, shard_size=1)
    assert demand == 0


def test_create_prefill_budget_counts_free_and_cached_host_tokens(hand: ByHand) -> None:
    hand.publish(range(2, 2 + 3 * PAGE))
    hand.admit(2 * PAGE)
    budget = hand.allocator.create_prefill_budget(hand.tree, num_mixed_decode_tokens=0)
    assert type(budget) is PrefillBudget
    assert budget.remaining_total == budget.remaining_current == hand.allocator.size_full - 2 * PAGE


def test_evict_to_free_tokens_never_evicts_for_device_pages(hand: ByHand) -> None:
    hand.publish(range(2, 2 + 3 * PAGE))
    hand.prefill(PAGES * PAGE)
    assert hand.life.leases.num_free == 0
    free = hand.allocator.available_size()
    assert hand.allocator.evict_to_free_tokens(hand.tree, free) is None
    assert hand.tree.evictable_size() == 3 * PAGE


def test_evict_to_free_tokens_evicts_host_pages(hand: ByHand) -> None:
    hand.publish(range(2, 2 + 3 * PAGE))
    free = hand.allocator.available_size()
    hand.allocator.evict_to_free_tokens(hand.tree, free + 1)
    assert hand.allocator.available_size() > free
    assert hand.allocator.available_size() + hand.tree.evictable_size() == hand.allocator.size_full
    assert hand.allocator.evict_to_free_tokens(None, free) is None


@pytest.mark.parametrize("cached", [False, True], ids=["host full", "host full of cached prefixes"])
def test_check_decode_capacity_needs_a_host_page_for_each_full_one(hand: ByHand, cached: bool) -> None:
    if cached:
        hand.publish(range(2, 2 + 3 * PAGE))
    fill_host(hand, 2)
    whole, part = hand.prefill(PAGE), hand.prefill(PAGE - 1)
    assert hand.allocator.available_size() == 0

    def capacity(*reqs: Any) -> bool:
        return hand.allocator.check_decode_capacity(num_tokens=PAGE, tree_cache=hand.tree, requests=reqs)

    assert capacity(part)
    assert capacity(whole) == capacity(whole, part) == cached


def test_check_decode_capacity_waits_for_copies_that_hold_device_pages(hand: ByHand) -> None:
    first = hand.prefill((PAGES - 4) * PAGE)
    hand.coordinator.collect()  # starts to copy them
    hand.prefill(3 * PAGE)
    growing = hand.prefill(PAGE)
    hand.release(first)
    assert hand.life.leases.num_free == 0
    assert hand.allocator.check_decode_capacity(num_tokens=PAGE, tree_cache=hand.tree, requests=[growing])


def test_max_new_tokens_for_memory_clips_to_one_request(hand: ByHand) -> None:
    longest = hand.life.longest_request
    assert longest >= CONTEXT
    ask = hand.allocator.max_new_tokens_for_memory
    window: dict[str, Any] = {"sliding_window_size": None, "chunk_size": None}
    assert ask(100, 10, token_capacity=10**6, **window) == 10
    assert ask(100, 10**6, token_capacity=10**6, **window) == longest - 100
    assert ask(100, 10**6, token_capacity=500, **window) == 400
    assert ask(longest, 1, token_capacity=10**6, **window) is None
