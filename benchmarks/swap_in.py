"""Swap-in of one layer: the plan, the copy and both, each against its limit and against SGLang's kernel.

    python -m benchmarks.swap_in [--cells 'b64-*' ...] [--sglang FOLDER] [--budget-seconds 300]

A case is checked first (``gate.py``) and timed only when every byte is right.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from benchmarks import cells, gate, memory, plot, report, targets, timing, workload
from benchmarks.cells import Cell
from benchmarks.workload import Workload
from hisparse_sgl.kernels.state import CopyPlan, HotState
from hisparse_sgl.mem_pool.host_pool import HostPool

MEMCPY_BYTES = 256 << 20


class Pools:
    """The host pool that the cells at hand share, with equal layers: built on demand, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: HostPool | None = None
        self.key: object = None
        self.mirror = torch.empty(0)
        self.gib_per_second = 0.0
        self.memcpy_gbps = 0.0
        self.refused: dict[object, str] = {}

    def get(self, cell: Cell) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The pool's layers, and the bytes of each on the device."""
        if self.pool is None or self.key != cell.pool:
            self.close()
            layout = memory.layout_of(cell.parts, cell.layers)
            num_pages = memory.pages_in(layout, cell.pool_gib * cell.layers)
            if cell.pool in self.refused:
                raise ValueError(self.refused[cell.pool])
            try:
                self.pool, seconds = memory.open_pool(layout, num_pages)
            except ValueError as error:
                self.refused[cell.pool] = str(error)
                raise
            self.gib_per_second = self.pool.num_bytes / 2**30 / seconds
            self.mirror = memory.fill_alike(self.pool, self.device)
            self.key = cell.pool
            self.memcpy_gbps = self._memcpy()
            print(
                f"host pool {cell.pool_gib:g} GiB: {seconds:.2f} s, {self.gib_per_second:.1f} GiB/s; "
                f"memcpy {self.memcpy_gbps:.1f} GB/s",
                flush=True,
            )
        return list(self.pool.buffer), self.mirror

    def _memcpy(self) -> float:
        assert self.pool is not None
        source = self.pool.buffer.view(-1)[:MEMCPY_BYTES]
        return timing.copy_rate(torch.empty_like(source, device=self.device), source, self.device)

    def close(self) -> None:
        timing.synchronize(self.device)
        self.mirror = torch.empty(0)
        if self.pool is not None:
            self.pool.close()
        self.pool = None


def time_cell(work: Workload, start: HotState, plans: list[CopyPlan]) -> dict[str, timing.Sample]:
    """Microseconds a step of the plan, the copy and both. State is put back before each replay."""
    device = work.mirror.device
    steps = range(1, work.steps + 1)

    def restore() -> None:
        for tensor, saved in zip(work.hot, start, strict=True):
            tensor.copy_(saved)

    def plan() -> None:
        for step in steps:
            gate.run_resolve(work, step)

    def copy() -> None:
        for step, stored in zip(steps, plans, strict=True):
            gate.run_gather(work, stored, step)

    def whole() -> None:
        for step in steps:
            gate.run_gather(work, gate.run_resolve(work, step), step)

    bodies = {"plan": plan} if work.cell.resident else {"plan": plan, "copy": copy, "whole": whole}
    times = {}
    for name, body in bodies.items():
        restore()
        times[name] = timing.measure(body, restore, work.steps, device)
    if not work.cell.resident and work.count_wrong(work.steps, work.out_rows):
        raise gate.GateError(f"{work.cell.name}: the replayed graph left wrong bytes")
    return times


def footprint(work: Workload) -> dict[str, float]:
    """Device bytes of the hot state a region: of one index group, and shared by all groups of a model."""
    scratch = sum(tensor[0].numel() * tensor.element_size() for tensor in work.scratch[:3])
    state = sum(tensor[0].numel() * tensor.element_size() for tensor in work.hot)
    return {
        "hot_state_bytes": state,
        "scratch_bytes": scratch,
        "hot_region_bytes_per_layer": work.cell.hot_rows * work.cell.row_bytes,
    }


