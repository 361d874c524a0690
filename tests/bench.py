"""A small pool whose copies land when told to, and the shortest way to run requests on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from late_transfers import LateTransfers

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.requests import Admission

PAGE = 4
DEFAULTS: dict[str, Any] = {
    "top_k": 2,
    "context_len": 64,
    "host_pages": 40,
    "device_pages": 24,
    "max_requests": 4,
    "kernels": "reference",
    "poison": True,
}


class Bench:
    """A pool of one layer whose copies wait, and the shortest way to run requests on it."""

    def __init__(self, **changes: object) -> None:
        layout = KVLayout.single(1, (16,), PAGE, (IndexGroup(0),), 8)
        self.pool = HiSparsePool(
            layout, HiSparseConfig(**{**DEFAULTS, **changes}), transfer_class=LateTransfers
        )
        assert isinstance(self.pool.transfers, LateTransfers)
        self.transfers = self.pool.transfers
        self.coordinator = self.pool.coordinator

    def land(self) -> None:
        """Land all copies, and those that follow from them."""
        while self.coordinator.pages.flights:
            for direction, queue in self.transfers.queues.items():
                self.transfers.land(direction, len(queue))
            self.coordinator.collect()
        self.pool.check_integrity()

    def forward(self, rid: str, n: int, land: bool = True) -> None:
        """Extend by ``n`` tokens and run a step."""
        assert isinstance(self.pool.extend(rid, n), torch.Tensor)
        self.pool.begin_step([rid])
        self.pool.step_done()
        if land:
            self.land()
        self.pool.check_integrity()

    def publish(self, rid: str, tokens: list[int]) -> None:
        """Compute a prompt, finish it and let its pages become durable."""
        assert isinstance(self.pool.admit(rid, tokens), Admission)
        self.forward(rid, len(tokens))
        self.pool.finish(rid)
        self.land()

    def push_out(self) -> None:
        """Use every free device page once, so that nothing unpinned stays."""
        leases = self.coordinator.leases
        leases.release_hot(leases.lease_hot(leases.num_free))


def hot_request(bench: Bench, rid: str, pages: int) -> None:
    """A request in hybrid mode whose pages behind the tail are on the host only and not published."""
    bench.pool.admit(rid, [1])
    for _ in range(pages):
        bench.forward(rid, PAGE)
    bench.coordinator.residency.relieve(1000, bench.coordinator.requests.values())
    assert bench.coordinator.requests[rid].hot_pages
    bench.push_out()


def fail_once(owner: object, name: str) -> None:
    """The next call of a method raises before it does anything."""

    def fail(*args: object) -> None:
        patch.undo()
        raise MemoryError(name)

    patch = pytest.MonkeyPatch()
    patch.setattr(owner, name, fail)
