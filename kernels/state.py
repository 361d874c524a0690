"""Tensors the kernels work on: tables, hot state, copy plan, scratch.

R request rows, S hot regions, P page size, H hot rows a region, G index groups, B batch rows. All are
fixed in shape and address, so launches can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

Device = torch.device | str


def _fail(what: str) -> None:
    raise RuntimeError(f"kernel state is damaged: {what}")


class Tables(NamedTuple):
    """Where rows are. ``page_table`` int32 [R, max_pages]: host page of each page of a request, 0 = none.
    ``resident_page`` int32 [num_host_pages]: device page of a host page, 0 = none. ``hot_pages`` int32
    [S, H // P]: device pages of a hot region, all 0 = nobody holds it."""

    page_table: torch.Tensor
    resident_page: torch.Tensor
    hot_pages: torch.Tensor

    @classmethod
    def empty(
        cls,
        max_requests: int,
        max_pages: int,
        num_host_pages: int,
        num_regions: int,
        num_hot_pages: int,
        device: Device = "cpu",
    ) -> Tables:
        """No request has a page; ``num_hot_pages`` is H // P."""
        shapes = ((max_requests, max_pages), (num_host_pages,), (num_regions, num_hot_pages))
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))

    def check_integrity(self) -> None:
        """Raise RuntimeError when a page is out of range or a device page has two leases."""
        num_host_pages = self.resident_page.numel()
        pages = self.page_table
        if pages.numel() and (int(pages.min()) < 0 or int(pages.max()) >= num_host_pages):
            spread = f"{int(pages.min())}..{int(pages.max())}"
            _fail(f"page_table spans {spread}, host pages are 0..{num_host_pages - 1}")
        if num_host_pages and int(self.resident_page[0]) != 0:
            _fail(f"the null page is resident on device page {int(self.resident_page[0])}")
        has_page = self.hot_pages != 0
        torn = (has_page.any(1) & ~has_page.all(1)).nonzero().flatten().tolist()
        if torn:
            _fail(f"hot regions {torn} have part of their pages")
        leased = torch.cat((self.resident_page, self.hot_pages.flatten()))
        leased = leased[leased != 0]
        if leased.numel() and int(leased.min()) < 0:
            _fail(f"device page {int(leased.min())} is negative")
        pages_seen, counts = leased.unique(return_counts=True)
        if (counts > 1).any():
            _fail(f"device pages {pages_seen[counts > 1].tolist()} have two leases")


