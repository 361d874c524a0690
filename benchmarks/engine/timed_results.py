"""What ``timed`` left in its folder as JSON lines for the record, one a start, answer pass, batch and run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.engine.answers import PROMPT_TOKENS
from benchmarks.engine.compare import load
from benchmarks.engine.results import MACHINE
from benchmarks.engine.timed import ANSWERED

ENGINE_OF = {alias: engine for engine, alias in ANSWERED.items()}
FILES = {
    "start": "start.jsonl",
    "steady": "steady.jsonl",
    "conversations": "conversations.jsonl",
    "graph": "graphs.jsonl",
}
"""What kind of line (``part``) the lines of a file are; a run's counts are of the kind ``counts``."""


def append(folder: Path, file: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a line for all that was measured in ``folder`` to ``file``; answers the new lines.

    Args:
        about: fields for each line, over what is there: ``commit``, ``command`` and those of the machine.
    """
    lines = [rounded(line | about) for line in (*answers(folder), *others(folder))]
    with file.open("a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    return lines


def answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Milliseconds to the first token of the longest prompt, cached; seconds of all prompts at once."""
    for group in load(folder).values():
        for alias, record in group.items():
            passes = record["passes"]
            yield {
                "part": "answers",
                "engine": ENGINE_OF.get(alias, alias),
                "ttft_tokens": max(PROMPT_TOKENS),
                "ttft_ms": [seconds * 1e3 for seconds in passes["ttft"]],
                "ttft_ms_p50": statistics.median(passes["ttft"]) * 1e3,
                "batch_seconds": passes["batch_seconds"],
                "batch_seconds_p50": statistics.median(passes["batch_seconds"]),
                "cached_tokens_warm": sum(answer["cached"] for answer in passes["warm"]["answers"]),
            } | {key: record[key] for key in MACHINE if key in record}


def others(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines that ``timed`` wrote."""
    for part, name in FILES.items():
        file = folder / name
        for text in file.read_text().splitlines() if file.exists() else []:
            line = json.loads(text)
            yield {"part": "counts" if "counts" in line else part} | line


def rounded(value: Any) -> Any:
    """Floats with four digits behind the point."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
