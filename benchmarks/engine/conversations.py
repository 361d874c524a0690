"""Multi-turn load: conversations over one shared prefix, several at a time.

Each of 32 conversations has 6 turns. A turn appends 2,000 new tokens to all that was said and is answered
with 32 to 96: answers of one length lock the requests in step, in this or that pattern for a whole run, and
that decides latencies more than the engine does. Concurrency bounds the requests in flight; conversations
advance turn by turn.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.engine.answers import prompt
from benchmarks.engine.client import Answer, Client


@dataclass(frozen=True)
class Shape:
    """Of the load; lengths in tokens. ``answer``: the mean."""

    conversations: int = 32
    turns: int = 6
    shared: int = 16_384
    turn: int = 2_000
    answer: int = 64

    def draw_answer(self, rng: Random) -> int:
        """The length of one answer: up to half of the mean away from it."""
        return self.answer + rng.randint(-(self.answer // 2), self.answer // 2)


class Conversations:
    """One run on one server, some conversations after the other: between them other servers may be asked.

    Args:
        concurrency: requests in flight, at most.
        seed: of all prompts and lengths; the conversations are the same however they are divided.
    """

    def __init__(self, client: Client, shape: Shape, concurrency: int, seed: int) -> None:
        self.client = client
        self.shape = shape
        self.rng = Random(seed)
        self.shared = prompt(self.rng, shape.shared)
        self.slots = asyncio.Semaphore(concurrency)
        self.answers: list[Answer] = []
        self.asked = 0  # tokens of all prompts
        self.seconds = 0.0

    async def begin(self) -> None:
        """Empty the cache, and ask for the shared prefix, uncounted."""
        await self.client.flush()
        await self.client.generate(self.shared, 1)

    async def hold(self, conversations: int) -> None:
        """The next ones, side by side; returns when all have ended."""
        start = time.perf_counter()
        seeds = [self.rng.random() for _ in range(conversations)]
        await asyncio.gather(*(self._conversation(Random(seed)) for seed in seeds))
        self.seconds += time.perf_counter() - start

    def figures(self) -> dict[str, Any]:
        """Of all that was held."""
        return figures(self.answers, self.seconds, self.asked)

    async def _conversation(self, rng: Random) -> None:
        history = list(self.shared)
        for _ in range(self.shape.turns):
            history += prompt(rng, self.shape.turn)
            self.asked += len(history)
            async with self.slots:
                answer = await self.client.generate(history, self.shape.draw_answer(rng))
            history += answer.tokens
            self.answers.append(answer)


async def converse(client: Client, shape: Shape, concurrency: int, seed: int) -> dict[str, Any]:
    """A whole run in one go."""
    run = Conversations(client, shape, concurrency, seed)
    await run.begin()
    await run.hold(shape.conversations)
    return run.figures()


def figures(answers: Sequence[Answer], seconds: float, asked: int) -> dict[str, Any]:
    """Milliseconds, tokens a second, and the share of the ``asked`` prompt tokens that were cached."""
    ttft = [answer.ttft * 1e3 for answer in answers]
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps]
    return {
        "ttft_p50": quantile(ttft, 0.5),
        "ttft_p95": quantile(ttft, 0.95),
        **latencies(gaps),
        "tokens_per_second": sum(len(answer.tokens) for answer in answers) / seconds,
        "cached_share": sum(answer.cached for answer in answers) / asked,
        "seconds": seconds,
        "requests": len(answers),
    }


def latencies(gaps: Sequence[float]) -> dict[str, Any]:
    """Of the gaps between tokens, in their unit. ``itl_deciles``: of 10 to 90 %."""
    return {
        "itl_p50": quantile(gaps, 0.5),
        "itl_mean": statistics.fmean(gaps),
        "itl_p95": quantile(gaps, 0.95),
        "itl_deciles": [quantile(gaps, share / 10) for share in range(1, 10)],
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


FIGURES = ("ttft_p50", "ttft_p95", "itl_p50", "itl_mean", "itl_p95", "tokens_per_second", "cached_share")


def medians(
    lines: Sequence[dict[str, Any]], size: str = "concurrency", figures: Sequence[str] = FIGURES
) -> dict[tuple[str, int], dict[str, Any]]:
    """Of the rounds, by engine and what ``size`` names."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["engine"], line[size]), []).append(line)
    return {
        key: {name: statistics.median(run[name] for run in runs) for name in figures} | {"runs": len(runs)}
        for key, runs in groups.items()
    }


