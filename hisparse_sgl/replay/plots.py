"""One PNG for each sweep. Needs matplotlib (extra ``tools``)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = dict[str, Any]

COLORS = ("#1f77b4", "#d1495b", "#2e7d32", "#8e5ea2")
MODE_COLORS = {"resident": "#2e7d32", "hybrid": "#e9a23b", "hot": "#d1495b"}
WIDTHS = {"host": 8, "device": 14, "policy": 9}
NAMES = {"host": "hit_rate_by_host", "device": "concurrency_by_device", "policy": "policies"}


def draw(sweep: str, results: list[Result], title: str, ceiling: float) -> bytes:
    """The PNG of a sweep ("host", "device" or "policy") over the results of its points."""
    from matplotlib.figure import Figure

    painters = {"host": _host, "device": _device, "policy": _policy}
    figure = Figure(figsize=(WIDTHS[sweep], 4.6), dpi=120, layout="constrained")
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
    left, middle, right = figure.subplots(1, 3)
    sizes = [r["device_pages"] for r in results]
    times = [r["ttft_seconds"] for r in results]
    _line(left, sizes, [r["concurrency_peak"] for r in results], COLORS[0], "peak", "o--")
    _line(left, sizes, [r["concurrency_busy_mean"] for r in results], COLORS[0], "mean")
    left.set_ylim(bottom=0)
    left.set_ylabel("requests running at once")
    _line(middle, sizes, [each["p99"] for each in times], COLORS[1], "99th percentile", "o--")
    _line(middle, sizes, [each["p50"] for each in times], COLORS[1], "median")
    middle.set_yscale("log")
    middle.yaxis.set_major_formatter("{x:g}")
    middle.set_ylabel("time to first token, s")
    _shares(right, sizes, [r["decode_time_share"] for r in results])


def _line(
    axes: Axes, sizes: list[int], values: list[float], color: str, label: str, style: str = "o-"
) -> None:
    axes.plot(sizes, values, style, color=color, label=label)
    _size_axis(axes, sizes, "device pool, pages")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _shares(axes: Axes, sizes: list[int], shares: list[dict[str, float]]) -> None:
    places = range(len(sizes))
    bottom = [0.0] * len(sizes)
    for mode, color in MODE_COLORS.items():
        heights = [100 * each[mode] for each in shares]
        axes.bar(places, heights, 0.7, bottom, color=color, label=mode)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, [f"{size:,}" for size in sizes])
    axes.set_xlabel("device pool, pages")
    axes.set_ylabel("decode time by residency, %")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    _trim(axes)


def _policy(figure: Figure, results: list[Result], ceiling: float) -> None:
    timed = "ttft_seconds" in results[0]
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    policies = [r["policy"] for r in results]
    _bars(panels[0], policies, _percent(results), "prompt tokens found in the cache, %", "{:.2f}")
    if timed:
        times = [r["ttft_seconds"]["p90"] for r in results]
        _bars(panels[1], policies, times, "time to first token, 90th percentile, s", "{:.2f}")


def _bars(axes: Axes, names: list[str], values: list[float], label: str, form: str) -> None:
    bars = axes.bar(names, values, 0.4, color=COLORS[: len(names)])
    axes.bar_label(bars, [form.format(value) for value in values], padding=3)
    axes.set_ylabel(label)
    axes.set_xlabel("eviction policy")
    axes.set_ylim(0, max(values) * 1.15 or 1)
    axes.margins(x=0.4 / len(names))
    _trim(axes)


def _size_axis(axes: Axes, sizes: Sequence[float], label: str) -> None:
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
