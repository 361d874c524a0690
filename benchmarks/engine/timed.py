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
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.answers import ask_server
from benchmarks.engine.client import Client, counts_of
from benchmarks.engine.conversations import Conversations, Shape, converse
from benchmarks.engine.server import Server, ServerDied, machine
from benchmarks.engine.steady import Batch, decode
from benchmarks.engine.traces import decode_graph, record

ANSWERED = {"roomy_none": "none", "roomy_stock": "stock", "roomy": "resident", "tight": "tight"}
"""Who is asked for answers, and as which engine ``compare.py`` looks at them."""

CLOSE = ("roomy_none", "roomy")
"""Their inter-token latency is to be within 3 %, which is less than runs differ: it takes more rounds."""

SLOW = "roomy_stock"
"""It computes every prompt anew: after the first round its runs come last."""

GROUPS = ((CLOSE, 0), ((SLOW,), 0), (("quarter_none", "quarter"), 16))
"""Engines that take turns within a run, and their least concurrency."""

HELD = 8
"""Conversations of an engine before the other has its turn; more where more are in flight."""

TIMED = ("roomy_none", "roomy_stock", "roomy", "quarter_none", "quarter", "tight")
STEADY = ("roomy_none", "roomy", "roomy_stock")
BATCHES = (1, 4, 16, 32)

WARM_UP = Shape(conversations=32, turns=1, shared=2048, turn=1000, answer=8)
RUN_LIMIT = 180.0


@dataclass(frozen=True)
class Run:
    """The same load on each of the engines, in turns."""

    engines: tuple[str, ...]
    concurrency: int
    round: int


def plan(concurrencies: Sequence[int], rounds: int, more: int = 0) -> list[Run]:
    """All runs in order. ``more`` rounds of ``CLOSE`` at the least concurrency come after the others."""
    runs = []
    for round_ in range(rounds):
        for engines, least in GROUPS:
            for concurrency in sorted((c for c in concurrencies if c >= least), reverse=least > 0):
                runs.append(Run(engines, concurrency, round_))
    runs += [Run(CLOSE, min(concurrencies), round_) for round_ in range(rounds, rounds + more)]
    return sorted(runs, key=lambda run: SLOW in run.engines and run.round > 0)


