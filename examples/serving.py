"""Serves conversations through a `HiSparsePool`, compares every answer with the unmodified model, prints a
table."""

from __future__ import annotations

from typing import Any

import torch
from conversations import Request, first_turns
from options import TOP_K, Options
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from scheduler import PooledModel, Scheduler
from tiny_models import build, generate_alone, precision

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.integrations import transformers
from hisparse_sgl.kernels.backend import choose
from hisparse_sgl.pool import HiSparsePool

MAX_RUNNING = 8
PREFILL_CHUNK = 96

# What a run must have seen. A pool so large that one of these stays 0 has not been tried.
_MUST_OCCUR = (
    "hot misses",
    "pages unpinned",
    "pages reused",
    "pages restored",
    "pages adopted",
    "admissions deferred",
    "detached publications",
)


def serve(config: Any, options: Options, integration: Any = transformers) -> int:
    """Runs one example and prints its table.

    Args:
        integration: the module whose `layout_of` and `PooledModel` fit the model.

    Returns:
        0, or 1 if an answer differs (float64 only) or something that the example has to show did not happen.
    """
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    console = Console()
    pooled, alone = (build(config, dtype, options.seed, options.device) for _ in range(2))
    requests = first_turns(options.requests, options.page_size, options.seed)
    layout = integration.layout_of(config, dtype, options.page_size)
    with (
        Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        ) as bar,
        HiSparsePool(layout, pool_config(options), options.device) as pool,
        precision(dtype),
    ):
        ended = _serve_all(integration.PooledModel(pooled, pool), requests, options, bar)
        task = bar.add_task("compare with the unmodified model", total=len(ended))
        differing = []
        for request in ended:
            if generate_alone(alone, request.prompt, len(request.tokens)) != request.tokens:
                differing.append(request.rid)
            bar.advance(task)
        pool.check_integrity()
        facts = _facts(pool, ended, differing)
        backend = choose(pool.rows(0), None if options.kernels == "auto" else options.kernels)
    facts["kernels"] = f"{backend} on {options.device}, {options.dtype}"
    console.print(_table(config.model_type, facts))
    console.print(
        "An aborted answer is compared up to its abort. Random weights select rows at random, so the hot hit "
        "rate is low; full residency would keep every page in use, cached prefixes included, on the device."
    )
    missing = [name for name in _MUST_OCCUR if facts[name] == 0]
    if missing:
        console.print(f"did not happen: {', '.join(missing)}; lower --device-pages or raise --requests")
    if differing:
        console.print(f"differ: {', '.join(differing)}")
    return 1 if missing or (differing and options.dtype == "float64") else 0


def pool_config(options: Options) -> HiSparseConfig:
    """A device pool of `--device-pages`, and a host pool that never runs out."""
    context_pages = -(-options.shape.context // options.page_size)
    return HiSparseConfig(
        top_k=TOP_K,
        context_len=options.shape.context,
        host_pages=1 + context_pages * (options.requests // 2 + MAX_RUNNING),
        device_pages=options.device_pages,
        device_buffer_size=options.hot_rows,
        max_requests=MAX_RUNNING,
        kernels=options.kernels,
        poison=True,
    )


def _serve_all(model: PooledModel, requests: list[Request], options: Options, bar: Progress) -> list[Request]:
    task = bar.add_task("serve from the pool", total=options.requests)
    scheduler = Scheduler(
        model, requests, PREFILL_CHUNK, MAX_RUNNING, on_end=lambda request: bar.advance(task)
    )
    return scheduler.run()


def _facts(pool: HiSparsePool, ended: list[Request], differing: list[str]) -> dict[str, Any]:
    """What the table shows, in its order."""
    counters = pool.counters
    lookups = counters.hot_lookups
    equal = len(ended) - len(differing)
    shortened = {"cached tokens without a state": sum(request.shortened_tokens for request in ended)}
    return {
        "requests served": len(ended),
        "equal to the model alone": f"{'no' if differing else 'yes'} ({equal} of {len(ended)})",
        "aborted": sum(request.aborted for request in ended),
        "cached tokens": sum(request.cached_tokens for request in ended),
        **(shortened if pool.layout.needs_state else {}),
        "hot hit rate": f"{counters.hot_hits / max(1, lookups):.3f}",
        "hot misses": lookups - counters.hot_hits,
        "pages spilled": counters.pages_spilled,
        "pages restored": counters.pages_restored,
        "pages unpinned": counters.pages_unpinned,
        "pages reused": counters.pages_reused,
        "pages adopted": counters.pages_adopted,
        "admissions deferred": counters.deferred_admissions,
        "retracted": counters.retractions,
        "detached publications": counters.detached_publications,
        "bytes to the device": f"{counters.host_to_device_bytes:,}",
        "bytes to the host": f"{counters.device_to_host_bytes:,}",
        "peak device pages": pool.peak_device_pages,
        "device pages at full residency": pool.peak_host_pages,
        "device pool of full residency": f"{(pool.config.device_pages - 1) / pool.peak_host_pages:.1%}",
    }


def _table(title: str, facts: dict[str, Any]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table
