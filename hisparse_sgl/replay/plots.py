"""One PNG for each sweep. Needs matplotlib (extra ``tools``)."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = dict[str, Any]

COLORS = ("#1f77b4", "#d1495b", "#2e7d32", "#8e5ea2")
MODE_COLORS = {"resident": "#2e7d32", "hybrid": "#e9a23b", "hot": "#d1495b"}
NAMES = {"host": "hit_rate_by_host", "device": "concurrency_by_device", "policy": "policies"}


def draw(sweep: str, results: list[Result], title: str, ceiling: float) -> bytes:
    """The PNG of a sweep ("host", "device" or "policy") over the results of its points."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'hisparse-sgl[tools]'") from None
    painters = {"host": _host, "device": _device, "policy": _policy}
    figure = Figure(figsize=(8 if sweep == "host" else 11, 4.6), dpi=120, layout="constrained")
    painters[sweep](figure, results, ceiling)
    figure.suptitle(title, fontsize=11)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _host(figure: Figure, results: list[Result], ceiling: float) -> None:
    axes = figure.subplots()
    for color, policy in zip(COLORS, dict.fromkeys(r["policy"] for r in results), strict=False):
        points = [r for r in results if r["policy"] == policy]
        sizes = [r["host_gib"] for r in points]
        axes.plot(sizes, _percent(points), "o-", color=color, label=policy)
    axes.axhline(100 * ceiling, color="#777777", linestyle="--", linewidth=1, label="nothing ever dropped")
    _size_axis(axes, sorted({r["host_gib"] for r in results}), "host pool, GiB")
    axes.set_ylabel("prompt tokens found in the cache, %")
    axes.set_ylim(0, max(100 * ceiling, *_percent(results)) * 1.12 or 1)
    axes.legend(loc="lower right", frameon=False)


def _device(figure: Figure, results: list[Result], ceiling: float) -> None:
    left, right = figure.subplots(1, 2)
    sizes = [r["device_pages"] for r in results]
    left.plot(sizes, [r["concurrency_peak"] for r in results], "o--", color=COLORS[0], label="peak")
    left.plot(sizes, [r["concurrency_busy_mean"] for r in results], "o-", color=COLORS[0], label="mean")
    _size_axis(left, sizes, "device pool, pages")
    left.set_ylim(bottom=0)
    left.set_ylabel("requests running at once")
    left.legend(loc="upper left", frameon=False)
    bottom = [0.0] * len(results)
    for mode, color in MODE_COLORS.items():
        shares = [100 * r["decode_time_share"][mode] for r in results]
        right.bar(range(len(results)), shares, 0.7, bottom, color=color, label=mode)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    right.set_xticks(range(len(results)), [f"{size:,}" for size in sizes])
    right.set_xlabel("device pool, pages")
    right.set_ylabel("decode time by residency, %")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=3, frameon=False)
    _trim(right)


def _policy(figure: Figure, results: list[Result], ceiling: float) -> None:
    timed = "ttft_seconds" in results[0]
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    policies = [r["policy"] for r in results]
    _bars(panels[0], policies, _percent(results), "prompt tokens found in the cache, %", "{:.2f}")
    if timed:
        times = [r["ttft_seconds"]["p90"] for r in results]
        _bars(panels[1], policies, times, "time to first token, 90th percentile, s", "{:.2f}")


def _bars(axes: Axes, names: list[str], values: list[float], label: str, form: str) -> None:
    bars = axes.bar(names, values, 0.5, color=COLORS[: len(names)])
    axes.bar_label(bars, [form.format(value) for value in values], padding=3)
    axes.set_ylabel(label)
    axes.set_xlabel("eviction policy")
    axes.set_ylim(0, max(values) * 1.15 or 1)
    _trim(axes)


def _size_axis(axes: Axes, sizes: list[float], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,g}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)
    _trim(axes)


def _trim(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def _percent(results: list[Result]) -> list[float]:
    return [100 * r["token_hit_rate"] for r in results]
