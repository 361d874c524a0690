"""What SGLang expects of its HiSparse coordinator, method by method.

| contract | test |
|---|---|
| ``swap_in_selected_pages`` | ``test_swap_in_*`` |
| in a CUDA graph: fixed addresses, contents of buffers | ``test_a_replay_*`` |
| layers that share a top-k | ``test_a_follower_*`` |
| ``num_real_reqs`` | ``test_swap_in_*``, ``test_num_real_reqs_*`` |
| ``request_finished`` | ``test_request_finished_*`` |
| ``retract_req``; aborts between chunks | ``test_contract_scheduler.py`` |
| ``admit_request_into_staging``, ``collect_ready_reqs`` | ``test_nothing_is_staged`` |
| ``has_ongoing_staging``, ``ack_staging_queue`` | ``test_nothing_is_staged`` |
| ``map_last_loc_to_buffer``, ``wait_for_pending_backup`` | ``test_nothing_is_backed_up_late`` |
| ``get_token_stats`` | ``test_get_token_stats`` |
| ``set_decode_producer_stream`` | ``test_copies_run_behind_the_producer_stream`` |
| ``destroy`` | ``test_destroy_*`` |
| ``admit_request_direct``: PD; ``*_spec_*``: speculation | refused: ``test_validation.py`` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import LAYERS, ByHand
from engine import PAGE, Engine
from scenarios import HYBRID
from streams import Stream

PAGES, RATIO, TOP_K, BATCH = 20, 3, 48, 4
SETTINGS = replace(HYBRID, tokens=PAGES * PAGE, ratio=RATIO, copy_rate=0.0, top_k=TOP_K)


@pytest.fixture
def hand() -> Iterator[ByHand]:
    engine = Engine(SETTINGS, seed=0)
    yield ByHand(engine)
    engine.close()


class Step:
    """The buffers of a decode step: SGLang fills them anew for each, at the same addresses."""

    def __init__(self, hand: ByHand) -> None:
        self.hand = hand
        self.rows = torch.full((BATCH,), 5)  # behind the requests those of an earlier batch
        self.lens = torch.ones(BATCH, dtype=torch.int64)
        self.top_k = torch.full((BATCH, TOP_K), -1, dtype=torch.int32)

    def fill(self, reqs: list[Any], seed: int) -> None:
        """Random positions in random order, every fifth masked; garbage behind the requests."""
        random = torch.Generator().manual_seed(seed)
        self.hand.coordinator.num_real_reqs.fill_(len(reqs))
        self.top_k.fill_(70)
        for i, req in enumerate(reqs):
            count = self.hand.life.requests[req.rid].num_tokens
            self.rows[i], self.lens[i] = req.kv.req_pool_idx, count
            self.top_k[i] = torch.randperm(count, generator=random)[:TOP_K]
            self.top_k[i, ::5] = -1

    def swap_in(self, layer: int) -> torch.Tensor:
        return self.hand.coordinator.swap_in_selected_pages(self.rows, self.lens, self.top_k, layer)

    def check(self, reqs: list[Any], found: torch.Tensor, layer: int) -> None:
        """Each row holds what was written for the position that stands in its place."""
        assert found.shape == (BATCH, TOP_K) and found.dtype == torch.int32
        for i, req in enumerate(reqs):
            masked = self.top_k[i] < 0
            assert torch.equal(found[i] < 0, masked)
            slots = self.hand.slots(req)[self.top_k[i][~masked].long()]
            assert torch.equal(self.hand.held(found[i][~masked], layer), self.hand.expected(slots, layer))
        assert (found[len(reqs) :] == -1).all()


def resident(hand: ByHand) -> Any:
    return hand.prefill(3 * PAGE + 5)


def hot(hand: ByHand) -> Any:
    """Most of its rows are not on the device."""
    req = hand.prefill(8 * PAGE + 5)
    hand.cool(req)
    hand.coordinator.before_forward()
    return req


KINDS = pytest.mark.parametrize("make", [resident, hot])


@KINDS
def test_swap_in_answers_rows_in_the_order_of_the_top_k(hand: ByHand, make: Callable[..., Any]) -> None:
    reqs, step = [make(hand), resident(hand)], Step(hand)
    step.fill(reqs, seed=1)
    for layer in LAYERS:
        step.check(reqs, step.swap_in(layer), layer)
    hand.coordinator.check_integrity()


@KINDS
def test_a_replay_reads_its_buffers_anew_and_answers_at_the_same_address(
    hand: ByHand, make: Callable[..., Any]
) -> None:
    """What a graph replays are the launches of one call: fewer requests, other rows, other positions."""
    one, two, step = make(hand), resident(hand), Step(hand)
    addresses = set()
    for seed, reqs in enumerate(([one, two], [two], [two, one], [], [one])):
        step.fill(reqs, seed)
        for layer in LAYERS:
            found = step.swap_in(layer)
            step.check(reqs, found, layer)
            addresses.add((layer, found.data_ptr()))
        hand.forward(hand.decode([one, two]))
    assert len(addresses) == len(LAYERS)


@KINDS
def test_a_follower_answers_its_leaders_rows(hand: ByHand, make: Callable[..., Any]) -> None:
    """With bytes of its own, whatever top-k it is called with."""
    reqs, step = [make(hand)], Step(hand)
    step.fill(reqs, seed=3)
    leader = step.swap_in(0).clone()
    asked = step.top_k.clone()
    step.top_k.fill_(0)
    follower = step.swap_in(1)
    assert torch.equal(follower, leader)
    step.top_k.copy_(asked)
    step.check(reqs, follower, 1)


def test_num_real_reqs_is_written_when_it_changes(hand: ByHand) -> None:
    real = hand.coordinator.num_real_reqs
    assert (real.on_device.dtype, real.on_device.device) == (torch.int32, hand.pool.rows.device)
    versions = []
    for count in (3, 3, 2, 2, 3):
        real.fill_(count)
        assert real.on_device.tolist() == [count]
        versions.append(real.on_device._version)
    assert [b - a for a, b in pairwise(versions)] == [0, 1, 0, 1]


@KINDS
def test_request_finished_leaves_what_a_step_in_flight_reads(hand: ByHand, make: Callable[..., Any]) -> None:
    """The step was launched before the end is known; its layers run while other requests get the pages."""
    ending, step = make(hand), Step(hand)
    step.fill([ending], seed=4)
    slots = hand.slots(ending)
    hand.land()
    hand.release(ending)
    other = hand.admit(PAGES * PAGE)
    assert hand.extend([(other, PAGES * PAGE)]) is not None, "all device pages are handed out again"
    hand.slots = lambda req: slots  # type: ignore[method-assign]
    for layer in LAYERS:
        step.check([ending], step.swap_in(layer), layer)


def test_nothing_is_staged(hand: ByHand) -> None:
    req = SimpleNamespace(hisparse_staging=True)
    hand.coordinator.admit_request_into_staging(req)
    assert not req.hisparse_staging
    assert not hand.coordinator.has_ongoing_staging()
    assert hand.coordinator.collect_ready_reqs() == []
    assert [act.req for act in hand.coordinator.ack_staging_queue] == []


def test_nothing_is_backed_up_late(hand: ByHand) -> None:
    req = hand.prefill(10)
    lens, slots = torch.tensor([11]), hand.decode([req])
    rows = torch.tensor([req.kv.req_pool_idx])
    hand.coordinator.map_last_loc_to_buffer(lens, slots, rows, lens, rows)
    hand.coordinator.wait_for_pending_backup()
    hand.forward(slots)
    hand.coordinator.check_integrity()


def test_get_token_stats(hand: ByHand) -> None:
    req = hand.prefill(3 * PAGE + 1)
    stats = hand.coordinator.get_token_stats()
    assert (stats.device_tokens, stats.host_tokens) == (4 * PAGE, 4 * PAGE)
    assert (stats.device_token_usage, stats.host_token_usage) == (4 / PAGES, 4 / (RATIO * PAGES))
    hand.land()
    hand.coordinator.request_finished(req)
    stats = hand.coordinator.get_token_stats()  # the tail page is not durable: only its end frees it
    assert (stats.device_tokens, stats.host_tokens) == (PAGE, 4 * PAGE)
    hand.life.pages.free(hand.life.requests[req.rid].pages)
    hand.life.forget(req.rid)
    stats = hand.coordinator.get_token_stats()
    assert (stats.device_tokens, stats.host_tokens, stats.device_token_usage) == (0, 0, 0.0)


def test_copies_run_behind_the_producer_stream(hand: ByHand) -> None:
    producer = Stream(hand.device, "producer")
    hand.coordinator.set_decode_producer_stream(producer)
    req = hand.admit(PAGE)
    slots = hand.extend([(req, PAGE)])
    assert slots is not None
    hand.coordinator.before_forward()
    hand.device.forward.synchronize()
    producer.put(lambda: [hand.write(slots, layer) for layer in LAYERS])  # type: ignore[arg-type,func-returns-value]
    hand.coordinator.after_forward()
    hand.land()
    page = hand.coordinator.host_pool.buffer[:, int(slots[0]) // PAGE]
    for layer in LAYERS:
        data = page[layer].view(torch.int64).view(PAGE, -1)
        assert torch.equal(data, hand.expected(slots, layer))


def test_destroy_gives_the_host_memory_back_and_may_be_called_again(hand: ByHand) -> None:
    hand.prefill(3 * PAGE)
    for _ in range(2):
        hand.coordinator.destroy()
        with pytest.raises(ValueError, match="before close"):
            _ = hand.coordinator.host_pool.buffer


def test_destroy_gives_the_host_memory_back_after_an_exception(
    hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(hand.coordinator.runtime, "fill", broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            hand.coordinator.destroy()
        with pytest.raises(ValueError, match="before close"):
            _ = hand.coordinator.host_pool.buffer
