"""What the tests of `resolve` share: a random world, and a step of it on a kernel and on the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hisparse_sgl.kernels import backend, resolve
from hisparse_sgl.kernels.state import CopyPlan, HotState, Scratch, Tables

CPU = pytest.param(
    "cpu", marks=pytest.mark.skipif(not backend.INTERPRETED, reason="needs Triton with TRITON_INTERPRET=1")
)
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
devices = pytest.mark.parametrize("device", [CPU, CUDA])


@dataclass
class World:
    """What a sequence of steps keeps, on the CPU. ``regions[r]`` is the hot region of request ``r``."""

    tables: Tables
    hot: HotState
    regions: list[int]
    page_size: int
    query_rows: int
    num_slots: int

    @property
    def context(self) -> int:
        return self.tables.page_table.shape[1] * self.page_size

    def regions_of(self, requests: torch.Tensor) -> torch.Tensor:
        """int32 [B]: the region of each request row, -1 for a padded one."""
        rows = [self.regions[row] if row >= 0 else -1 for row in requests.tolist()]
        return torch.tensor(rows, dtype=torch.int32)


@dataclass
class Outcome:
    """What one step left behind, on the CPU."""

    out_rows: torch.Tensor
    stats: list[int]
    hot: HotState
    plan: CopyPlan


def make_world(
    *,
    page_size: int = 4,
    hot_rows: int = 16,
    max_pages: int = 16,
    max_requests: int = 5,
    resident: float = 0.3,
    query_rows: int = 1,
    seed: int = 0,
) -> World:
    """Each request has its own pages and a hot region, one region is left; some host pages are resident."""
    torch.manual_seed(seed)
    num_host_pages = max_requests * max_pages + 1
    regions = torch.randperm(max_requests + 1)[:max_requests].tolist()
    tables = Tables.empty(max_requests, max_pages, num_host_pages, max_requests + 1, hot_rows // page_size)
    tables.page_table.copy_((torch.randperm(num_host_pages - 1) + 1).reshape(max_requests, max_pages))
    num_hot = tables.hot_pages.numel()
    device_pages = torch.randperm(num_host_pages + num_hot) + 1
    tables.hot_pages.copy_(device_pages[:num_hot].reshape(tables.hot_pages.shape))
    kept = torch.rand(num_host_pages) < resident
    kept[0] = False
    tables.resident_page.copy_(torch.where(kept, device_pages[num_hot:], 0))
    tables.check_integrity()
    hot = HotState.empty(max_requests + 1, hot_rows, max_pages * page_size)
    return World(tables, hot, regions, page_size, query_rows, num_host_pages * page_size)


def select(world: World, batch: int, top_k: int, window: int | None = None) -> torch.Tensor:
    """Random positions of the context's end, with repeats and pads."""
    low = max(0, world.context - (window or world.context))
    positions = torch.randint(low, world.context, (batch * world.query_rows, top_k))
    return torch.where(torch.rand(positions.shape) < 0.1, -1, positions).int()


def run(
    world: World, positions: torch.Tensor, requests: torch.Tensor, device: str, wanted: str | None = None
) -> Outcome:
    """One step on copies of the world."""
    batch, hot_rows = requests.numel(), world.hot.keys.shape[1]
    plan = CopyPlan.empty(positions.numel(), batch, device)
    scratch = Scratch.empty(batch, world.context, hot_rows, device)
    tables = Tables(*(tensor.clone().to(device) for tensor in world.tables))
    hot = HotState(*(tensor.clone().to(device) for tensor in world.hot))
    stats = torch.full((4,), 5, dtype=torch.int64, device=device)
    out_rows = torch.full(positions.shape, -7, dtype=torch.int32, device=device)
    sizes = {"page_size": world.page_size, "num_slots": world.num_slots, "query_rows": world.query_rows}
    inputs = positions.to(device), requests.to(device), world.regions_of(requests).to(device)
    args = (*inputs, tables, hot, scratch, plan, out_rows, stats)
    resolve.resolve(*args, **sizes, backend=wanted)
    scratch.check_integrity()
    assert all(torch.equal(old, new.cpu()) for old, new in zip(world.tables, tables, strict=True))
    on_cpu = CopyPlan(*(getattr(plan, name).cpu() for name in ("entries", "count", "starts", "counts")))
    return Outcome(out_rows.cpu(), (stats.cpu() - 5).tolist(), HotState(*(x.cpu() for x in hot)), on_cpu)


def step(world: World, positions: torch.Tensor, requests: list[int], device: str) -> Outcome:
    """Run kernel and reference, compare them bit for bit, keep the new hot state."""
    rows = torch.tensor(requests, dtype=torch.int32)
    expected = run(world, positions, rows, "cpu", "reference")
    actual = run(world, positions, rows, device)
    assert torch.equal(actual.out_rows, expected.out_rows)
    assert actual.stats == expected.stats
    actual.plan.check_integrity(len(requests))
    for name, one, other in zip(HotState._fields, actual.hot, expected.hot, strict=True):
        assert torch.equal(one, other), name
    for row in range(len(requests)):
        assert actual.plan.segment(row) == expected.plan.segment(row)
    world.hot = expected.hot
    return actual


def check_step(
    world: World, before: HotState, positions: torch.Tensor, requests: list[int], out: Outcome
) -> None:
    """What a step promises, entry by entry. Needs a sound world."""
    size, tables = world.page_size, world.tables
    world.hot.check_integrity()
    by_request = (tensor.reshape(len(requests), -1).tolist() for tensor in (positions, out.out_rows))
    per_request = zip(requests, *by_request, strict=True)
    for index, (request, entries, rows) in enumerate(per_request):
        region = world.regions[request]
        loads = []
        for position, row in dict(zip(entries, rows, strict=True)).items():
            page = int(tables.page_table[request, position // size]) if request >= 0 <= position else 0
            if page == 0:
                assert row == -1
                continue
            resident = int(tables.resident_page[page])
            if resident:
                assert row == resident * size + position % size
                continue
            hot_page = tables.hot_pages[region].tolist().index(row // size)
            hot_row, slot = hot_page * size + row % size, page * size + position % size
            assert int(world.hot.keys[region, hot_row]) == slot
            assert int(world.hot.hints[region, position]) == hot_row
            if int(before.keys[region, hot_row]) != slot:
                assert slot not in before.keys[region]
                loads.append((position, slot, row))
        assert out.plan.segment(index) == [(slot, row) for _, slot, row in sorted(loads)]
