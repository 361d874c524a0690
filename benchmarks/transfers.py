"""Mirror of a step's rows, and spill and restore of pages, in 78 layers, against plain copies.

python -m benchmarks.transfers
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import memory, report, timing
from benchmarks.cells import PAGE_SIZE
from hisparse_sgl.kernels.rows import row_view
from hisparse_sgl.kernels.scatter import scatter
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import KVLayout
from hisparse_sgl.mem_pool.page_copies import PageCopies
from hisparse_sgl.metrics import Counters
from hisparse_sgl.transfer_queue import PageCopy
from hisparse_sgl.transfers import Transfers

STEPS = 24
RUNS = 4
MEMCPY_BYTES = 256 << 20


class Bench:
    """Pools of ``num_layers`` layers with random bytes on the device, and the transfers between them."""

    def __init__(self, num_layers: int, num_pages: int, requests: int, device: torch.device) -> None:
        self.where = device
        layout: KVLayout = memory.layout_of((656,), num_layers)
        self.row = layout.host_group.row
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.host: HostPool = memory.open_pool(layout, num_pages)[0]
        self.device = DevicePool(layout, num_pages, num_pages, device)
        self.device.buffer.random_(0, 256)
        self.transfers = Transfers(self.host, self.device, self.row, Counters())
        generator = torch.Generator().manual_seed(0)

        def draw() -> torch.Tensor:
            rows = torch.randperm((num_pages - 1) * PAGE_SIZE, generator=generator)[: STEPS * requests]
            return (rows + PAGE_SIZE).int().view(STEPS, requests).to(device)

        self.rows, self.slots = draw(), draw()

    def mirror(self) -> None:
        """The rows of every step, each in one call."""
        for rows, slots in zip(self.rows, self.slots, strict=True):
            scatter(self.device.buffer, self.host.buffer, rows, slots, self.row)

    def check_mirror(self) -> None:
        """Raise RuntimeError unless every mirrored row has the device's bytes."""
        self.mirror()
        timing.synchronize(self.where)
        rows, slots = self.rows.flatten().long(), self.slots.flatten().long().cpu()
        want = row_view(self.device.buffer, self.row)[:, rows // PAGE_SIZE, rows % PAGE_SIZE].cpu()
        got = row_view(self.host.buffer, self.row)[:, slots // PAGE_SIZE, slots % PAGE_SIZE]
        if not torch.equal(got, want):
            raise RuntimeError("mirror: the host rows are not the device's")

    def pages(self, run: int) -> list[PageCopy]:
        """``RUNS`` runs of ``run`` neighbouring pages, apart from each other, other pages on each side."""
        stride = (self.num_pages - 1) // RUNS
        starts = [1 + index * stride for index in range(RUNS)]
        return [
            PageCopy(host + offset, device + offset)
            for host, device in zip(starts, reversed(starts), strict=True)
            for offset in range(run)
        ]

    def move(self, copies: list[PageCopy], to_host: bool) -> None:
        """Spill or restore, and make the current stream wait for it."""
        lane = self.transfers.to_host if to_host else self.transfers.to_device
        (self.transfers.spill if to_host else self.transfers.restore)(copies)
        if lane.stream is not None:
            torch.cuda.current_stream(self.where).wait_stream(lane.stream)

    def ways(self) -> dict[str, PageCopies]:
        """Every way to copy pages that works here, by name."""
        methods = PageCopies.usable(self.host, self.device)
        return {method: PageCopies(self.host, self.device, method) for method in methods}

    def check_pages(self, copies: list[PageCopy]) -> None:
        """Raise RuntimeError unless spilled pages come back as they were."""
        index = torch.tensor([copy.device_page for copy in copies], device=self.where)
        before = self.device.buffer[:, index].clone()
        self.move(copies, to_host=True)
        timing.synchronize(self.where)
        self.device.buffer[:, index] = 0
        self.move(copies, to_host=False)
        timing.synchronize(self.where)
        if not torch.equal(self.device.buffer[:, index], before):
            raise RuntimeError("restore: the pages are not what was spilled")


def count_launches(body: Callable[[], None], device: torch.device) -> dict[str, int] | None:
    """Kernels and copies that ``body`` puts on the device; None without a GPU or a profiler."""
    if device.type != "cuda":
        return None
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            body()
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        print(f"launches are not counted: {error}", flush=True)
        return None
    names = [event.name for event in profile.events() or [] if event.device_type.name == "CUDA"]
    copies = sum(name.startswith("Mem") for name in names)
    return {"kernels": len(names) - copies, "copies": copies}


def cpu_time(start: Callable[[], None], device: torch.device, repeats: int = 15) -> float:
    """Microseconds of the calling thread for ``start``, median."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        start()
        times.append(time.perf_counter() - began)
        timing.synchronize(device)
    return round(sorted(times)[repeats // 2] * 1e6, 1)


def measure_mirror(bench: Bench, to_host_gbps: float) -> dict[str, Any]:
    """Microseconds of a step's mirror, and beyond what its bytes take at the rate of a plain copy."""
    bench.check_mirror()
    sample = timing.measure(bench.mirror, timing.nothing, STEPS, bench.where)
    num_bytes = bench.rows.shape[1] * bench.num_layers * bench.row.row_bytes
    own = num_bytes / to_host_gbps / 1e3
    rows, slots = bench.rows[0].tolist(), bench.slots[0].tolist()

    def start() -> None:
        bench.transfers.mirror(slots, rows)

    launches = count_launches(start, bench.where)
    return {
        "mirror_us": sample._asdict(),
        "bytes": num_bytes,
        "bytes_us": round(own, 1),
        "beyond_us": round(sample.p50 - own, 1),
        "launches": launches,
        "cpu_us": cpu_time(start, bench.where),
    }


def measure_pages(bench: Bench, run: int, to_host: bool, memcpy_gbps: float) -> dict[str, Any]:
    """GB/s of ``RUNS`` runs of pages in all layers, and its share of a plain copy's."""
    copies = bench.pages(run)
    times = [
        timing.time_once(lambda: bench.move(copies, to_host), timing.nothing, bench.where) for _ in range(7)
    ]
    sample = timing.Sample.of(times[2:])
    num_bytes = len(copies) * bench.num_layers * bench.row.page_bytes
    rate = num_bytes / sample.p50 / 1e3
    return {
        "what": "spill" if to_host else "restore",
        "run_pages": run,
        "bytes": num_bytes,
        "us": sample._asdict(),
        "gbps": round(rate, 2),
        "of_memcpy": round(rate / memcpy_gbps, 3),
        "cpu_us": cpu_time(lambda: bench.move(copies, to_host), bench.where, 5),
    }


def main() -> int:
    arguments = report.common_arguments("transfers", __doc__).parse_args()
    device = torch.device(arguments.device)
    layers, pages, requests, runs = (3, 33, 2, (8, 1)) if arguments.tiny else (78, 513, 64, (64, 8, 1))
    bench = Bench(layers, pages, requests, device)
    large = bench.host.buffer.view(-1)[:MEMCPY_BYTES]
    other = torch.empty_like(large, device=device).random_(0, 256)
    rates = {
        "to_host": timing.copy_rate(large, other, device),
        "to_device": timing.copy_rate(other, large, device),
    }
    results = report.Report(arguments.out / "transfers.jsonl", device)
    mirror = measure_mirror(bench, rates["to_host"])
    shared = {"layers": layers, "requests": requests, "memcpy_gbps": rates}
    results.write(shared | {"what": "mirror"} | mirror)
    rows = []
    for name, way in bench.ways().items():
        bench.transfers.pages = way
        bench.check_pages(bench.pages(runs[0]))
        for run in runs:
            for to_host in (True, False):
                memcpy = rates["to_host" if to_host else "to_device"]
                values = {"way": name} | measure_pages(bench, run, to_host, memcpy)
                results.write(shared | values)
                figures = (values["gbps"], values["of_memcpy"], values["us"]["p50"], values["cpu_us"])
                what = f"{name}: {values['what']}, runs of {run} pages"
                rows.append([what, *(f"{figure:.2f}" for figure in figures)])
    results.close()
    print(f"memcpy: to host {rates['to_host']:.1f} GB/s, to device {rates['to_device']:.1f} GB/s")
    print(
        f"mirror of {requests} rows x {layers} layers: p50 {mirror['mirror_us']['p50']:.1f} us, its bytes "
        f"{mirror['bytes_us']} us, beyond them {mirror['beyond_us']} us, launches {mirror['launches']}, "
        f"CPU {mirror['cpu_us']} us"
    )
    print(report.table(["pages", "GB/s", "of memcpy", "us", "CPU us"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
