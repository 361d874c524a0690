"""What the answers of several engines must have in common: rules over the records of ``answers.py``.

Each rule yields lines; one that begins with ``BROKEN`` makes the exit status 1.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Group = dict[str, Record]  # by engine

CACHED_TOKENS = 34_176
"""Of the 34,300 of the four prompts: all whole pages, less one token that is always computed."""

TTFT_RESIDENT = 1.2
TTFT_RESTORED = 1.5
RESTORE_BYTES_PER_SECOND = 50e9
BATCH_OF_STOCK = 0.5
OURS = ("resident", "tight")
MUST_HAPPEN = ("misses", "unpins", "reuses", "restores")


def load(folder: Path) -> dict[str, Group]:
    """Records by what they have in common: checkpoint, KV dtype, graphs."""
    groups: dict[str, Group] = {}
    for file in sorted(folder.glob("*.json")):
        record = json.loads(file.read_text())
        graphs = "graphs" if record["graphs"] else "no graphs"
        key = f"{record['model']}, {record['dtype']}, {graphs}"
        groups.setdefault(key, {})[record["engine"]] = record
    return groups


def difference(one: Record, two: Record) -> float:
    """Largest difference of log probabilities of two answers, up to the first token in which they differ.

    0.0 only if tokens and log probabilities are equal bit for bit; inf if the lengths differ.
    """
    if len(one["tokens"]) != len(two["tokens"]) or len(one["logprobs"]) != len(two["logprobs"]):
        return float("inf")
    worst = 0.0
    pairs = zip(one["tokens"], two["tokens"], one["logprobs"], two["logprobs"], strict=True)
    for token, other, logprob, other_logprob in pairs:
        worst = max(worst, abs(logprob - other_logprob))
        if token != other:
            return max(worst, 1e-30)
    return worst


def differences(group: Group, one: tuple[str, str], two: tuple[str, str]) -> list[float]:
    """Prompt by prompt; each side is an engine and a pass."""
    sides = [group[engine]["passes"][name]["answers"] for engine, name in (one, two)]
    return [difference(a, b) for a, b in zip(*sides, strict=True)]


def has(group: Group, engine: str, name: str) -> bool:
    return engine in group and name in group[engine]["passes"]


def show(found: list[float]) -> str:
    return " ".join("equal" if value == 0 else f"{value:.1e}" for value in found)


def verdict(holds: bool, line: str) -> str:
    return f"{'ok    ' if holds else 'BROKEN'} {line}"


def equal_alone(group: Group) -> Iterator[str]:
    """Ours is SGLang's HiSparse, bit for bit, cold and pressed."""
    for engine, name in [(e, n) for e in OURS for n in ("cold", "pressed") if has(group, e, n)]:
        others = [("stock", "cold")] if has(group, "stock", "cold") else []
        others += [("resident", "cold")] if (engine, name) != ("resident", "cold") else []
        for other in [o for o in others if has(group, *o)]:
            found = differences(group, (engine, name), other)
            yield verdict(not any(found), f"{engine} {name} / {' '.join(other)}: {show(found)}")


def near_no_hisparse(group: Group) -> Iterator[str]:
    """Where SGLang's HiSparse is equal to no HiSparse so is ours, and elsewhere it is no further from it."""
    if not (has(group, "none", "cold") and has(group, "stock", "cold")):
        return
    stock = differences(group, ("stock", "cold"), ("none", "cold"))
    yield f"       stock cold / none cold: {show(stock)}"
    for engine in OURS:
        if has(group, engine, "cold"):
            found = differences(group, (engine, "cold"), ("none", "cold"))
            holds = all(ours <= theirs for ours, theirs in zip(found, stock, strict=True))
            yield verdict(holds, f"{engine} cold / none cold: {show(found)}")


def warm(group: Group) -> Iterator[str]:
    """All whole pages are cached, and a warm answer is as near to the cold one as without HiSparse."""
    if not has(group, "none", "warm"):
        return
    spread = max(differences(group, ("none", "cold"), ("none", "warm")))
    for engine in ("none", *OURS):
        if not has(group, engine, "warm"):
            continue
        found = max(differences(group, (engine, "cold"), (engine, "warm")))
        cached = sum(answer["cached"] for answer in group[engine]["passes"]["warm"]["answers"])
        expected = CACHED_TOKENS if group[engine]["scale"] == 1 else cached
        holds = cached == expected and found <= spread
        line = f"{engine} warm: {cached} tokens cached, cold / warm {found:.1e} (none {spread:.1e})"
        yield verdict(holds, line)


