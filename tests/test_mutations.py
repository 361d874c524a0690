"""Known faults, put in on purpose: the driver must find each of them, and nothing without them.

The pool's own invariants are switched off where the bytes and the answers alone can show the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from driver import Driver
from random_pools import ACTIONS

from hisparse_sgl import coordinator, runtime
from hisparse_sgl.coordinator import Coordinator
from hisparse_sgl.kernels.state import CopyPlan
from hisparse_sgl.mem_pool.leases import DeviceLeases
from hisparse_sgl.pages import Flight, Pages, PageState
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.radix.gate import PublicationGate
from hisparse_sgl.radix.page_hash import ExtraKey, PageHasher
from hisparse_sgl.radix.tree import PrefixTree
from hisparse_sgl.requests import Request
from hisparse_sgl.residency import Residency
from hisparse_sgl.runtime import Runtime

SEEDS = range(40)
STEPS = 120
Patch = pytest.MonkeyPatch


def drive(seed: int, tokens_per_row: int = 1) -> None:
    """A fixed series of actions; raises when an answer is wrong."""
    driver, rng = Driver(seed, structure=False, tokens_per_row=tokens_per_row), Random(seed)
    try:
        for _ in range(STEPS):
            driver.act(rng.choice(ACTIONS), rng.randrange(2**32))
        driver.drain(rng)
    finally:
        driver.close()


def publish_before_completion(patch: Patch) -> None:
    early = (PageState.DURABLE, PageState.RESTORING, PageState.SPILLING)
    patch.setattr(Pages, "is_durable", lambda self, page: self.states[page] in early)


def skip_on_reuse(patch: Patch) -> None:
    patch.setattr(DeviceLeases, "_forget", lambda self, host_page, device_page: None)


def unpin_shared_pages(patch: Patch) -> None:
    def unpin(self: Residency, request: Request, end: int) -> None:
        left = request.pages[request.pin_start : end]
        real(self, request, end)
        for page in left if request.hot_pages else []:  # others that map the page may have no hot region
            while self.pages.is_durable(page) and self.leases.is_pinned(page):
                self.leases.unpin(page)

    real = Residency._unpin
    patch.setattr(Residency, "_unpin", unpin)


def forget_invalidation(patch: Patch) -> None:
    patch.setattr(Runtime, "invalidate", lambda self, region_rows, slots: None)


def drop_a_planned_row(patch: Patch) -> None:
    def gather(host: torch.Tensor, device: torch.Tensor, plan: CopyPlan, *args: Any, **kwargs: Any) -> None:
        count = int(plan.count)
        plan.count.fill_(max(0, count - 1))
        real(host, device, plan, *args, **kwargs)
        plan.count.fill_(count)

    real = runtime.gather
    patch.setattr(runtime, "gather", gather)


def select_the_last_positions(patch: Patch) -> None:
    def swap_in(self: HiSparsePool, group: int, positions: torch.Tensor) -> torch.Tensor:
        last = positions.max(1, keepdim=True).values - torch.arange(positions.shape[1])
        return real(self, group, torch.where(positions < 0, -1, last.clamp(min=0).int()))

    real = HiSparsePool.swap_in
    patch.setattr(HiSparsePool, "swap_in", swap_in)


def publish_an_aborted_request(patch: Patch) -> None:
    patch.setattr(Coordinator, "abort", Coordinator.finish)


def forget_the_tenant(patch: Patch) -> None:
    def hasher(page_size: int, extra_key: ExtraKey = None) -> PageHasher:
        return PageHasher(page_size)

    patch.setattr(coordinator, "PageHasher", hasher)


def take_a_failed_spill_for_done(patch: Patch) -> None:
    def land(self: Pages, flight: Flight, transfer_id: int, ok: bool) -> None:
        real(self, flight, transfer_id, True)

    real = Pages._land_spill
    patch.setattr(Pages, "_land_spill", land)


def leave_followers_out(patch: Patch) -> None:
    patch.setattr(Runtime, "_replay", lambda self, followers, plan: None)


def mirror_one_row_less(patch: Patch) -> None:
    def mirror(self: Pages, slots: list[int]) -> None:
        real(self, slots[:-1])

    real = Pages.mirror
    patch.setattr(Pages, "mirror", mirror)


def read_before_the_restore(patch: Patch) -> None:
    patch.setattr(Residency, "is_ready", lambda self, request: True)


def keep_a_rewound_page_durable(patch: Patch) -> None:
    patch.setattr(Pages, "reopen", lambda self, page: None)


def publish_after_a_flush(patch: Patch) -> None:
    def flush(self: Coordinator) -> None:
        self.pages.free(self.tree.evict(self.tree.num_pages))

    patch.setattr(Coordinator, "flush", flush)


def lose_a_reference(patch: Patch) -> None:
    def let_go(self: Pages, pages: list[int]) -> None:
        for page in pages:
            self.leases.unpin(page)
        self.free(pages[1:])

    patch.setattr(Pages, "_let_go", let_go)


def count_a_row_with_its_first_token(patch: Patch) -> None:
    def settle(self: Pages, pages: Sequence[int], start: int, end: int) -> list[int]:
        early = self.tokens_per_row - 1
        return real(self, pages, start + early if start else 0, end + early)

    real = Pages.settle
    patch.setattr(Pages, "settle", settle)


def leave_the_row_that_opens_again(patch: Patch) -> None:
    def row_slot(self: Coordinator, request: Request, row: int) -> int:
        return real(self, request, min(row + 1, len(request.pages) * self.sizes.page_rows - 1))

    real = Coordinator._row_slot
    patch.setattr(Coordinator, "_row_slot", row_slot)


def resume_without_a_state(patch: Patch) -> None:
    patch.setattr(PrefixTree, "resumable", lambda self, match: match)


def keep_the_state_of_rewound_tokens(patch: Patch) -> None:
    patch.setattr(PublicationGate, "drop_states", lambda self, publication, index: None)


def keep_states_one_page_late(patch: Patch) -> None:
    real = PublicationGate.keep_state
    patch.setattr(
        PublicationGate,
        "keep_state",
        lambda self, publication, index, state: real(self, publication, max(0, index - 1), state),
    )


COMPRESSED_MUTATIONS: tuple[Callable[[Patch], None], ...] = (
    count_a_row_with_its_first_token,
    leave_the_row_that_opens_again,
    resume_without_a_state,
    keep_the_state_of_rewound_tokens,
    keep_states_one_page_late,
    forget_invalidation,
    mirror_one_row_less,
    skip_on_reuse,
)
MUTATIONS: tuple[Callable[[Patch], None], ...] = (
    publish_before_completion,
    skip_on_reuse,
    unpin_shared_pages,
    forget_invalidation,
    drop_a_planned_row,
    select_the_last_positions,
    publish_an_aborted_request,
    forget_the_tenant,
    take_a_failed_spill_for_done,
    leave_followers_out,
    mirror_one_row_less,
    read_before_the_restore,
    keep_a_rewound_page_durable,
    publish_after_a_flush,
    lose_a_reference,
)


def first_fault(seeds: Iterable[int], tokens_per_row: int = 1) -> tuple[int, BaseException] | None:
    """Seed and error of the first run that fails."""
    for seed in seeds:
        try:
            drive(seed, tokens_per_row)
        except Exception as error:
            return seed, error
    return None


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_the_driver_finds(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    found = first_fault(SEEDS)
    assert found, f"{len(SEEDS)} runs of {STEPS} steps did not notice {mutate.__name__}"
    monkeypatch.undo()
    drive(found[0])  # the same series of actions is right without the mutation


@pytest.mark.parametrize("mutate", COMPRESSED_MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_the_driver_finds_with_compressed_rows(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    found = first_fault(SEEDS, tokens_per_row=2)
    assert found, f"{len(SEEDS)} runs of {STEPS} steps did not notice {mutate.__name__}"
    monkeypatch.undo()
    drive(found[0], tokens_per_row=2)
