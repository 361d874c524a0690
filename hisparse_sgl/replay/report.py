"""The outcome of a replay as JSON, as tables for a terminal, and as one HTML page without links."""

from __future__ import annotations

import json
from base64 import b64encode
from html import escape
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

Row = tuple[str, str]
Outcome = dict[str, Any]

FATES = ("deferred", "retracted", "refused")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; margin: .5rem 0 }
td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd }
th { text-align: left; font-weight: 600; border-bottom: 2px solid #999 }
td { font-variant-numeric: tabular-nums }
td:not(:first-child), th:not(:first-child) { text-align: right }
img { max-width: 100%; height: auto } .scroll { overflow-x: auto }
"""


def to_json(outcome: Outcome) -> str:
    """The outcome as text; equal outcomes give equal bytes."""
    return json.dumps(outcome, indent=2, allow_nan=False) + "\n"


def print_tables(outcome: Outcome, console: Console) -> None:
    """The outcome for people."""
    for title, rows in _sections(outcome):
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(overflow="fold")
        table.add_column(justify="right", overflow="fold")
        for row in rows:
            table.add_row(*map(escape_markup, row))
        console.print(table)
    for sweep, results in outcome["sweeps"].items():
        table = Table(
            title=f"sweep: {sweep}", title_justify="left", box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0)
        )
        header, *body = _grid(results)
        for name in header:
            table.add_column(name, justify="right", overflow="fold")
        for line in body:
            table.add_row(*line)
        console.print(table)


def to_html(outcome: Outcome, plots: dict[str, bytes]) -> str:
    """One page: the tables, and the plots inside it."""
    title = f"Replay of {outcome['trace']['name']}"
    parts = [f"<h1>{escape(title)}</h1>"]
    for heading, rows in _sections(outcome):
        cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
        parts.append(f"<h2>{escape(heading)}</h2><table>{cells}</table>")
    for sweep, results in outcome["sweeps"].items():
        parts.append(f"<h2>Sweep: {escape(sweep)}</h2>")
        if sweep in plots:
            image = b64encode(plots[sweep]).decode()
            parts.append(f'<img alt="Plot of the {escape(sweep)} sweep" src="data:image/png;base64,{image}">')
        parts.append(_html_grid(_grid(results)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _html_grid(grid: list[list[str]]) -> str:
    header, *body = grid
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in header) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _sections(outcome: Outcome) -> list[tuple[str, list[Row]]]:
    sections = [("trace", _trace_rows(outcome["trace"])), ("cache", _cache_rows(outcome))]
    if "ttft_seconds" in outcome["result"]:
        sections += [
            ("latency and load", _load_rows(outcome["result"])),
            ("device memory", _memory_rows(outcome["result"])),
        ]
    return sections


def _trace_rows(trace: dict[str, Any]) -> list[Row]:
    return [
        ("file", trace["name"]),
        ("format", f"{trace['dialect']}, blocks of {trace['block_size']} tokens"),
        ("requests", f"{trace['requests']:,} in {_time(trace['span_seconds'])}"),
        ("prompt tokens", f"{trace['input_tokens']:,}"),
        ("answer tokens", f"{trace['output_tokens']:,}"),
        ("blocks, different ones", f"{trace['blocks']:,}, {trace['unique_blocks']:,}"),
        ("lines skipped", f"{trace['skipped_lines']:,}"),
    ]


def _cache_rows(outcome: Outcome) -> list[Row]:
    result = outcome["result"]
    rows = [
        ("host pool", _size(result["host_pages"], result["host_gib"])),
        ("device pool", _size(result["device_pages"], result["device_gib"])),
        ("eviction policy", result["policy"]),
        ("token hit rate", f"{_share(result['token_hit_rate'])}"),
        ("if nothing were ever dropped", _share(outcome["trace"]["token_hit_rate_ceiling"])),
    ]
    if "ttft_seconds" not in result:
        rows.append(("clock", "none: prompts only, one after the other"))
    return rows


def _load_rows(result: dict[str, Any]) -> list[Row]:
    def spread(name: str) -> str:
        values = result[name]
        return " / ".join(_time(values[key]) for key in ("p50", "p90", "p99", "max"))

    return [
        ("TTFT p50 / p90 / p99 / max", spread("ttft_seconds")),
        ("of it queueing", spread("queueing_seconds")),
        ("requests at once, mean / peak", f"{result['concurrency_mean']:.1f} / {result['concurrency_peak']}"),
        ("answer tokens a second", f"{result['output_tokens_per_second']:,.1f}"),
        ("time to serve all", _time(result["makespan_seconds"])),
        ("engine waited for copies", _time(result["stalled_seconds"])),
        ("requests completed", f"{result['completed_requests']:,}"),
        ("requests deferred", f"{result['deferred_requests']:,}{_reasons(result['deferred_for'])}"),
        ("requests retracted", f"{result['retracted_requests']:,} ({result['retractions']:,} times)"),
        ("requests that cannot fit", f"{result['refused_requests']:,}"),
    ]


def _memory_rows(result: dict[str, Any]) -> list[Row]:
    shares = result["decode_time_share"]
    return [
        ("decode time resident / hybrid / hot", " / ".join(_share(shares[mode]) for mode in shares)),
        ("hot regions: selected rows still resident", _share(result["resident_share_with_hot_region"])),
        ("spilled to the host", _bytes(result["bytes_spilled"])),
        ("restored to the device", _bytes(result["bytes_restored"])),
        ("swapped in by decode steps", _bytes(result["bytes_swapped_in"])),
    ]


def _grid(results: list[dict[str, Any]]) -> list[list[str]]:
    """Header and one line for each point of a sweep, without the columns that would say nothing."""
    columns = {
        "policy": [result["policy"] for result in results],
        "host": [_short(result, "host") for result in results],
        "device": [_short(result, "device") for result in results],
    }
    columns = {name: cells for name, cells in columns.items() if len(set(cells)) > 1} or columns
    columns["hit rate"] = [_share(result["token_hit_rate"]) for result in results]
    if "ttft_seconds" in results[0]:
        columns |= _timed_columns(results)
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


def _timed_columns(results: list[dict[str, Any]]) -> dict[str, list[str]]:
    times = [result["ttft_seconds"] for result in results]
    shares = [result["decode_time_share"].values() for result in results]
    counts = [[result[f"{name}_requests"] for name in FATES] for result in results]
    return {
        "TTFT p50/p99": [f"{_time(each['p50'])}/{_time(each['p99'])}" for each in times],
        "mean": [f"{result['concurrency_busy_mean']:.1f}" for result in results],
        "peak": [str(result["concurrency_peak"]) for result in results],
        "res/hyb/hot %": ["/".join(f"{100 * share:.0f}" for share in each) for each in shares],
        "def/ret/ref": ["/".join(map(str, each)) for each in counts],
    }


def _short(result: dict[str, Any], pool: str) -> str:
    if result[f"{pool}_gib"] is not None:
        return f"{result[f'{pool}_gib']:g} GiB"
    pages = result[f"{pool}_pages"]
    return "unlimited" if pages is None else f"{pages:,}"


def _size(pages: int | None, gib: float | None) -> str:
    if pages is None:
        return "unlimited"
    return f"{pages:,} pages" + (f" ({gib:g} GiB)" if gib is not None else "")


def _reasons(reasons: dict[str, int]) -> str:
    return f" ({', '.join(f'{name}: {count:,}' for name, count in reasons.items())})" if reasons else ""


def _share(share: float) -> str:
    return f"{100 * share:.2f} %"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:,.2f} TB"