def pressure(group: Group) -> Iterator[str]:
    """On the small device there were hot misses and the rest in the pass that was compared bit for bit."""
    for engine in OURS:
        if not has(group, engine, "pressed"):
            continue
        counts = group[engine]["counts"]
        before, after, last = counts["batch"], counts["pressed"], counts["crowd warm"]
        during = {name: int(after[name] - before[name]) for name in after}
        total = {name: int(last[name]) for name in MUST_HAPPEN}
        # A flush leaves nothing to restore: restores belong to the passes that are warm.
        needed = engine == "tight"
        pressed = all(during[name] > 0 for name in MUST_HAPPEN if name != "restores")
        holds = not needed or (pressed and all(total.values()))
        line = ", ".join(f"{name} {total[name]} ({during[name]} pressed)" for name in MUST_HAPPEN)
        yield verdict(holds, f"{engine} counts: {line}, retractions {int(last['retractions'])}")


def healthy(group: Group) -> Iterator[str]:
    """No audit mismatch, no leak, no exception."""
    for engine, record in group.items():
        counted = [name for name in record["counts"] if not name.startswith("fault")]
        mismatches = record["counts"][counted[-1]]["mismatches"] if counted else 0
        holds = not mismatches and not record["trouble"]
        if (engine in OURS and record["audit_every"]) or not holds:
            audit = f"audit every {record['audit_every']} steps: {int(mismatches)} mismatches"
            yield verdict(holds, f"{engine} {audit}; {' | '.join(record['trouble'][:2]) or 'log clean'}")


def faults(group: Group) -> Iterator[str]:
    """A fault changes an answer, and without it all are as before."""
    for engine, record in group.items():
        for name in [name for name in record["passes"] if name.startswith("fault")]:
            found = differences(group, (engine, "cold"), (engine, name))
            holds = any(found) != (name == "fault cleared")
            yield verdict(holds, f"{engine} cold / {name}: {show(found)}")


def times(group: Group) -> Iterator[str]:
    """Time to first token and the batch of four."""
    if "none" not in group:
        return
    base = statistics.median(group["none"]["passes"]["ttft"])
    for engine, record in group.items():
        seconds = statistics.median(record["passes"]["ttft"])
        line = f"{engine} TTFT {seconds * 1e3:.1f} ms = {seconds / base:.2f} x none"
        if engine == "resident":
            yield verdict(seconds <= TTFT_RESIDENT * base, f"{line}, limit {TTFT_RESIDENT}")
        elif engine == "tight":
            runs = len(record["passes"]["ttft"])
            pages = (record["counts"]["ttft"]["restores"] - record["counts"]["batch"]["restores"]) / runs
            limit = TTFT_RESTORED * base + pages * page_bytes(record) / RESTORE_BYTES_PER_SECOND
            holds = pages > 0 and seconds <= limit
            yield verdict(holds, f"{line}, {pages:.0f} pages restored a run, limit {limit * 1e3:.1f} ms")
        else:
            yield f"       {line}"
    if "stock" in group:
        stock = statistics.median(group["stock"]["passes"]["batch_seconds"])
        for engine in [e for e in (*OURS, "none") if e in group]:
            seconds = statistics.median(group[engine]["passes"]["batch_seconds"])
            line = f"{engine} batch {seconds:.3f} s = {seconds / stock:.2f} x stock, limit {BATCH_OF_STOCK}"
            yield verdict(engine == "none" or seconds <= BATCH_OF_STOCK * stock, line)


def page_bytes(record: Record) -> float:
    """Bytes of a page in all layers, from the bytes that were restored."""
    metrics = record["metrics"]
    pages = metrics.get("hisparse:pages_restored_total", 0.0)
    return metrics.get("hisparse:restored_bytes_total", 0.0) / pages if pages else 0.0


RULES: tuple[Callable[[Group], Iterator[str]], ...] = (
    equal_alone, near_no_hisparse, warm, pressure, healthy, faults,
)  # fmt: skip
TIMED_RULES = (healthy, times)
"""SGLang's default top-k varies: of timed records no answers are compared."""


def compare(folder: Path, brief: bool = False) -> list[str]:
    """Lines to print. ``brief``: of rules that hold, a count."""
    lines = []
    for key, group in load(folder).items():
        timed = any(record.get("part") == "timed" for record in group.values())
        found = [line for rule in (TIMED_RULES if timed else RULES) for line in rule(group)]
        broken = [line for line in found if line.startswith("BROKEN")]
        passed = sum(line.startswith("ok") for line in found)
        lines.append(f"{key}: {', '.join(group)}; {passed} rules hold, {len(broken)} broken")
        lines += broken if brief else found
    return lines
