"""The swap-in results as a picture: microseconds a step, and GB/s of the copy against both limits.

python -m benchmarks.plot benchmarks/results/swap_in.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def draw(path: Path) -> Path | None:
    """Write ``path`` with the ending .png; None (which is said) where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed", flush=True)
        return None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if line["bytes"]]
    if not lines:
        return None
    figure, (times, rates) = pyplot.subplots(2, 1, sharex=True, figsize=(max(8, len(lines) * 0.4), 10))
    _draw_times(times, lines)
    _draw_rates(rates, lines)
    rates.set_xticks(range(len(lines)), [line["cell"] for line in lines], rotation=90, fontsize=7)
    title = f"Swap-in of one layer, of six in turn (l6), {lines[0]['environment']['device']}"
    times.set_title(f"{title}\nwithout the cases that copy nothing (resident, m0)")
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    return target


def _draw_times(axes: Any, lines: list[dict[str, Any]]) -> None:
    for name, mark in (("plan", "."), ("copy", "_"), ("whole", "o")):
        axes.plot([line[f"{name}_us"]["p50"] for line in lines], mark, label=name)
    peers = [
        min((block["whole_us"]["p50"] for block in line.get("sglang", {}).values()), default=float("nan"))
        for line in lines
    ]
    if any(peer == peer for peer in peers):
        axes.plot(peers, "x", label="SGLang, whole")
    axes.plot([line["bytes"] / line["memcpy_gbps"] / 1e3 for line in lines], "k:", label="bytes at memcpy")
    axes.set_yscale("log")
    axes.set_ylabel("microseconds a step")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def _draw_rates(axes: Any, lines: list[dict[str, Any]]) -> None:
    axes.plot([line["copy_gbps"] for line in lines], "o", label="copy")
    axes.plot([line["memcpy_gbps"] for line in lines], "k:", label="memcpy, same run")
    axes.axhline(lines[0]["kernel_read_gbps"], linestyle="--", label="a kernel before this project")
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.plot benchmarks/results/swap_in.jsonl")
    print(draw(Path(sys.argv[1])))
