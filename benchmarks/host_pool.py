"""How fast a host pool is set up and given back.

python -m benchmarks.host_pool [--gib 4 32]
"""

from __future__ import annotations

import time

import torch

from benchmarks import memory, report
from hisparse_sgl.mem_pool.host_pool import HostPool


def measure(gib: float) -> dict[str, float]:
    """Seconds to set up and to close a pool of ``gib`` GiB, and the rate of the set-up."""
    layout = memory.layout_of((656,))
    num_pages = memory.pages_in(layout, gib)
    grown = memory.grow_memory(layout.host_bytes(num_pages) + memory.CHUNK) if gib >= 1 else 0.0
    began = time.perf_counter()
    pool = HostPool(layout, num_pages)
    seconds = time.perf_counter() - began
    pool.buffer[0, -1].fill_(1)
    began = time.perf_counter()
    pool.close()
    return {
        "gib": gib,
        "growth_seconds": round(grown, 3),
        "seconds": round(seconds, 3),
        "gib_per_second": round(pool.num_bytes / 2**30 / seconds, 2),
        "close_seconds": round(time.perf_counter() - began, 3),
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
    for gib in [1 / 64] if arguments.tiny else arguments.gib:
        if budget.left < 0:
            print(f"not started, out of time: {gib} GiB")
            continue
        values = measure(gib)
        results.write(values)
        rows.append([f"{gib:g}", *(f"{values[name]:.2f}" for name in list(values)[1:])])
    results.close()
    print(report.table(["GiB", "growth s", "set-up s", "GiB/s", "close s"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