class HotState(NamedTuple):
    """What the hot rows of one index group hold. ``keys`` int32 [S, H]: slot of each hot row, -1 empty.
    ``lru`` int16 [S, H]: hot rows, oldest first. ``hints`` int16 [S, max_pages * P]: the hot row that each
    position was last loaded into. Only ``keys`` are the truth: a hint whose key is another slot is a miss, so
    old hints need no clearing. A stack for G groups has a leading dimension G."""

    keys: torch.Tensor
    lru: torch.Tensor
    hints: torch.Tensor

    @classmethod
    def empty(
        cls,
        num_regions: int,
        hot_rows: int,
        context: int,
        device: Device = "cpu",
        groups: int | None = None,
    ) -> HotState:
        """All hot rows empty, in identity order, for contexts of ``context`` = max_pages * P positions; with
        ``groups`` a stack [groups, S, ...]."""
        stack = (num_regions,) if groups is None else (groups, num_regions)
        state = cls(
            torch.empty((*stack, hot_rows), dtype=torch.int32, device=device),
            torch.empty((*stack, hot_rows), dtype=torch.int16, device=device),
            torch.full((*stack, context), -1, dtype=torch.int16, device=device),
        )
        state.reset()
        return state

    def group(self, index: int) -> HotState:
        """The view [S, ...] of one group of a stack."""
        return HotState(self.keys[index], self.lru[index], self.hints[index])

    def reset(self, regions: torch.Tensor | None = None) -> None:
        """Empty the hot rows of ``regions``, int64 [n] (None: all), in every group of a stack."""
        order = torch.arange(self.lru.shape[-1], dtype=torch.int16, device=self.lru.device)
        if regions is None:
            self.keys.fill_(-1)
            self.lru.copy_(order)
            return
        self.keys.index_fill_(-2, regions, -1)
        shape = (*self.lru.shape[:-2], regions.numel(), order.numel())
        self.lru.index_copy_(-2, regions, order.expand(shape))

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each order is a permutation, each key has one row and hints name rows."""
        hot_rows = self.lru.shape[-1]
        order = self.lru.reshape(-1, hot_rows).long().sort(1).values
        wrong = (order != torch.arange(hot_rows, device=order.device)).any(1).nonzero().flatten().tolist()
        if wrong:
            _fail(f"lru rows {wrong} are not permutations of 0..{hot_rows - 1}")
        ordered = self.keys.reshape(-1, hot_rows).sort(1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if repeated.any():
            _fail(f"slots {ordered[:, 1:][repeated].tolist()} are held by two hot rows of a region")
        if self.hints.numel() and not -1 <= int(self.hints.min()) <= int(self.hints.max()) < hot_rows:
            _fail(
                f"hints span {int(self.hints.min())}..{int(self.hints.max())}, hot rows are 0..{hot_rows - 1}"
            )


BUCKETS = 128
# Counters lie a cache line apart, or the atomics of all wait for a few slices of the cache.
SPREAD = 32


class PlanOrder(NamedTuple):
    """A copy plan by host address, see `arrange`. ``entries`` int32 [capacity, 2]: those of the plan, one of
    ``BUCKETS`` equal stretches of the host pool after the other. Zero between launches: ``bins`` int32
    [2, BUCKETS, SPREAD], entries of a stretch and entries placed, and ``arrivals`` int32 [1]."""

    entries: torch.Tensor
    bins: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def empty(cls, capacity: int, device: Device = "cpu") -> PlanOrder:
        """Room for a plan of that capacity."""
        sizes = ((capacity, 2), (2, BUCKETS, SPREAD), 1)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))

    def check_integrity(self) -> None:
        """Raise RuntimeError when a launch left something behind."""
        left = int((self.bins != 0).sum()) + int((self.arrivals != 0).sum())
        if left:
            _fail(f"{left} counters of a plan's order are not zero between launches")


@dataclass(frozen=True)
class CopyPlan:
    """Rows to copy host to device. ``entries`` int32 [capacity, 2]: source slot (-1: write a zero row) and
    destination device row. ``count`` int32 [1]: entries in use; the rest is unspecified. ``starts`` and
    ``counts`` int32 [max_batch]: the range of each batch row, in position order. ``order``: the entries of a
    long plan in the order to copy them; None: as they are."""

    entries: torch.Tensor
    count: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    order: PlanOrder | None = None

    @classmethod
    def empty(
        cls, capacity: int, max_batch: int, device: Device = "cpu", *, ordered: bool = False
    ) -> CopyPlan:
        """A plan of no copies. A batch needs a capacity of B * query_rows * top_k."""
        sizes = ((capacity, 2), 1, max_batch, max_batch)
        entries, count, starts, counts = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in sizes
        )
        return cls(entries, count, starts, counts, PlanOrder.empty(capacity, device) if ordered else None)

    def segment(self, batch_row: int) -> list[tuple[int, int]]:
        """The (slot, row) pairs of one batch row. Reads the device."""
        start = int(self.starts[batch_row])
        stop = start + int(self.counts[batch_row])
        return [(slot, row) for slot, row in self.entries[start:stop].tolist()]

    def check_integrity(self, batch: int) -> None:
        """Raise RuntimeError unless the ranges of the batch tile the list and no row is written twice."""
        count = int(self.count)
        ranges = sorted(zip(self.starts[:batch].tolist(), self.counts[:batch].tolist(), strict=True))
        end = 0
        for start, length in (pair for pair in ranges if pair[1]):
            if start != end:
                _fail(f"plan range {start}+{length} does not follow {end}")
            end += length
        if end != count or count > len(self.entries):
            _fail(f"plan ranges end at {end}, count is {count}, capacity is {len(self.entries)}")
        rows = self.entries[:count, 1]
        if rows[rows >= 0].unique().numel() != int((rows >= 0).sum()):
            _fail(f"{count} plan entries write a device row twice")
        if self.order is not None:
            self.order.check_integrity()


class Scratch(NamedTuple):
    """Work space of `resolve`, shared by all groups. Zero between launches: ``bitmap`` int32 [max_batch,
    ceil(max_pages * P / 32)], ``used`` int32 [max_batch, ceil(H / 32)], ``arrivals`` int64 [max_batch] and
    ``cursor`` int64 [1]. Of no meaning between launches: ``slots`` int32 and ``order`` int16 [max_batch, H],
    ``tickets`` int64 [max_batch]. One launch at a time may use it."""

    bitmap: torch.Tensor
    used: torch.Tensor
    slots: torch.Tensor
    order: torch.Tensor
    tickets: torch.Tensor
    arrivals: torch.Tensor
    cursor: torch.Tensor

    @classmethod
    def empty(cls, max_batch: int, context: int, hot_rows: int, device: Device = "cpu") -> Scratch:
        """Zeroed work space for contexts of ``context`` = max_pages * P positions."""
        sizes = (
            ((max_batch, -(-context // 32)), torch.int32),
            ((max_batch, -(-hot_rows // 32)), torch.int32),
            ((max_batch, hot_rows), torch.int32),
            ((max_batch, hot_rows), torch.int16),
            ((max_batch,), torch.int64),
            ((max_batch,), torch.int64),
            ((1,), torch.int64),
        )
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in sizes))

    def check_integrity(self) -> None:
        """Raise RuntimeError when a launch left something behind."""
        for name in ("bitmap", "used", "arrivals", "cursor"):
            left = int((getattr(self, name) != 0).sum())
            if left:
                _fail(f"{left} entries of scratch.{name} are not zero between launches")
