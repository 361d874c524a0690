"""All that is compared in seconds, on one set of servers: answers, then decode steps, then conversations.

One server is asked at a time. What is measured lies on disk at once: records for ``compare.py``, and a JSON
line a conversation run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.answers import ask_server
from benchmarks.engine.client import Client, counts_of
from benchmarks.engine.conversations import Shape, converse
from benchmarks.engine.server import Server, ServerDied, machine
from benchmarks.engine.steady import Batch, decode

ANSWERED = {"roomy_none": "none", "roomy_stock": "stock", "roomy": "resident", "tight": "tight"}
"""Who is asked for answers, and as which engine ``compare.py`` looks at them."""

GROUPS = ((("roomy_none", "roomy", "roomy_stock"), 0), (("quarter_none", "quarter"), 16))
"""Engines whose runs take turns, and their least concurrency."""

TIMED = ("roomy_none", "roomy_stock", "roomy", "quarter_none", "quarter", "tight")
CLOSE = ("roomy_none", "roomy")
"""Their inter-token latency is to be within 3 %, which is less than runs differ: it takes more rounds."""

SLOW = "roomy_stock"
"""It computes every prompt anew: after the first round its runs come last."""

STEADY = ("roomy_none", "roomy", "roomy_stock")
BATCHES = (1, 4, 16, 32)

WARM_UP = Shape(conversations=32, turns=1, shared=2048, turn=1000, answer=8)
RUN_LIMIT = 180.0


@dataclass(frozen=True)
class Run:
    engine: str
    concurrency: int
    round: int


def plan(concurrencies: Sequence[int], rounds: int, more: int = 0) -> list[Run]:
    """All runs in order. The order of engines turns around from round to round.

    ``more`` rounds of the two that are to be within 3 %, at the least concurrency, come after the others.
    """
    runs = []
    for round_ in range(rounds):
        for engines, least in GROUPS:
            for concurrency in sorted((c for c in concurrencies if c >= least), reverse=least > 0):
                runs += [Run(engine, concurrency, round_) for engine in in_turn(engines, round_)]
    for round_ in range(rounds, rounds + more):
        runs += [Run(engine, min(concurrencies), round_) for engine in in_turn(CLOSE, round_)]
    return sorted(runs, key=lambda run: run.engine == SLOW and run.round > 0)


def in_turn(engines: Sequence[str], round_: int) -> Sequence[str]:
    return engines[:: -1 if round_ % 2 else 1]


class Timed:
    """The measurement over ``servers``, which it starts and stops.

    Args:
        out: folder of the results.
        budget: seconds from now on after which nothing is started.
        limit: seconds that a server may take to start, or to answer.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        out: Path,
        budget: float,
        limit: float,
        shape: Shape,
        warm_up: Shape = WARM_UP,
        batch: Batch = Batch(),  # noqa: B008
    ) -> None:
        self.servers = {server.launch.engine: server for server in servers}
        self.clients = {name: Client(s.url, s.launch.kind.caches) for name, s in self.servers.items()}
        self.out = out
        self.end = time.perf_counter() + budget
        self.limit = limit
        self.shape = shape
        self.warm_up = warm_up
        self.batch = batch
        self.about = {"answer": shape.answer, **machine()}
        self.failures: list[str] = []
        self.dead: set[str] = set()
        self.last: dict[str, tuple[Run, dict[str, float]]] = {}  # ours: with the counts before it

    def in_time(self) -> bool:
        return time.perf_counter() < self.end

    def can_ask(self, name: str) -> bool:
        """There is such a server, it runs, and there is time."""
        return name in self.servers and name not in self.dead and self.in_time()

    async def start(self) -> None:
        """Start all of them side by side; those that do not start are left out."""
        await asyncio.gather(*(self._attempt(name, "start", self._start(name)) for name in self.servers))

    async def wait_for(self, file: Path) -> None:
        """Until there is such a file: something else on the card is over."""
        while not file.exists() and self.in_time():
            await asyncio.sleep(0.5)

    async def answers(self) -> None:
        """A record for ``compare.py`` of each server."""
        for name, alias in ANSWERED.items():
            if self.can_ask(name):
                await self._attempt(name, "answers", self._answers(name, alias))

    async def steady(self, sizes: Sequence[int], rounds: int) -> None:
        """Decode steps of these batches. The order of engines turns around from round to round."""
        for round_ in range(rounds):
            for size in sizes:
                for name in in_turn(STEADY, round_):
                    if self.can_ask(name) and (name != SLOW or round_ == 0):
                        await self._attempt(name, f"batch {size}", self._decode(name, size, round_))

    async def conversations(self, concurrencies: Sequence[int], rounds: int, more: int = 0) -> None:
        """Runs in the order of ``plan``, as many as there is time for."""
        runs = [run for run in plan(concurrencies, rounds, more) if run.engine in self.servers]
        done = 0
        for run in runs:
            if self.can_ask(run.engine):
                await self._attempt(run.engine, f"run {run.concurrency}", self._run(run), RUN_LIMIT)
                done += 1
        for name in [name for name in self.last if name not in self.dead]:
            await self._attempt(name, "counts", self._count(name, None))
        print(f"{done} of {len(runs)} conversation runs", flush=True)

    async def stop(self) -> None:
        """Stop what runs, and look for trouble in the logs."""
        for name, server in self.servers.items():
            self.failures += [f"{name}: {line}" for line in server.trouble()[:2]]
        await asyncio.gather(*(server.stop() for server in self.servers.values()))

    async def _attempt(self, name: str, what: str, work: Awaitable[None], limit: float | None = None) -> None:
        """A failure is noted. A server that has ended, or hangs, is left out of what follows."""
        try:
            await asyncio.wait_for(work, limit or self.limit)
            return
        except Exception as error:
            self.failures.append(f"{name}, {what}: {str(error) or type(error).__name__}")
            alive = False
            with contextlib.suppress(ServerDied):
                self.servers[name].check_alive()
                alive = not isinstance(error, asyncio.TimeoutError)
        if not alive:
            self.dead.add(name)
            print(f"{name} is left out from here on ({what})", flush=True)
            await self.servers[name].stop()

    async def _start(self, name: str) -> None:
        server = self.servers[name]
        await server.start(self.limit)
        async with self.clients[name] as client:  # kernels that compile at their first use
            await converse(client, self.warm_up, self.warm_up.conversations, seed=-1)
        print(server.describe(), flush=True)

    async def _answers(self, name: str, alias: str) -> None:
        record = await ask_server(self.servers[name], "timed")
        (self.out / f"{alias}.json").write_text(json.dumps(record | {"engine": alias}))

    async def _decode(self, name: str, size: int, round_: int) -> None:
        async with self.clients[name] as client:
            found = await decode(client, self.batch, size)
        about = {"engine": name, "batch": size, "round": round_}
        self._append("steady.jsonl", about | found | self.about | {"answer": self.batch.answer})

    async def _run(self, run: Run) -> None:
        if self.servers[run.engine].launch.kind.plugin:
            await self._count(run.engine, run)
        async with self.clients[run.engine] as client:
            found = await converse(
                client, self.shape, run.concurrency, seed=1000 * run.round + run.concurrency
            )
        self._write(run, found)

    async def _count(self, name: str, run: Run | None) -> None:
        """Write what was counted in the run before, now that ``run`` begins: metrics are up to date late."""
        async with self.clients[name] as client:
            counts = counts_of(await client.metrics())
        if name in self.last:
            last, before = self.last.pop(name)
            self._write(last, {"counts": {key: value - before[key] for key, value in counts.items()}})
        if run is not None:
            self.last[name] = (run, counts)

    def _write(self, run: Run, found: dict[str, Any]) -> None:
        self._append("conversations.jsonl", asdict(run) | found | self.about)

    def _append(self, file: str, line: dict[str, Any]) -> None:
        with (self.out / file).open("a") as out:
            out.write(json.dumps(line) + "\n")
