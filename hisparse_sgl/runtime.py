"""The device side of a pool: tables, hot state of each index group, and swap-in."""

from __future__ import annotations

import torch

from hisparse_sgl.config import HiSparseConfig, Sizes
from hisparse_sgl.kernels.arrange import arrange
from hisparse_sgl.kernels.batch_rows import batch_rows
from hisparse_sgl.kernels.gather import gather
from hisparse_sgl.kernels.invalidate import invalidate
from hisparse_sgl.kernels.resolve import resolve
from hisparse_sgl.kernels.state import CopyPlan, HotState, Scratch, Tables
from hisparse_sgl.kernels.translate import translate
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import KVLayout
from hisparse_sgl.metrics import Counters
from hisparse_sgl.requests import Deltas
from hisparse_sgl.transfers import upload, upload_cells

STATS = ("hot_hits", "hot_lookups", "resident_rows", "unserved")

ALIGNMENT = 64
"""Cells at whose multiples a table begins: Triton makes other code for an address that is not aligned."""


class Runtime:
    """Fixed-address tensors that a decode step reads, and the launches of one.

    Slots and positions are those of rows here: where tokens share a row, a token's divided by their number.

    Args:
        host, device: the two pools; read at each launch, so that closing them ends all use of their memory.
        backend: kernel implementation, see ``kernels.backend.choose``; None picks by device.
        num_plans: copy plans and answers kept; groups take them in turn. None: one for each group. With fewer
            an answer lasts until as many groups later, and the copies of followers may be waited for then.
    """

    def __init__(
        self,
        layout: KVLayout,
        config: HiSparseConfig,
        sizes: Sizes,
        host: HostPool,
        device: DevicePool,
        backend: str | None = None,
        num_plans: int | None = None,
    ) -> None:
        self.groups = layout.host_group.index_groups
        self.row = layout.host_group.row
        self.config = config
        self.sizes = sizes
        self.host = host
        self.device = device
        self.backend = backend
        self.where = where = device.buffer.device
        requests, queries = config.max_requests, config.max_requests * config.query_rows
        count = len(self.groups)
        kept = count if num_plans is None else min(num_plans, count)
        if kept < 1:
            raise ValueError(f"num_plans is {num_plans}, the limit is at least 1: a step writes one plan")
        self.cells, self.tables = _tables(requests, sizes, config.host_pages, where)
        self.hot_region = torch.full((requests,), -1, dtype=torch.int32, device=where)
        self.region_of = [-1] * requests  # what hot_region holds
        context = sizes.context_pages * sizes.page_rows
        self.hot = HotState.empty(sizes.hot_regions, sizes.hot_rows, context, where, groups=count)
        self.scratch = Scratch.empty(requests, context, sizes.hot_rows, where)
        self.plans = [
            CopyPlan.empty(queries * config.top_k, requests, where, ordered=where.type == "cuda")
            for _ in range(kept)
        ]
        self.plan_readers = [
            [layer for group in self.groups[plan::kept] for layer in group.layers[1:]] for plan in range(kept)
        ]
        self.rows = torch.full((kept, queries, config.top_k), -1, dtype=torch.int32, device=where)
        self.stats = torch.zeros((count, len(STATS)), dtype=torch.int64, device=where)
        self.batch_rows = torch.full((2, requests), -1, dtype=torch.int32, device=where)
        self.request_rows, self.region_rows = self.batch_rows
        self.batch = 0
        self.query_rows = 1
        self.copy_stream = torch.cuda.Stream(where) if where.type == "cuda" else None
        self.ready: dict[int, torch.cuda.Event] = {}

    def apply(self, deltas: Deltas) -> None:
        """Bring the tables up to date, on the current stream: behind every forward that may read them."""
        where = self.where
        width, residency = self.sizes.context_pages, int(self.tables.resident_page.storage_offset())
        # A dict, because an index_put with one cell named twice has no defined order on a GPU.
        cells = {residency + page: device_page for page, device_page in deltas.residency.items()}
        for row, first, run in deltas.page_runs:
            start = row * width + first
            cells.update(zip(range(start, start + len(run)), run, strict=True))
        if cells:
            index, values = upload_cells(cells, where)
            self.cells[index] = values
        if deltas.hot_regions:
            self._place_regions(deltas.hot_regions)
        if deltas.rewritten:
            regions, slots = map(list, zip(*deltas.rewritten, strict=True))
            self.invalidate(upload(regions, torch.int32, where), upload(slots, torch.int32, where))

    def invalidate(self, region_rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Drop hot copies of row slots that are rewritten in place; both int32 [n]."""
        invalidate(self.hot.keys, region_rows, slots, backend=self.backend)

    def set_batch(self, request_rows: list[int], query_rows: int) -> None:
        """State rows of the requests of the next forward, in batch order."""
        padding = [-1] * (self.request_rows.numel() - len(request_rows))
        regions = [self.region_of[row] for row in request_rows]
        flat = [*request_rows, *padding, *regions, *padding]
        self.batch_rows.view(-1).copy_(upload(flat, torch.int32, self.where))
        self.batch = len(request_rows)
        self.query_rows = query_rows

    def set_device_batch(
        self, request_rows: torch.Tensor, num_real: torch.Tensor, query_rows: int = 1
    ) -> None:
        """The same from the device, in one launch that a CUDA graph can capture; the CPU waits for nothing.

        Args:
            request_rows: int32 or int64 [B], state row of each batch row.
            num_real: int32 [1]; batch rows at or past it are padding.
            query_rows: query rows a request.
        """
        batch_rows(request_rows, num_real, self.hot_region, self.batch_rows, backend=self.backend)
        self.batch = request_rows.numel()
        self.query_rows = query_rows

    def swap_in(self, group: int, positions: torch.Tensor) -> torch.Tensor:
        """Device rows of the selected positions of one index group; starts the copies of all its layers.

        Args:
            group: index of the group in the layout.
            positions: int32 [batch * query_rows, <= top_k], -1 pads.

        Returns:
            int32 rows of the same shape, -1 where masked; a view that the next call of a group with the same
            plan overwrites.
        """
        leader, *followers = self.groups[group].layers
        turn = group % len(self.plans)
        for layer in self.plan_readers[turn]:
            self.wait_layer(layer)  # a replay that nobody waited for may still read the plan
        rows = self.rows[turn, : positions.shape[0], : positions.shape[1]]
        plan = self.plans[turn]
        num_slots = self.config.host_pages * self.sizes.page_rows
        resolve(
            positions,
            self.request_rows[: self.batch],
            self.region_rows[: self.batch],
            self.tables,
            self.hot.group(group),
            self.scratch,
            plan,
            rows,
            self.stats[group],
            page_size=self.sizes.page_rows,
            query_rows=self.query_rows,
            num_slots=num_slots,
            backend=self.backend,
        )
        plan = arrange(plan, most=positions.numel(), num_slots=num_slots, backend=self.backend)
        self._gather(leader, plan)
        self._replay(followers, plan)
        return rows

    def resident_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """As ``swap_in``, for a batch whose rows are all on the device: nothing is planned or copied.

        Args:
            positions: int32 [batch, <= top_k], -1 pads.

        Returns:
            int32 rows of the same shape, a new tensor; -1 where masked or not resident.
        """
        return translate(
            positions,
            self.tables.resident_page,
            self.sizes.page_rows,
            page_table=self.tables.page_table,
            request_rows=self.request_rows[: self.batch],
            backend=self.backend,
        )

    def wait_layer(self, layer: int) -> None:
        """Make the current stream wait for the copies of one layer."""
        event = self.ready.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream(self.where).wait_event(event)

    def join(self) -> None:
        """Make the current stream wait for all copies: what follows may free or rewrite their rows."""
        for layer in list(self.ready):
            self.wait_layer(layer)

    def fill(self, counters: Counters, stats: torch.Tensor | None = None) -> None:
        """Set the counts of the kernels, from ``stats``, a copy of ``self.stats``, or from the device."""
        counted = (self.stats if stats is None else stats).cpu()
        for name in ("hot_hits", "hot_lookups", "resident_rows"):
            setattr(counters, name, int(counted[:, STATS.index(name)].sum()))
        misses = counted[:, STATS.index("hot_lookups")] - counted[:, STATS.index("hot_hits")]
        pairs = zip(misses.tolist(), self.groups, strict=True)
        counters.swapped_in_bytes = self.row.row_bytes * sum(n * len(group.layers) for n, group in pairs)

    def translate(self, slots: torch.Tensor) -> torch.Tensor:
        """Device rows int32 of row slots; -1 where one is not resident."""
        return translate(slots, self.tables.resident_page, self.sizes.page_rows, backend=self.backend)

    def _place_regions(self, regions: dict[int, tuple[int, list[int]]]) -> None:
        where = self.where
        # A region may pass from one row to another here: the pages of its new holder stand, in either order.
        pages = {
            self.region_of[row]: [0] * self.sizes.hot_pages for row in regions if self.region_of[row] >= 0
        }
        pages |= {region: device_pages for region, device_pages in regions.values() if region >= 0}
        rows = upload(list(regions), torch.int64, where)
        self.hot_region[rows] = upload([region for region, _ in regions.values()], torch.int32, where)
        if pages:
            changed = upload(list(pages), torch.int64, where)
            flat = [page for run in pages.values() for page in run]
            self.tables.hot_pages[changed] = upload(flat, torch.int32, where).view(len(pages), -1)
            self.hot.reset(changed)
        for row, (region, _) in regions.items():
            self.region_of[row] = region

    def _replay(self, followers: list[int], plan: CopyPlan) -> None:
        if self.copy_stream is None:
            for layer in followers:
                self._gather(layer, plan)
            return
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.where))
        with torch.cuda.stream(self.copy_stream):
            for layer in followers:
                self._gather(layer, plan, beside=True)
                self.ready[layer] = torch.cuda.Event()
                self.ready[layer].record(self.copy_stream)

    def _gather(self, layer: int, plan: CopyPlan, *, beside: bool = False) -> None:
        host, device = self.host.buffer[layer], self.device.buffer[layer]
        gather(host, device, plan, self.row, beside=beside, backend=self.backend)

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` on damaged tables or hot state. Reads the device."""
        self.tables.check_integrity()
        self.hot.check_integrity()
        self.scratch.check_integrity()
        self._check_regions()
        unserved = int(self.stats[:, STATS.index("unserved")].sum())
        if unserved:
            raise RuntimeError(f"{unserved} selected rows were neither resident nor had a hot region")

    def _check_regions(self) -> None:
        if self.hot_region.tolist() != self.region_of:
            raise RuntimeError(f"hot_region is {self.hot_region.tolist()}, {self.region_of} was written")
        held = sorted(region for region in self.region_of if region >= 0)
        leased = self.tables.hot_pages[:, 0].nonzero().flatten().tolist()
        if held != leased:
            raise RuntimeError(f"requests hold the hot regions {held}, those with pages are {leased}")


def _tables(requests: int, sizes: Sizes, host_pages: int, where: torch.device) -> tuple[torch.Tensor, Tables]:
    """Empty tables, and the int32 tensor of which ``page_table`` and ``resident_page`` are parts: what a step
    changes in both is written at once."""
    shape = (requests, sizes.context_pages)
    start = -(-requests * sizes.context_pages // ALIGNMENT) * ALIGNMENT
    cells = torch.zeros(start + host_pages, dtype=torch.int32, device=where)
    page_table = cells[: requests * sizes.context_pages].view(shape)
    hot_pages = torch.zeros((sizes.hot_regions, sizes.hot_pages), dtype=torch.int32, device=where)
    return cells, Tables(page_table, cells[start:], hot_pages)
