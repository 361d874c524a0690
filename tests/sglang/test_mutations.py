"""Known faults, put into the plugin on purpose: rows, answers and leaks must show each of them.

The plugin's own invariants are switched off: they must not be needed to notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from drive import Drive
from scenarios import SCENARIOS
from streams import StreamTransfers

from hisparse_sgl import runtime
from hisparse_sgl.integrations.sglang import tree
from hisparse_sgl.integrations.sglang.coordinator import Coordinator
from hisparse_sgl.integrations.sglang.lifecycle import Lifecycle, ServedRequest
from hisparse_sgl.integrations.sglang.tree import GatedRadixCache
from hisparse_sgl.kernels.state import CopyPlan, HotState
from hisparse_sgl.mem_pool.leases import DeviceLeases
from hisparse_sgl.pages import Flight, Pages, PageState
from hisparse_sgl.residency import Residency
from hisparse_sgl.runtime import Runtime
from hisparse_sgl.transfer_queue import Completion

Patch = pytest.MonkeyPatch
TIGHT = "tight device"
SHARED = "tight device, shared prefixes"
TRIES = 8
STEPS = 200


def count_pages_durable_when_the_copy_is_enqueued(patch: Patch) -> None:
    early = (PageState.DURABLE, PageState.RESTORING, PageState.SPILLING)
    patch.setattr(Pages, "is_durable", lambda self, page: self.states[page] in early)


def report_copies_to_the_host_before_they_ran(patch: Patch) -> None:
    """Device pages are reused while copies still read them."""

    def land(self: StreamTransfers, direction: str, count: int) -> None:
        if direction == "to_host":
            for copy in list(self.queues[direction])[:count]:
                if copy.transfer_id not in reported:
                    reported.add(copy.transfer_id)
                    self.landed.append(Completion(copy.transfer_id, True))
        else:
            real(self, direction, count)

    reported: set[int] = set()
    real = StreamTransfers.land
    patch.setattr(StreamTransfers, "land", land)


def apply_deltas_when_they_are_decided(patch: Patch) -> None:
    def collect(self: Coordinator) -> None:
        real(self)
        self.runtime.apply(self.lifecycle.take_deltas())

    real = Coordinator.collect
    patch.setattr(Coordinator, "collect", collect)


def pay_with_the_pages_just_matched(patch: Patch) -> None:
    patch.setattr(Residency, "cost", lambda self, pages: 0)


def read_before_the_restore(patch: Patch) -> None:
    patch.setattr(StreamTransfers, "join_restores", lambda self: None)


def copy_before_the_forward(patch: Patch) -> None:
    patch.setattr(StreamTransfers, "run_after", lambda self, stream: {})


def publish_what_another_published(patch: Patch) -> None:
    patch.setattr(GatedRadixCache, "_is_taken", lambda self, req, tokens: False)


def keep_the_hot_keys_of_the_last_holder(patch: Patch) -> None:
    patch.setattr(HotState, "reset", lambda self, regions=None: None)


def publish_at_the_end_of_a_request(patch: Patch) -> None:
    patch.setattr(GatedRadixCache, "_is_durable", lambda self, publication: True)


def publish_a_retracted_request_as_far_as_it_is_written(patch: Patch) -> None:
    def num_durable(self: Lifecycle, request: ServedRequest) -> int:
        return request.num_settled // self.page_size

    patch.setattr(Lifecycle, "num_durable", num_durable)


def promise_no_host_pages(patch: Patch) -> None:
    def promise(self: Residency, request: Any, pages: int) -> None:
        real(self, request, pages)
        self.promised_host = 0

    real = Residency.promise
    patch.setattr(Residency, "promise", promise)


def keep_the_hot_region_of_a_request_that_ends(patch: Patch) -> None:
    patch.setattr(DeviceLeases, "release_hot", lambda self, pages: None)


def forget_a_request_without_a_release(patch: Patch) -> None:
    def forget(self: GatedRadixCache, req: Any, *, checkpointed: bool) -> None:
        self.open.pop(req.rid, None)

    patch.setattr(GatedRadixCache, "on_release", forget)


def leak_the_last_page_of_a_row(patch: Patch) -> None:
    def free(self: Pages, pages: list[int]) -> None:
        real(self, pages[:-1] if len(pages) > 2 else pages)

    real = Pages.free
    patch.setattr(Pages, "free", free)


def skip_on_reuse(patch: Patch) -> None:
    patch.setattr(DeviceLeases, "_forget", lambda self, host_page, device_page: None)


def unpin_shared_pages(patch: Patch) -> None:
    def unpin(self: Residency, request: Any, end: int) -> None:
        left = request.pages[request.pin_start : end]
        real(self, request, end)
        for page in left if request.hot_pages else []:
            while self.pages.is_durable(page) and self.leases.is_pinned(page):
                self.leases.unpin(page)

    real = Residency._unpin
    patch.setattr(Residency, "_unpin", unpin)


def forget_the_tenant(patch: Patch) -> None:
    def key(token_ids: Any, extra_key: Any, **kwargs: Any) -> Any:
        return real(token_ids, None, **kwargs)

    real = tree.RadixKey
    patch.setattr(tree, "RadixKey", key)


def take_a_failed_spill_for_done(patch: Patch) -> None:
    def land(self: Pages, flight: Flight, transfer_id: int, ok: bool) -> None:
        real(self, flight, transfer_id, True)

    real = Pages._land_spill
    patch.setattr(Pages, "_land_spill", land)


def leave_followers_out(patch: Patch) -> None:
    patch.setattr(Runtime, "_replay", lambda self, followers, plan: None)


def drop_a_planned_row(patch: Patch) -> None:
    def gather(host: torch.Tensor, device: torch.Tensor, plan: CopyPlan, *args: Any, **kwargs: Any) -> None:
        count = int(plan.count)
        plan.count.fill_(max(0, count - 1))
        real(host, device, plan, *args, **kwargs)
        plan.count.fill_(count)

    real = runtime.gather
    patch.setattr(runtime, "gather", gather)


def mirror_one_row_less(patch: Patch) -> None:
    def mirror(self: Pages, slots: list[int]) -> None:
        real(self, slots[:-1])

    real = Pages.mirror
    patch.setattr(Pages, "mirror", mirror)


def take_padding_for_requests(patch: Patch) -> None:
    def set_batch(self: Runtime, rows: torch.Tensor, num_real: torch.Tensor, query_rows: int = 1) -> None:
        real(self, rows, torch.full_like(num_real, len(rows)), query_rows)

    real = Runtime.set_device_batch
    patch.setattr(Runtime, "set_device_batch", set_batch)


def hand_out_slots_in_another_order(patch: Patch) -> None:
    def prepare(self: Coordinator, reqs: Sequence[Any]) -> None:
        real(self, reqs)
        self.decode_slots.reverse()

    real = Coordinator.prepare_decode
    patch.setattr(Coordinator, "prepare_decode", prepare)


def swap_nothing_in(patch: Patch) -> None:
    patch.setattr(Residency, "num_hot", 0)


def choose_the_graph_of_the_step_before(patch: Patch) -> None:
    def graph_variant(self: Coordinator) -> str:
        chosen = real(self)
        before.append(chosen)
        return before.pop(0) if len(before) > 1 else chosen

    before: list[str] = []
    real = Coordinator.graph_variant
    patch.setattr(Coordinator, "graph_variant", graph_variant)


MUTATIONS: tuple[tuple[Callable[[Patch], None], str], ...] = (
    (count_pages_durable_when_the_copy_is_enqueued, "slow copies, python core"),
    (report_copies_to_the_host_before_they_ran, TIGHT),
    (apply_deltas_when_they_are_decided, TIGHT),
    (pay_with_the_pages_just_matched, SHARED),
    (read_before_the_restore, SHARED),
    (copy_before_the_forward, TIGHT),
    (publish_what_another_published, TIGHT),
    (keep_the_hot_keys_of_the_last_holder, SHARED),
    (publish_at_the_end_of_a_request, TIGHT),
    (publish_a_retracted_request_as_far_as_it_is_written, "retractions"),
    (promise_no_host_pages, "tight host"),
    (keep_the_hot_region_of_a_request_that_ends, TIGHT),
    (forget_a_request_without_a_release, TIGHT),
    (leak_the_last_page_of_a_row, TIGHT),
    (skip_on_reuse, TIGHT),
    (unpin_shared_pages, TIGHT),
    (forget_the_tenant, TIGHT),
    (take_a_failed_spill_for_done, "slow and failing copies"),
    (leave_followers_out, TIGHT),
    (drop_a_planned_row, TIGHT),
    (mirror_one_row_less, "rows mirrored in each step"),
    (take_padding_for_requests, TIGHT),
    (hand_out_slots_in_another_order, TIGHT),
    (swap_nothing_in, "graphs without swap-in"),
    (choose_the_graph_of_the_step_before, "graphs without swap-in"),
)


@pytest.mark.parametrize(("mutate", "scenario"), MUTATIONS, ids=[m.__name__ for m, _ in MUTATIONS])
def test_the_drive_finds(mutate: Callable[[Patch], None], scenario: str, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    for seed in range(TRIES):
        try:
            Drive(*SCENARIOS[scenario], seed, STEPS, structure=False).run()
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return
    raise AssertionError(f"{TRIES} runs of {STEPS} steps did not notice {mutate.__name__}")