def in_pairs(lines: Sequence[dict[str, Any]], figure: str, one: str, two: str) -> dict[int, float]:
    """By concurrency: the median of the ratios ``one / two`` within a round, which has one load for both.

    What slows the whole machine for minutes is in both runs of a round.
    """
    values = {
        (run["engine"], run["concurrency"], run["round"], run.get("commit")): run[figure] for run in lines
    }
    ratios: dict[int, list[float]] = {}
    for (engine, *rest), value in values.items():
        if engine == one and (other := values.get((two, *rest))):
            ratios.setdefault(rest[0], []).append(value / other)
    return {concurrency: statistics.median(found) for concurrency, found in ratios.items()}


def verdicts(
    found: dict[tuple[str, int], dict[str, float]], paired: dict[int, float] | None = None
) -> list[str]:
    """The figures aimed at, where the engines that they need were run.

    ``paired``: ratios of ITL p50 to no HiSparse (``in_pairs``), to be printed beside those of the medians.
    """

    def ratio(name: str, one: tuple[str, int], two: tuple[str, int]) -> float | None:
        return found[one][name] / found[two][name] if one in found and two in found else None

    lines = []
    for concurrency in sorted({key[1] for key in found}):
        roomy, none, stock = ((engine, concurrency) for engine in ("roomy", "roomy_none", "roomy_stock"))
        quarter, quarter_none = ("quarter", concurrency), ("quarter_none", concurrency)
        checks = [
            ("ITL p50 / no HiSparse", ratio("itl_p50", roomy, none), 1.03 if concurrency == 4 else None, -1),
            ("TTFT p50 / SGLang's HiSparse", ratio("ttft_p50", roomy, stock), 1 / 3, -1),
            ("tokens/s / no HiSparse, quarter", ratio("tokens_per_second", quarter, quarter_none), 1.3, 1),
        ]
        for name, value, limit, sign in checks:
            if value is not None:
                holds = limit is None or sign * value >= sign * limit
                aim = "" if limit is None else f", {'at least' if sign > 0 else 'at most'} {limit:.2f}"
                if name.startswith("ITL"):
                    within = f", within rounds {paired[concurrency]:.3f}" if paired else ""
                    aim = f" (mean {ratio('itl_mean', roomy, none):.3f}{within}){aim}"
                lines.append(f"{'ok    ' if holds else 'BROKEN'} {concurrency}: {name} {value:.3f}{aim}")
    return lines


def show(found: dict[tuple[str, int], dict[str, float]]) -> list[str]:
    """A plain table: milliseconds, tokens a second, share of cached tokens."""
    lines = [f"{'engine':14} {'conc':>4} {'runs':>4}" + "".join(f"{name[:10]:>11}" for name in FIGURES)]
    for (engine, concurrency), values in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        cells = "".join(f"{values[name]:11.2f}" for name in FIGURES)
        lines.append(f"{engine:14} {concurrency:4} {int(values['runs']):4}{cells}")
    return lines


def counted(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What the plugin counted in all runs of an engine."""
    totals: dict[str, Counter[str]] = {}
    for line in lines:
        totals.setdefault(line["engine"], Counter()).update(line["counts"])
    return [
        f"{engine} counts, all runs: {', '.join(f'{name} {int(value)}' for name, value in total.items())}"
        for engine, total in totals.items()
    ]


def report(file: Path) -> tuple[list[str], list[str]]:
    """The table of the runs in ``file``, and the verdicts. Nothing if there is no such file.

    Runs with another length of answers than the last one's are left out.
    """
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    runs = [line for line in lines if "counts" not in line]
    runs = [run for run in runs if run["answer"] == runs[-1]["answer"]]
    if not runs:
        return [], []
    found = medians(runs)
    paired = in_pairs(runs, "itl_p50", "roomy", "roomy_none")
    return [*show(found), *counted([line for line in lines if "counts" in line])], verdicts(found, paired)
