"""A captured swap-in replays with new inputs: selections, padded rows and batches of another size."""

from __future__ import annotations

import pytest
import torch

from hisparse_sgl.kernels.gather import gather
from hisparse_sgl.kernels.resolve import resolve
from hisparse_sgl.kernels.rows import RowFormat, row_view
from hisparse_sgl.kernels.state import CopyPlan, HotState, Scratch, Tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
P, K, H, PAGES, REQUESTS = 64, 256, 512, 24, 9
FMT = RowFormat.make((576, 8), P, align=576)


class Fixture:
    """The same tables and host rows for the graphs and for the reference, which keeps its own hot state."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        host_pages, regions = REQUESTS * PAGES + 1, REQUESTS * H // P
        self.tables = Tables.empty(REQUESTS, PAGES, host_pages, REQUESTS, H // P, "cuda")
        self.tables.page_table.copy_((torch.randperm(host_pages - 1) + 1).reshape(REQUESTS, PAGES))
        self.tables.hot_pages.copy_((torch.randperm(regions) + 1).reshape(REQUESTS, -1))
        self.host = torch.randint(0, 256, (host_pages, FMT.page_bytes), dtype=torch.uint8).pin_memory()
        self.device = torch.zeros(regions + 1, FMT.page_bytes, dtype=torch.uint8, device="cuda")
        self.num_slots = host_pages * P
        self.hot = HotState.empty(REQUESTS, H, PAGES * P, "cuda")
        self.shadow = HotState.empty(REQUESTS, H, PAGES * P)
        self.scratch = Scratch.empty(REQUESTS, PAGES * P, H, "cuda")
        self.plan = CopyPlan.empty(REQUESTS * K, REQUESTS, "cuda")
        self.positions = torch.full((REQUESTS, K), -1, dtype=torch.int32, device="cuda")
        self.request_rows = torch.full((REQUESTS,), -1, dtype=torch.int32, device="cuda")
        self.regions = torch.randperm(REQUESTS).int()
        self.region_rows = self.request_rows.clone()
        self.out_rows = torch.zeros((REQUESTS, K), dtype=torch.int32, device="cuda")
        self.stats = torch.zeros(4, dtype=torch.int64, device="cuda")

    def swap_in(self, batch: int) -> None:
        inputs = self.positions[:batch], self.request_rows[:batch], self.region_rows[:batch]
        state = self.tables, self.hot, self.scratch, self.plan, self.out_rows[:batch], self.stats
        resolve(*inputs, *state, page_size=P, num_slots=self.num_slots)
        gather(self.host, self.device, self.plan, FMT)

    def capture(self, batch: int) -> torch.cuda.CUDAGraph:
        """A graph of one swap-in, captured while every row is padding, so that no state changes."""
        self.set_rows(torch.full((batch,), -1, dtype=torch.int32))
        self.swap_in(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.swap_in(batch)
        return graph

    def regions_of(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows < 0, -1, self.regions[rows.long()])

    def set_rows(self, rows: torch.Tensor) -> None:
        for tensor, values in ((self.request_rows, rows), (self.region_rows, self.regions_of(rows))):
            tensor.fill_(-1)
            tensor[: rows.numel()] = values.cuda()

    def check(self, batch: int, positions: torch.Tensor, rows: torch.Tensor) -> None:
        """Compare what the last replay left with the reference, then the bytes of every selected row."""
        tables = Tables(*(tensor.cpu() for tensor in self.tables))
        plan, out = CopyPlan.empty(REQUESTS * K, REQUESTS), torch.zeros((batch, K), dtype=torch.int32)
        state = tables, self.shadow, Scratch.empty(batch, PAGES * P, H), plan, out
        stats = torch.zeros(4, dtype=torch.int64)
        inputs, sizes = (
            (positions, rows, self.regions_of(rows)),
            {"page_size": P, "num_slots": self.num_slots},
        )
        resolve(*inputs, *state, stats, **sizes, backend="reference")
        assert torch.equal(self.out_rows[:batch].cpu(), out)
        for got, want in zip(self.hot, self.shadow, strict=True):
            assert torch.equal(got.cpu(), want)
        assert [self.plan.segment(row) for row in range(batch)] == [plan.segment(row) for row in range(batch)]
        self.plan.check_integrity(batch)
        self.scratch.check_integrity()
        chosen = out >= 0
        pages = tables.page_table[rows.clamp(min=0).long()[:, None], positions.clamp(min=0).long() // P]
        slots = (pages.long() * P + positions % P)[chosen]
        for part in range(2):
            want = row_view(self.host, FMT, part)[slots // P, slots % P]
            got = row_view(self.device.cpu(), FMT, part)[out[chosen] // P, out[chosen] % P]
            assert torch.equal(got, want)


def test_replays_with_new_inputs_padding_and_batch_sizes() -> None:
    fixture = Fixture()
    graphs = {batch: fixture.capture(batch) for batch in (1, 4, REQUESTS)}
    torch.cuda.synchronize()
    for step in range(24):
        batch = (1, 4, REQUESTS)[step % 3]
        rows = torch.randperm(REQUESTS)[:batch].int()
        rows[torch.rand(batch) < 0.2] = -1
        positions = torch.randint(0, 2 * K, (batch, K)).int()
        positions[torch.rand(batch, K) < 0.1] = -1
        fixture.positions.fill_(-1)
        fixture.positions[:batch] = positions.cuda()
        fixture.set_rows(rows)
        graphs[batch].replay()
        torch.cuda.synchronize()
        fixture.check(batch, positions, rows)
    assert int(fixture.stats[0]) > 0
