"""How fast a host pool is set up and given back.

python -m benchmarks.host_pool [--gib 4 32]
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks import memory, report, timing
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.shared_host_pool import SharedHostPool

SAMPLE_BYTES = 256 << 20


def measure(gib: float, shared: bool, device: torch.device) -> dict[str, Any]:
    """Seconds to set up and to close a pool of ``gib`` GiB, the rate of the set-up, and of plain copies."""
    layout = memory.layout_of((656,))
    num_pages = memory.pages_in(layout, gib)
    grown = memory.grow_memory(layout.host_bytes(num_pages) + memory.CHUNK) if gib >= 1 else 0.0
    began = time.perf_counter()
    make = SharedHostPool.create if shared else HostPool
    pool = make(layout, num_pages)
    seconds = time.perf_counter() - began
    sample = pool.buffer.view(-1)[:SAMPLE_BYTES]
    other = torch.empty_like(sample, device=device).random_(0, 256)
    rates = [timing.copy_rate(sample, other, device), timing.copy_rate(other, sample, device)]
    del sample
    began = time.perf_counter()
    pool.close()
    return {
        "kind": "shared" if shared else "private",
        "gib": gib,
        "growth_seconds": round(grown, 3),
        "seconds": round(seconds, 3),
        "gib_per_second": round(pool.num_bytes / 2**30 / seconds, 2),
        "close_seconds": round(time.perf_counter() - began, 3),
        "to_host_gbps": round(rates[0], 2),
        "to_device_gbps": round(rates[1], 2),
    }


def main() -> int:
    parser = report.common_arguments("host_pool", __doc__)
    parser.add_argument("--gib", type=float, nargs="*", default=[4, 32])
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
    budget = report.Budget(arguments.budget_seconds)
    results = report.Report(arguments.out / "host_pool.jsonl", device)
    rows = []
    sizes = [1 / 64] if arguments.tiny else arguments.gib
    for gib, shared in [(sizes[0], True), *((gib, False) for gib in sizes)]:
        if budget.left < 0:
            print(f"not started, out of time: {gib} GiB")
            continue
        values = measure(gib, shared, device)
        results.write(values)
        rows.append([values["kind"], *(f"{value:.2f}" for value in list(values.values())[1:])])
    results.close()
    head = [
        "pool",
        "GiB",
        "growth s",
        "set-up s",
        "GiB/s",
        "close s",
        "to host GB/s",
        "to device",
    ]
    print(report.table(head, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
