"""Records of the matrix as one JSON line a server, and as a table for the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.answers import PROMPT_TOKENS
from benchmarks.engine.compare import OURS, Group, Record, differences, has, load

COUNTED = ("misses", "unpins", "reuses", "restores", "mismatches")
GIVEN = ("name", "model", "dtype", "graphs", "engine", "audit_every")
MACHINE = ("card", "versions", "date", "command")


def rewrite(folder: Path, file: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Write a line for each record in ``folder`` to ``file``, over what it had; answers the lines.

    Args:
        about: of ``MACHINE``, over what the records say.
    """
    lines = [line_of(record, group) | about for group in load(folder).values() for record in group.values()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def line_of(record: Record, group: Group) -> dict[str, Any]:
    """Differences are of log probabilities, prompt by prompt; 0.0 is equal bit for bit, tokens too."""
    engine = record["engine"]
    line = {key: record[key] for key in GIVEN}
    line["seconds_to_start"] = round(record["seconds_to_start"], 1)
    line["prompts"] = list(PROMPT_TOKENS)
    for name in ("cold", "pressed"):
        others = [e for e in ("stock", "none", "resident") if has(group, e, "cold")]
        others = [e for e in others if (e, "cold") != (engine, name)]
        if has(group, engine, name):
            line[name] = {f"{e} cold": rounded(group, (engine, name), (e, "cold")) for e in others}
    line["warm"] = {
        "cached_tokens": sum(answer["cached"] for answer in record["passes"]["warm"]["answers"]),
        "spread": max(rounded(group, (engine, "cold"), (engine, "warm"))),
    }
    if record["counts"]:
        line["counts"] = counts(record)
    faults = {name: rounded(group, (engine, "cold"), (engine, name)) for name in fault_passes(record)}
    line |= {"faults": faults} if faults else {}
    line["trouble"] = record["trouble"]
    return line | {key: record[key] for key in MACHINE if key in record}


def fault_passes(record: Record) -> list[str]:
    return [name for name in record["passes"] if name.startswith("fault")]


def rounded(group: Group, one: tuple[str, str], two: tuple[str, str]) -> list[float]:
    return [float(f"{value:.1e}") for value in differences(group, one, two)]


def counts(record: Record) -> dict[str, dict[str, int]]:
    """Pass by pass, and in total. Passes with a fault are left out."""
    found: dict[str, dict[str, int]] = {}
    before = dict.fromkeys(COUNTED, 0.0)
    for name, values in record["counts"].items():
        if not name.startswith("fault"):
            found[name] = {key: int(values[key] - before[key]) for key in COUNTED}
            before = values
    return found | {"total": {key: int(before[key]) for key in COUNTED}}


def table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a row for each of our servers, then the faults."""
    stock = {kind(line): line for line in lines if line["engine"] == "stock"}
    yield (
        "| checkpoint, KV rows | server | equal to SGLang's HiSparse: alone, pressed | "
        "furthest from no HiSparse: ours, SGLang's | cached, second time | hot misses, pressed | "
        "pages restored | audit mismatches |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for line in lines:
        if line["engine"] in OURS:
            cold, pressed = line.get("cold", {}), line.get("pressed", {})
            theirs = stock.get(kind(line), {}).get("cold", {})
            cells = [
                kind(line),
                line["engine"],
                f"{equal(cold.get('stock cold'))}, {equal(pressed.get('stock cold'))}",
                f"{furthest(cold.get('none cold'))}, {furthest(theirs.get('none cold'))}",
                f"{line['warm']['cached_tokens']:,}",
                f"{line['counts']['pressed']['misses']:,}",
                f"{line['counts']['total']['restores']:,}",
                f"{line['counts']['total']['mismatches']}",
            ]
            yield f"| {' | '.join(cells)} |"
    with_faults = [line for line in lines if "faults" in line]
    if with_faults:
        yield ""
        yield f"| fault | {' | '.join(f'{tokens:,} tokens' for tokens in PROMPT_TOKENS)} |"
        yield "|---" * (1 + len(PROMPT_TOKENS)) + "|"
    for line in with_faults:
        for name, found in line["faults"].items():
            yield f"| {name.removeprefix('fault ')} | {' | '.join(map(shown, found))} |"


def kind(line: dict[str, Any]) -> str:
    return f"{line['model']}, {line['dtype']}{'' if line['graphs'] else ', no CUDA graphs'}"


def shown(value: float) -> str:
    return "equal" if value == 0 else f"{value:.1e}"


def equal(found: list[float] | None) -> str:
    return "-" if found is None else f"{sum(value == 0 for value in found)} of {len(found)}"


def furthest(found: list[float] | None) -> str:
    return "-" if found is None else shown(max(found))
