"""GPU time of a decode step by kernel, from a torch profile of a server.

A step's CUDA graph takes the same time whatever the CPU does meanwhile.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.engine.answers import prompt
from benchmarks.engine.client import Client
from benchmarks.engine.conversations import quantile
from benchmarks.engine.steady import Batch

LAUNCH = "cudaGraphLaunch"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
FEWEST_US = 1.0
"""Kernels that take less of a step are left out of its list."""


async def record(client: Client, shape: Batch, size: int, folder: Path, steps: int = 60) -> Path:
    """Have the server profile ``steps`` steps while ``size`` requests decode; the file that it writes.

    Raises:
        RuntimeError: the server refuses, or there is no file after a minute.
    """
    shared = prompt(Random(0), shape.shared)
    await client.generate(shared, 1)
    prompts = [shared + prompt(Random(index + 1), shape.own) for index in range(size)]
    firsts = [asyncio.Event() for _ in prompts]
    answers = [
        asyncio.ensure_future(client.generate(tokens, shape.answer, first=first))
        for tokens, first in zip(prompts, firsts, strict=True)
    ]
    await asyncio.gather(*(first.wait() for first in firsts))
    await client.profile(folder, steps)
    await asyncio.gather(*answers)
    for _ in range(120):
        found = sorted(folder.glob("*.gz"))
        if found and await asyncio.to_thread(_is_whole, found[0]):
            return found[0]
        await asyncio.sleep(0.5)
    raise RuntimeError(f"the server wrote no trace to {folder}")


def decode_graph(file: Path) -> dict[str, Any]:
    """Microseconds of one launch of the decode graph: from its first kernel to its last, and by kernel."""
    events = [event for event in _read(file)["traceEvents"] if event.get("ph") == "X"]
    launches = {e["args"]["correlation"] for e in events if e["name"].startswith(LAUNCH)}
    graphs: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ON_GPU and event["args"].get("correlation") in launches:
            graphs[event["args"]["correlation"]].append(event)
    if not graphs:
        raise RuntimeError(f"{file} has no CUDA graph")
    spans = [
        max(e["ts"] + e["dur"] for e in graph) - min(e["ts"] for e in graph) for graph in graphs.values()
    ]
    kernels: Counter[str] = Counter()
    for graph in graphs.values():
        for event in graph:
            kernels[_short(event["name"])] += event["dur"] / len(graphs)
    return {
        "launches": len(graphs),
        "kernels": statistics.median(len(graph) for graph in graphs.values()),
        "span_us": statistics.median(spans),
        "span_us_p10_p90": [quantile(spans, 0.1), quantile(spans, 0.9)],
        "kernels_us": {name: us for name, us in kernels.most_common() if us >= FEWEST_US},
    }


def report(file: Path, base: str) -> list[str]:
    """A line for each graph that ``file`` has, with the ratio to the engine ``base``."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    spans = {(line["engine"], line["batch"]): line["span_us"] for line in lines}
    shown = []
    for (engine, batch), span in spans.items():
        against = spans.get((base, batch))
        ratio = f", {span / against:.3f} x {base}" if against and engine != base else ""
        shown.append(f"decode graph, batch {batch:2}: {engine:14}{span:8.1f} us{ratio}")
    return shown


def _read(file: Path) -> dict[str, Any]:
    with gzip.open(file) as data:
        return json.load(data)


def _is_whole(file: Path) -> bool:
    try:
        return bool(_read(file))
    except (EOFError, ValueError, OSError):
        return False


def _short(name: str) -> str:
    """Without return type and template arguments."""
    return name.removeprefix("void ").replace("(anonymous namespace)::", "").split("<")[0].split("(")[0]
