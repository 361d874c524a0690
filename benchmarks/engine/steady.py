"""Plain decode steps: a batch over one shared prefix, with no prefill between its tokens."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.engine.answers import prompt
from benchmarks.engine.client import Client
from benchmarks.engine.conversations import latencies, medians


@dataclass(frozen=True)
class Batch:
    """Lengths in tokens. ``edge``: gaps left out at both ends of an answer, where others start or end."""

    shared: int = 16_384
    own: int = 16
    answer: int = 140
    edge: int = 20


FIGURES = ("itl_p50", "itl_mean", "itl_p95")


async def decode(client: Client, shape: Batch, size: int) -> dict[str, Any]:
    """Milliseconds between tokens while ``size`` requests decode. Their prompts are the same each time."""
    shared = prompt(Random(0), shape.shared)
    await client.generate(shared, 1)
    prompts = [shared + prompt(Random(index + 1), shape.own) for index in range(size)]
    answers = await asyncio.gather(*(client.generate(tokens, shape.answer) for tokens in prompts))
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps[shape.edge : -shape.edge]]
    return latencies(gaps)


def report(file: Path, base: str) -> list[str]:
    """A plain table of what ``file`` has, with the ratio to the engine ``base``; nothing without it."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = medians(lines, "batch", FIGURES)
    shown = []
    for (engine, size), values in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        cells = "".join(f"{values[name]:10.3f}" for name in FIGURES)
        against = found.get((base, size), {}).get("itl_p50")
        ratio = f"   p50 {values['itl_p50'] / against:.3f} x {base}" if against and engine != base else ""
        shown.append(f"decode steps, batch {size:2}: {engine:14}{cells}{ratio}")
    return shown
