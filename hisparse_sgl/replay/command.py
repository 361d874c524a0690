"""The command ``replay``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import typer

from hisparse_sgl.config import EVICTION_POLICIES
from hisparse_sgl.replay import options as o
from hisparse_sgl.replay.clock import Rates
from hisparse_sgl.replay.generator import demo_trace
from hisparse_sgl.replay.sequences import Sequences
from hisparse_sgl.replay.setup import Model, Setup, Size
from hisparse_sgl.replay.sweep import Runner, Sweeps, hit_rate_ceiling
from hisparse_sgl.replay.traces import Trace, read_trace

FINDING = 1


def replay(
    trace: o.TraceFile = None,
    demo: o.Demo = False,
    dialect: o.DialectName = o.Dialect.auto,
    block_size: o.BlockSize = None,
    skip_bad: o.SkipBad = False,
    limit: o.Limit = None,
    host_gib: o.HostGib = 256.0,
    host_pages: o.HostPages = None,
    device_gib: o.DeviceGib = 24.0,
    device_pages: o.DevicePages = None,
    policy: o.PolicyName = o.Policy.lru,
    max_requests: o.MaxRequests = 256,
    clock: o.UseClock = None,
    slowdown: o.Slowdown = 1.0,
    layers: o.Layers = Model.layers,
    row_bytes: o.RowBytes = Model.row_bytes,
    top_k: o.TopK = Model.top_k,
    hot_rows: o.HotRows = Model.hot_rows,
    prefill_tokens: o.PrefillTokens = Rates.prefill_tokens,
    prefill_chunk: o.PrefillChunk = Rates.prefill_chunk,
    decode_step_ms: o.DecodeStepMs = Rates.decode_step_ms,
    decode_request_ms: o.DecodeRequestMs = Rates.decode_request_ms,
    swap_step_ms: o.SwapStepMs = Rates.swap_step_ms,
    gather_gb_s: o.GatherRate = Rates.gather_gb_s,
    to_device_gb_s: o.ToDeviceRate = Rates.to_device_gb_s,
    to_host_gb_s: o.ToHostRate = Rates.to_host_gb_s,
    copy_us: o.CopyUs = Rates.copy_us,
    hot_hit_rate: o.HotHitRate = Rates.hot_hit_rate,
    sweep_host: o.SweepHost = None,
    sweep_device: o.SweepDevice = None,
    sweep_policy: o.SweepPolicy = None,
    plots: o.Plots = None,
    html: o.Html = None,
    output: o.OutputFormat = o.Format.table,
) -> None:
    """Serve a trace of requests on a simulated GPU with a given host and device pool.

    Exit code 1: a request is too long for the device pool; standard error says how many.

    \b
    Example:
      hisparse-sgl replay trace.jsonl.gz --host-gib 512 --sweep-host-gib 128,512,2048 --plots plots
      hisparse-sgl replay --demo --device-gib 8
    """
    given = dict(locals())
    outcome = _replay(given)
    _write(outcome, output, plots, html)
    refused = outcome["result"].get("refused_requests", 0)
    if refused:
        print(f"hisparse-sgl: {refused} requests do not fit: raise the device pool", file=sys.stderr)
        raise typer.Exit(FINDING)


def _replay(given: Mapping[str, Any]) -> dict[str, Any]:
    setup = _setup(given)
    sweeps = _sweeps(given)
    points = sweeps.points(setup)
    _prepare(given["plots"], given["html"])
    if given["plots"] and not points:
        raise ValueError("--plots has nothing to draw: add a sweep, such as --sweep-host-gib 64,256")
    sequences = Sequences(_trace(given))
    runner = Runner(sequences)
    num_runs = runner.check(chain([setup], *points.values()))
    with _progress(num_runs * len(sequences.trace.requests)) as runner.on_request:
        return {
            "trace": _describe(sequences),
            "result": runner.run(setup),
            "sweeps": {name: [runner.run(point) for point in setups] for name, setups in points.items()},
        }


def _prepare(plots: Path | None, html: Path | None) -> None:
    """Refuse a place that cannot be written before the work is done, not after."""
    if (plots or html) and find_spec("matplotlib") is None:
        raise ValueError("--plots and --html need matplotlib: pip install 'hisparse-sgl[tools]'")
    if html and not os.path.isdir(html.parent):
        raise ValueError(f"--html is {html}: there is no folder {html.parent}; make it first")
    if html and os.path.isdir(html):
        raise ValueError(f"--html is {html}: that is a folder; give a file")
    if plots and os.path.exists(plots) and not os.path.isdir(plots):
        raise ValueError(f"--plots is {plots}: that is a file; give a folder")


def _setup(given: Mapping[str, Any]) -> Setup:
    device = _size("--device", given["device_gib"], given["device_pages"])
    timed = given["clock"]
    return Setup(
        model=Model(**{field.name: given[field.name] for field in fields(Model)}),
        rates=Rates(**{field.name: given[field.name] for field in fields(Rates)}),
        host=_size("--host", given["host_gib"], given["host_pages"]),
        device=device,
        policy=given["policy"].value,
        max_requests=given["max_requests"],
        slowdown=given["slowdown"],
        timed=not device.is_unlimited if timed is None else timed,
    )


def _size(option: str, gib: float, pages: str | None) -> Size:
    if pages is None:
        return _checked(f"{option}-gib", gib=gib)
    if pages == "unlimited":
        return Size()
    option += "-pages"
    return _checked(option, pages=_numbers(option, pages, int, "a number of pages or 'unlimited'")[0])


def _checked(option: str, gib: float | None = None, pages: int | None = None) -> Size:
    try:
        return Size(gib, pages)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _sweeps(given: Mapping[str, Any]) -> Sweeps:
    policies = tuple((given["sweep_policy"] or "").split(",")) if given["sweep_policy"] else ()
    unknown = [name for name in policies if name not in EVICTION_POLICIES]
    if unknown:
        raise ValueError(f"--sweep-policy has {unknown[0]!r}: use some of {', '.join(EVICTION_POLICIES)}")
    hosts = _numbers("--sweep-host-gib", given["sweep_host"], float, "GiB with commas between")
    devices = _numbers("--sweep-device", given["sweep_device"], int, "pages with commas between")
    for gib in hosts:
        _checked("--sweep-host-gib", gib=gib)
    for pages in devices:
        _checked("--sweep-device", pages=pages)
    return Sweeps(hosts, devices, policies)


def _numbers(option: str, text: str | None, kind: Callable[[str], Any], wanted: str) -> tuple[Any, ...]:
    if text is None:
        return ()
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} is {text!r}: give {wanted}") from None


def _trace(given: Mapping[str, Any]) -> Trace:
    path, limit = given["trace"], given["limit"]
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}: give at least 1")
    if given["block_size"] is not None and given["block_size"] < 1:
        raise ValueError(f"--block-size is {given['block_size']}: give at least 1")
    if given["demo"]:
        if path is not None:
            raise ValueError("TRACE and --demo are both given: leave one out")
        return demo_trace(limit or 2000)
    if path is None:
        raise ValueError("TRACE is missing: give a JSONL file, - for standard input, or --demo")
    dialect = None if given["dialect"] is o.Dialect.auto else given["dialect"].value
    trace = read_trace(path, dialect, given["block_size"], given["skip_bad"], limit)
    if trace.skipped:
        print(f"{trace.skipped} bad lines skipped, the first: {trace.first_skipped}", file=sys.stderr)
    return trace


def _describe(sequences: Sequences) -> dict[str, Any]:
    trace = sequences.trace
    return {
        "name": Path(trace.name).name,
        "dialect": trace.dialect,
        "block_size": trace.block_size,
        "requests": len(trace.requests),
        "span_seconds": round(trace.requests[-1].arrival - trace.requests[0].arrival, 6),
        "input_tokens": trace.input_tokens,
        "output_tokens": trace.output_tokens,
        "blocks": sum(len(request.blocks) for request in trace.requests),
        "unique_blocks": trace.num_blocks,
        "skipped_lines": trace.skipped,
        "token_hit_rate_ceiling": hit_rate_ceiling(sequences),
    }


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)


def _write(outcome: dict[str, Any], output: o.Format, plots: Path | None, html: Path | None) -> None:
    from hisparse_sgl.replay import report
    from hisparse_sgl.replay.plots import NAMES, draw

    images: dict[str, bytes] = {}
    if plots or html:
        ceiling = outcome["trace"]["token_hit_rate_ceiling"]
        title = f"{outcome['trace']['name']}, {outcome['trace']['requests']:,} requests"
        images = {sweep: draw(sweep, points, title, ceiling) for sweep, points in outcome["sweeps"].items()}
    try:
        if plots:
            plots.mkdir(parents=True, exist_ok=True)
            for sweep, image in images.items():
                (plots / f"{NAMES[sweep]}.png").write_bytes(image)
        if html:
            html.write_text(report.to_html(outcome, images), encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{error.filename or html}: {error.strerror}; give a place that can be written"
        ) from None
    if output is o.Format.json:
        print(report.to_json(outcome), end="")
    else:
        from rich.console import Console

        report.print_tables(outcome, Console(highlight=False))
