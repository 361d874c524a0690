"""Correctness of one case before it is timed: every byte, and the plan and order against the reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.cells import PAGE_SIZE
from benchmarks.workload import Workload
from hisparse_sgl.kernels.arrange import arrange
from hisparse_sgl.kernels.gather import gather
from hisparse_sgl.kernels.resolve import resolve
from hisparse_sgl.kernels.resolve_reference import resolve_reference
from hisparse_sgl.kernels.state import CopyPlan, HotState, PlanOrder, Tables


class GateError(RuntimeError):
    """A kernel gave a wrong result; the case is not timed."""


def run_resolve(work: Workload, step: int) -> CopyPlan:
    """Plan one step: mutates the hot state, the plan and ``out_rows``. Returns the plan to copy by."""
    resolve(
        work.positions[step],
        work.request_rows,
        work.region_rows,
        work.tables,
        work.hot,
        work.scratch,
        work.plan,
        work.out_rows,
        work.stats,
        page_size=PAGE_SIZE,
        num_slots=work.num_slots,
        query_rows=work.cell.query_rows,
        backend=work.backend,
    )
    most = work.positions[step].numel()
    return arrange(work.plan, most=most, num_slots=work.num_slots, backend=work.backend)


def run_gather(work: Workload, plan: CopyPlan, step: int) -> None:
    """Copy the rows of a step's plan, from the layer whose turn it is."""
    gather(work.hosts[step % len(work.hosts)], work.device, plan, work.row, backend=work.backend)


def copy_plan(plan: CopyPlan) -> CopyPlan:
    """A plan that later steps do not overwrite."""
    tensors = {name: value.clone() for name, value in vars(plan).items() if name != "order"}
    order = plan.order and PlanOrder(*(tensor.clone() for tensor in plan.order))
    return replace(plan, **tensors, order=order)


class Shadow:
    """The reference of `resolve` on CPU copies of a few batch rows."""

    def __init__(self, work: Workload, batch_rows: list[int]) -> None:
        cell = work.cell
        self.work = work
        self.batch_rows = batch_rows
        self.owners = work.request_rows[batch_rows].long()
        self.regions = work.region_rows[batch_rows].long()
        queries = [row * cell.query_rows + i for row in batch_rows for i in range(cell.query_rows)]
        self.queries = torch.tensor(queries, device=self.owners.device)
        self.tables = Tables(
            work.tables.page_table[self.owners].cpu(),
            work.tables.resident_page.cpu(),
            work.tables.hot_pages[self.regions].cpu(),
        )
        self.hot = HotState.empty(len(batch_rows), cell.hot_rows, cell.context)
        self.plan = CopyPlan.empty(len(queries) * cell.top_k, len(batch_rows))
        self.out_rows = torch.empty((len(queries), cell.top_k), dtype=torch.int32)

    def check(self, step: int) -> None:
        """Run the step on the reference and compare all that the kernel wrote for these batch rows.

        Raises:
            GateError: something differs.
        """
        work = self.work
        own_rows = torch.arange(len(self.batch_rows), dtype=torch.int32)
        resolve_reference(
            work.positions[step][self.queries].cpu(),
            own_rows,
            own_rows,
            self.tables,
            self.hot,
            self.plan,
            self.out_rows,
            torch.zeros(4, dtype=torch.int64),
            page_size=PAGE_SIZE,
            num_slots=work.num_slots,
        )
        pairs = {"out_rows": (work.out_rows[self.queries], self.out_rows)}
        for name in HotState._fields:
            pairs[name] = (getattr(work.hot, name)[self.regions], getattr(self.hot, name))
        for name, (got, want) in pairs.items():
            different = int((got.cpu() != want).sum())
            if different:
                raise GateError(f"{work.cell.name}: step {step}: {different} of {want.numel()} {name} differ")
        for index, batch_row in enumerate(self.batch_rows):
            if work.plan.segment(batch_row) != self.plan.segment(index):
                raise GateError(f"{work.cell.name}: step {step}: the plan of batch row {batch_row} differs")


def check_gate(work: Workload, checked: int) -> tuple[HotState, list[CopyPlan]]:
    """Run all steps once; the state after the warm-up step, and the plan of each step after it.

    Checks the bytes of every selected row and the misses of every request in each step, and all outputs for
    ``checked`` of the requests.

    Raises:
        GateError: a kernel gave a wrong result.
    """
    cell = work.cell
    count = min(checked, cell.batch)
    shadow = Shadow(work, [index * cell.batch // count for index in range(count)])
    work.hot.reset()
    start = work.hot
    plans = []
    for step in range(work.steps + 1):
        plan = run_resolve(work, step)
        shadow.check(step)
        if cell.resident:
            _check_resident(work, step)
        else:
            run_gather(work, plan, step)
            _check_copies(work, step)
        if step == 0:
            start = HotState(*(tensor.clone() for tensor in work.hot))
        else:
            plans.append(copy_plan(plan))
    work.scratch.check_integrity()
    work.hot.check_integrity()
    return start, plans


def _check_copies(work: Workload, step: int) -> None:
    cell = work.cell
    wrong = work.count_wrong(step, work.out_rows)
    if wrong:
        raise GateError(f"{cell.name}: step {step}: {wrong} selected rows have wrong bytes")
    expected = cell.misses if step else cell.selected
    counts = work.plan.counts[: cell.batch]
    if int(work.plan.count) != cell.batch * expected or bool((counts != expected).any()):
        raise GateError(
            f"{cell.name}: step {step}: plan has {int(work.plan.count)} copies, {int(counts.min())} to "
            f"{int(counts.max())} a request, not {expected}"
        )


def _check_resident(work: Workload, step: int) -> None:
    slots = work.slots(step)
    expected = work.tables.resident_page[slots // PAGE_SIZE].long() * PAGE_SIZE + slots % PAGE_SIZE
    wrong = int((work.out_rows.long() != expected).sum())
    if wrong or int(work.plan.count):
        raise GateError(
            f"{work.cell.name}: step {step}: {wrong} resident rows are wrong, {int(work.plan.count)} copies"
        )