def in_turn(engines: Sequence[str], number: int) -> Sequence[str]:
    """The order turns around from one turn to the next."""
    return engines[:: -1 if number % 2 else 1]


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
        self.done = 0
        self.last: dict[str, tuple[Run, dict[str, float]]] = {}  # ours: with the counts before it

    def in_time(self) -> bool:
        return time.perf_counter() < self.end

    def can_ask(self, name: str) -> bool:
        """There is such a server, it runs, and there is time."""
        return name in self.servers and name not in self.dead and self.in_time()

    async def start(self) -> None:
        """Start all of them side by side; those that do not start are left out."""
        await asyncio.gather(*(self._attempt(name, "start", self._start(name)) for name in self.servers))

    def process_ids(self) -> list[int]:
        """Of the servers that run."""
        return [server.process.pid for server in self.servers.values() if server.process is not None]

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
        runs = plan(concurrencies, rounds, more)
        wanted = sum(name in self.servers for run in runs for name in run.engines)
        for run in runs:
            if self.in_time():
                await self._hold(run)
        for name in [name for name in self.last if name not in self.dead]:
            await self._attempt(name, "counts", self._count(name, None))
        print(f"{self.done} of {wanted} conversation runs", flush=True)

    async def graphs(self, size: int) -> None:
        """A profile of decode steps of ``size`` requests, of the engines that are to be close."""
        for name in CLOSE:
            if self.can_ask(name):
                await self._attempt(name, "profile", self._graph(name, size))

    async def stop(self) -> None:
        """Stop what runs, and look for trouble in the logs."""
        for name, server in self.servers.items():
            self.failures += [f"{name}: {line}" for line in server.trouble()[:2]]
        await asyncio.gather(*(server.stop() for server in self.servers.values()))

    async def _attempt(self, name: str, what: str, work: Awaitable[None], limit: float | None = None) -> bool:
        """Whether it succeeded. A failure is noted; a server that has ended or hangs is left out after it."""
        try:
            await asyncio.wait_for(work, limit or self.limit)
            return True
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
        return False

    async def _start(self, name: str) -> None:
        server = self.servers[name]
        await server.start(self.limit)
        async with self.clients[name] as client:  # kernels that compile at their first use
            await converse(client, self.warm_up, self.warm_up.conversations, seed=-1)
        about = {"engine": name, "seconds_to_start": server.seconds_to_start}
        self._append("start.jsonl", about | {"host_pool_seconds": server.host_pool_seconds()} | self.about)
        print(server.describe(), flush=True)

    async def _answers(self, name: str, alias: str) -> None:
        record = await ask_server(self.servers[name], "timed")
        (self.out / f"{alias}.json").write_text(json.dumps(record | {"engine": alias}))

    async def _decode(self, name: str, size: int, round_: int) -> None:
        async with self.clients[name] as client:
            found = await decode(client, self.batch, size)
        about = {"engine": name, "batch": size, "round": round_}
        self._append("steady.jsonl", about | found | self.about | {"answer": self.batch.answer})

    async def _graph(self, name: str, size: int) -> None:
        async with self.clients[name] as client:
            file = await record(client, self.batch, size, self.out / "traces" / name)
        about = {"engine": name, "batch": size, **await asyncio.to_thread(decode_graph, file)}
        self._append("graphs.jsonl", about | self.about | {"answer": self.batch.answer})

    async def _hold(self, run: Run) -> None:
        """All engines of the run have the same conversations, in turns of a second or two.

        For seconds or minutes a machine, or a process on its core, is slower by up to a half. Whole runs, one
        after the other, show that and not the engines.
        """
        what = f"run {run.concurrency}"
        async with AsyncExitStack() as stack:
            found = await self._begin(run, what, stack)
            held = max(HELD, run.concurrency)
            for turn, first in enumerate(range(0, self.shape.conversations, held)):
                number = min(held, self.shape.conversations - first)
                for name in in_turn(tuple(found), run.round + turn):
                    if not await self._attempt(name, what, found[name].hold(number), RUN_LIMIT):
                        del found[name]
        for name, conversations in found.items():
            self._write(name, run, conversations.figures())
            self.done += 1

    async def _begin(self, run: Run, what: str, stack: AsyncExitStack) -> dict[str, Conversations]:
        """Of the engines that can be asked; their clients are closed with ``stack``."""
        found = {}
        seed = 1000 * run.round + run.concurrency
        for name in run.engines:
            plugin = self.can_ask(name) and self.servers[name].launch.kind.plugin
            if plugin and not await self._attempt(name, what, self._count(name, run)):
                continue
            if self.can_ask(name):
                client = await stack.enter_async_context(self.clients[name])
                conversations = Conversations(client, self.shape, run.concurrency, seed)
                if await self._attempt(name, what, conversations.begin()):
                    found[name] = conversations
        return found

    async def _count(self, name: str, run: Run | None) -> None:
        """Write what was counted in the run before, now that ``run`` begins: metrics are up to date late."""
        async with self.clients[name] as client:
            counts = counts_of(await client.metrics())
        if name in self.last:
            last, before = self.last.pop(name)
            self._write(name, last, {"counts": {key: value - before[key] for key, value in counts.items()}})
        if run is not None:
            self.last[name] = (run, counts)

    def _write(self, name: str, run: Run, found: dict[str, Any]) -> None:
        line = {"engine": name, "concurrency": run.concurrency, "round": run.round}
        self._append("conversations.jsonl", line | found | self.about)

    def _append(self, file: str, line: dict[str, Any]) -> None:
        with (self.out / file).open("a") as out:
            out.write(json.dumps(line) + "\n")