def run_cell(cell: Cell, pools: Pools, peer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Check and time one case; the values of its JSON line."""
    hosts, mirror = pools.get(cell)
    work = workload.build(cell, hosts, mirror, arguments.steps)
    start, plans = gate.check_gate(work, arguments.checked)
    times = time_cell(work, start, plans)
    values: dict[str, Any] = vars(cell) | {
        "cell": cell.name,
        "steps": arguments.steps,
        "bytes": cell.bytes_per_step,
        "memcpy_gbps": round(pools.memcpy_gbps, 2),
        "kernel_read_gbps": timing.KERNEL_READ_GBPS,
        "pool_gib_per_second": round(pools.gib_per_second, 2),
    }
    values |= {f"{name}_us": sample._asdict() for name, sample in times.items()}
    values |= footprint(work)
    if cell.bytes_per_step:
        rate = cell.bytes_per_step / times["copy"].p50 / 1e3
        values |= {"copy_gbps": round(rate, 2), "copy_of_memcpy": round(rate / pools.memcpy_gbps, 3)}
    if peer is not None and peer.supports(cell):
        try:
            values["sglang"] = peer.run(work)
        except Exception as error:
            timing.synchronize(pools.device)
            print(f"SGLang is left out of this case: {type(error).__name__}: {error}", flush=True)
    return values


HEAD = (
    "cell", "plan", "copy", "whole", "p20-p80", "over", "GB/s", "of memcpy", "at memcpy", "at 45.8",
    "SGL plan", "SGL whole", "ratio",
)  # fmt: skip


def row_of(values: dict[str, Any]) -> list[str]:
    """One line of the table. over: whole - plan - copy. at: the bytes at memcpy's rate, and at the 45.8 GB/s
    that a kernel can read. SGL: the faster of its block sizes."""

    def time_of(name: str, quantile: str = "p50") -> float | None:
        return values[name][quantile] if name in values else None

    plan, copy, whole = (time_of(f"{name}_us") for name in ("plan", "copy", "whole"))
    over = whole - plan - copy if plan and copy and whole else None
    spread = f"{values['whole_us']['p20']:.1f}-{values['whole_us']['p80']:.1f}" if whole else "-"
    blocks = values.get("sglang", {}).values()
    peer_plan = min((block["plan_us"]["p50"] for block in blocks), default=None)
    peer_whole = min((block["whole_us"]["p50"] for block in blocks), default=None)
    ratio = peer_whole / whole if peer_whole and whole else None
    figures = [over, values.get("copy_gbps"), values.get("copy_of_memcpy")]
    limits = [values["bytes"] / values[name] / 1e3 for name in ("memcpy_gbps", "kernel_read_gbps")]
    shown = [f"{value:.1f}" if value is not None else "-" for value in (plan, copy, whole)]
    shown.append(spread)
    shown += [f"{value:.2f}" if value is not None else "-" for value in figures]
    shown += [f"{limit:.1f}" for limit in limits]
    shown += [f"{value:.1f}" if value is not None else "-" for value in (peer_plan, peer_whole)]
    return [values["cell"], *shown, f"{ratio:.2f}x" if ratio else "-"]


def load_peer(folder: str | None, chosen: list[Cell], device: torch.device) -> Any:
    """SGLang's kernels, or None (which is said) when they are not wanted or cannot be built."""
    if folder is None or device.type != "cuda":
        return None
    from benchmarks.peers.sglang import Peer

    try:
        began = time.monotonic()
        peer = Peer(folder, chosen)
        print(f"SGLang's kernels were built in {time.monotonic() - began:.1f} s", flush=True)
        return peer
    except Exception as error:
        print(f"SGLang's kernels are left out: {type(error).__name__}: {error}", flush=True)
        return None


def parse() -> argparse.Namespace:
    parser = report.common_arguments("swap_in", __doc__)
    parser.add_argument("--cells", nargs="*", default=[], help="shell patterns of cell names; default: all")
    parser.add_argument("--list", action="store_true", help="print the cell names and stop")
    parser.add_argument("--sglang", help="folder with sglang/kernels; 'installed' uses the package")
    parser.add_argument("--checked", type=int, default=2, help="requests compared with the reference")
    parser.add_argument("--steps", type=int, default=workload.STEPS)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    chosen = list(cells.select(cells.cells(), arguments.cells))
    if arguments.list:
        print("\n".join(cell.name for cell in chosen))
        return 0
    if arguments.tiny:
        chosen = list({cells.tiny(cell): None for cell in chosen})
    device = torch.device(arguments.device)
    if device.type != "cuda":
        torch.set_num_threads(1)
    budget = report.Budget(arguments.budget_seconds)
    results = report.Report(arguments.out / "swap_in.jsonl", device)
    empty = timing.measure_empty(device, arguments.steps)
    peer = load_peer(arguments.sglang, chosen, device)
    pools = Pools(device)
    rows, failures, skipped = [], [], []
    try:
        for cell in chosen:
            if budget.left < 0:
                skipped.append(cell.name)
                continue
            began = time.monotonic()
            try:
                values = run_cell(cell, pools, peer, arguments)
            except Exception as error:
                # One case must not cost the others; a CUDA error does, because the context is gone.
                failures.append(f"{cell.name}: {type(error).__name__}: {error}")
                print(f"FAILED {failures[-1]}", flush=True)
                timing.synchronize(device)
                continue
            values["empty_us"] = empty._asdict()
            results.write(values)
            rows.append(row_of(values))
            print(f"{time.monotonic() - began:5.1f} s  " + "  ".join(rows[-1]), flush=True)
    finally:
        pools.close()
        results.close()
    if rows and not arguments.tiny:
        plot.draw(results.path)
    print()
    print(f"microseconds a step (p50); an empty kernel takes {empty.p50:.2f}")
    print(report.table(list(HEAD), rows))
    if rows and not arguments.tiny:
        print(targets.summary(results.path))
    for name, names in (("failed", failures), ("not started, out of time", skipped)):
        if names:
            print(f"{name}: " + "; ".join(names))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
