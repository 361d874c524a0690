"""Inputs of one swap-in case: where pages lie, which positions each step selects, and the state they meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.cells import PAGE_SIZE, PARTS_ALIGN, Cell
from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.kernels.state import CopyPlan, HotState, Scratch, Tables
from hisparse_sgl.mem_pool.extents import extent_pages

STEPS = 24
MAX_REQUESTS = 64


def row_format(parts: tuple[int, ...]) -> RowFormat:
    """Pages of 64 rows; pages of two-part rows are padded as DeepSeek V4 pads them."""
    return RowFormat.make(parts, PAGE_SIZE, PARTS_ALIGN if len(parts) > 1 else 1)


def place_pages(rng: np.random.Generator, cell: Cell, num_pages: int, page_bytes: int) -> np.ndarray:
    """Host pages int32 [batch, pages a context], all different and never page 0.

    scattered: anywhere. extents: whole 2 MiB extents, as `mem_pool.extents` cuts them, that lie anywhere.
    contiguous: one run a request.

    Raises:
        ValueError: the pool is too small.
    """
    pages = cell.context // PAGE_SIZE
    if cell.placement == "scattered":
        size, first, count = 1, 1, num_pages - 1
    elif cell.placement == "extents":
        size = extent_pages(page_bytes)
        first, count = size, num_pages // size - 1
    else:
        size, first, count = pages, 1, (num_pages - 1) // pages
    units = -(-pages // size)
    if cell.batch * units > count:
        raise ValueError(
            f"pool_gib={cell.pool_gib} holds {count} units of {size} pages, {cell.name} needs "
            f"{cell.batch * units}; raise pool_gib"
        )
    starts = first + size * rng.permutation(count)[: cell.batch * units]
    placed = (starts[:, None] + np.arange(size)).reshape(cell.batch, units * size)
    return placed[:, :pages].astype(np.int32)


def select_positions(rng: np.random.Generator, cell: Cell, steps: int) -> np.ndarray:
    """Positions int32 [steps + 1, query_rows, top_k] of one request.

    Each step takes ``misses`` positions that no step before it selected, in place of as many others; with 0
    it shuffles the same ones.

    Raises:
        ValueError: the context has too few positions.
    """
    size = cell.selected
    needed = size + steps * cell.misses
    if needed > cell.context:
        raise ValueError(f"context={cell.context} of {cell.name} must be at least {needed}; raise it")
    fresh = rng.permutation(cell.context)[:needed].astype(np.int32)
    current, fresh = fresh[:size].copy(), fresh[size:]
    windows = (np.arange(cell.query_rows) * (cell.top_k // 4))[:, None] + np.arange(cell.top_k)
    selected = [current[windows]]
    for step in range(steps):
        if cell.misses:
            places = rng.permutation(size)[: cell.misses]
            current[places] = fresh[step * cell.misses : (step + 1) * cell.misses]
        else:
            rng.shuffle(current)
        selected.append(current[windows])
    return np.stack(selected)


@dataclass
class Workload:
    """One case on a device. ``positions`` int32 [steps + 1, batch * query_rows, top_k]: entry 0 warms the hot
    region up. ``hosts`` are the layers that steps read in turn, ``device`` takes the rows of all; ``mirror``
    holds the bytes of each layer where the device can index them."""

    cell: Cell
    row: RowFormat
    hosts: list[torch.Tensor]
    mirror: torch.Tensor
    device: torch.Tensor
    tables: Tables
    hot: HotState
    scratch: Scratch
    plan: CopyPlan
    request_rows: torch.Tensor
    region_rows: torch.Tensor
    positions: torch.Tensor
    out_rows: torch.Tensor
    stats: torch.Tensor
    backend: str | None

    @property
    def steps(self) -> int:
        return self.positions.shape[0] - 1

    @property
    def num_slots(self) -> int:
        return self.mirror.shape[0] * self.row.page_size

    def slots(self, step: int) -> torch.Tensor:
        """Host slots int64 [batch * query_rows, top_k] of a step's positions."""
        positions = self.positions[step].long()
        owners = self.request_rows.long().repeat_interleave(self.cell.query_rows)
        pages = self.tables.page_table[owners[:, None], positions // PAGE_SIZE].long()
        return pages * PAGE_SIZE + positions % PAGE_SIZE

    def count_wrong(self, step: int, rows: torch.Tensor, device: torch.Tensor | None = None) -> int:
        """Selected rows of a step whose bytes in ``device``, by default this pool, are not the host's."""
        device = self.device if device is None else device
        slots, rows = self.slots(step).flatten(), rows.flatten().long()
        same = rows >= 0
        rows = rows.clamp_min(0)
        start = 0
        size = self.row.page_size
        for width in self.row.parts:
            stop = start + size * width
            got = device[:, start:stop].unflatten(1, (size, width))[rows // size, rows % size]
            want = self.mirror[:, start:stop].unflatten(1, (size, width))[slots // size, slots % size]
            same &= (got == want).all(1)
            start = stop
        return int((~same).sum())


def build(
    cell: Cell,
    hosts: list[torch.Tensor],
    mirror: torch.Tensor,
    steps: int = STEPS,
    backend: str | None = None,
) -> Workload:
    """Tables, selections and an empty hot region for a case, on the device of ``mirror``.

    Args:
        hosts: uint8 [pages, page_bytes] each, layers of a host pool that hold the same bytes.
        mirror: these bytes on the device.
    """
    where = mirror.device
    row = row_format(cell.parts)
    rng = np.random.default_rng([cell.batch, cell.misses, cell.row_bytes, cell.query_rows])
    requests = max(MAX_REQUESTS, cell.batch) if where.type == "cuda" else cell.batch + 1
    hot_pages, context_pages = cell.hot_rows // PAGE_SIZE, cell.context // PAGE_SIZE
    owners = rng.permutation(requests)[: cell.batch].astype(np.int32)
    tables = Tables.empty(requests, context_pages, mirror.shape[0], requests, hot_pages, where)
    placed = torch.from_numpy(place_pages(rng, cell, mirror.shape[0], row.page_bytes)).to(where)
    request_rows = torch.from_numpy(owners).to(where)
    tables.page_table[request_rows.long()] = placed
    regions = 1 + rng.permutation(requests * hot_pages).reshape(requests, hot_pages)
    tables.hot_pages.copy_(torch.from_numpy(regions.astype(np.int32)))
    if cell.resident:
        beyond = requests * hot_pages + 1
        leased = torch.arange(placed.numel(), dtype=torch.int32, device=where) + beyond
        tables.resident_page[placed.flatten().long()] = leased
    chosen = np.stack([select_positions(rng, cell, steps) for _ in range(cell.batch)], 1)
    shape = (steps + 1, cell.batch * cell.query_rows, cell.top_k)
    capacity = cell.batch * cell.query_rows * cell.top_k
    device = torch.full((requests * hot_pages + 1, row.page_bytes), 0xFF, dtype=torch.uint8, device=where)
    return Workload(
        cell=cell,
        row=row,
        hosts=hosts,
        mirror=mirror,
        device=device,
        tables=tables,
        hot=HotState.empty(requests, cell.hot_rows, cell.context, where),
        scratch=Scratch.empty(requests, cell.context, cell.hot_rows, where),
        plan=CopyPlan.empty(capacity, requests, where, ordered=where.type == "cuda"),
        request_rows=request_rows,
        region_rows=requests - 1 - request_rows,
        positions=torch.from_numpy(chosen.reshape(shape)).to(where),
        out_rows=torch.full(shape[1:], -1, dtype=torch.int32, device=where),
        stats=torch.zeros(4, dtype=torch.int64, device=where),
        backend=backend,
    )
