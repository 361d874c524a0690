"""Random load on servers with the plugin, and what must hold when it is over.

Arrivals come at random moments and in bursts over what fits. Prompts have up to 48,000 tokens, share
prefixes, or go on with a conversation; some requests are aborted while they wait, prefill or decode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from random import Random

import aiohttp

from benchmarks.engine.answers import prompt
from benchmarks.engine.client import Client
from benchmarks.engine.rest import METRICS, at_rest, contradictions
from benchmarks.engine.server import Server


@dataclass(frozen=True)
class Load:
    """``rate``: arrivals a second. ``burst``: requests of a burst, one every ``burst_every`` seconds."""

    rate: float = 3.0
    burst: int = 40
    burst_every: float = 20.0
    most_live: int = 120
    longest: int = 48_000
    shortest: int = 10
    prefixes: int = 8
    most_new: int = 200
    abort: float = 0.15
    abort_within: float = 2.0
    drain: float = 0.15
    """Of the time: no more requests arrive."""


@dataclass
class Tally:
    """What the client saw."""

    started: int = 0
    finished: int = 0
    aborted: int = 0
    cut: int = 0  # connections closed by us
    waiting: int = 0  # when the load was over
    unanswered: int = 0  # when the drain was over: cut
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    failures: list[str] = field(default_factory=list)


class Soak:
    """Load on one server."""

    def __init__(self, client: Client, seed: int, load: Load) -> None:
        self.client = client
        self.load = load
        self.seed = seed
        self.rng = Random(seed)
        self.tally = Tally()
        self.live: set[asyncio.Task[None]] = set()
        self.enders: set[asyncio.Task[None]] = set()
        self.over = False
        self.prefixes = [prompt(self.rng, self._length() * 2 // 3) for _ in range(load.prefixes)]
        self.histories: list[list[int]] = []

    async def run(self, seconds: float) -> Tally:
        """Load, and then a drain; what is unanswered at the end is cut off."""
        begin = time.perf_counter()
        end = begin + seconds * (1 - self.load.drain)
        next_burst = begin + self.load.burst_every / 2
        while time.perf_counter() < end:
            count = 1
            if time.perf_counter() >= next_burst:
                next_burst += self.load.burst_every
                count = self.load.burst
            for _ in range(min(count, self.load.most_live - len(self.live))):
                self._start()
            await asyncio.sleep(self.rng.expovariate(self.load.rate))
        await self._drain(begin + seconds)
        return self.tally

    async def _drain(self, end: float) -> None:
        tally = self.tally
        tally.waiting, before = len(self.live), tally.finished + tally.aborted
        if self.live:
            await asyncio.wait(self.live, timeout=max(0.0, end - time.perf_counter()))
        if self.live and tally.finished + tally.aborted == before:
            tally.failures.append(f"none of {tally.waiting} requests was answered in the drain")
        self.over = True
        left = [*self.live, *self.enders]
        for task in self.live:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _start(self) -> None:
        self.tally.started += 1
        rid = f"soak-{self.seed}-{self.tally.started}"
        task = asyncio.create_task(
            self._request(rid, self._prompt(), self.rng.randint(1, self.load.most_new))
        )
        self.live.add(task)
        task.add_done_callback(self.live.discard)
        if self.rng.random() < self.load.abort:
            end = self._abort(rid) if self.rng.random() < 0.5 else self._cut(task)
            ender = asyncio.create_task(self._later(self.rng.uniform(0, self.load.abort_within), end))
            self.enders.add(ender)
            ender.add_done_callback(self.enders.discard)

    async def _request(self, rid: str, tokens: list[int], new_tokens: int) -> None:
        try:
            answer = await self.client.generate(tokens, new_tokens, rid=rid)
        except asyncio.CancelledError:
            self.tally.cut += not self.over
            self.tally.unanswered += self.over
            return
        except (RuntimeError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            self.tally.failures.append(f"{rid}, {len(tokens)} tokens: {error!r}"[:300])
            return
        self.tally.new_tokens += len(answer.tokens)
        if answer.aborted:
            self.tally.aborted += 1
            return
        self.tally.finished += 1
        self.tally.prompt_tokens += len(tokens)
        self.tally.cached_tokens += answer.cached
        self.histories = [*self.histories[-15:], [*tokens, *answer.tokens]]

    async def _later(self, delay: float, end: Awaitable[None]) -> None:
        await asyncio.sleep(delay)
        await end

    async def _abort(self, rid: str) -> None:
        await self.client.abort(rid)

    async def _cut(self, task: asyncio.Task[None]) -> None:
        task.cancel()

    def _length(self) -> int:
        """Uniform in the logarithm: many short prompts, some long ones."""
        low, high = self.load.shortest, self.load.longest
        return min(high, int(low * (high / low) ** self.rng.random()))

    def _prompt(self) -> list[int]:
        kind, longest = self.rng.random(), self.load.longest
        if kind < 0.35 and self.histories:
            return [*self.rng.choice(self.histories), *prompt(self.rng, self.rng.randint(1, 500))][-longest:]
        if kind < 0.7:
            return [*self.rng.choice(self.prefixes), *prompt(self.rng, self._length())][:longest]
        return prompt(self.rng, self._length())


async def soak(server: Server, seconds: float, seed: int, load: Load = Load()) -> tuple[list[str], list[str]]:
    """Lines about the load and the counts, and all that was wrong. The server is up."""
    async with Client(server.url, timeout=900) as client:
        tally = await Soak(client, seed, load).run(seconds)
        busy, flushed, wrong = {}, {}, list(tally.failures[:5])
        try:
            server.check_alive()
            busy = await at_rest(client)
            await client.flush()
            flushed = await client.metrics(METRICS)
            wrong += contradictions(busy, flushed, tally.prompt_tokens, tally.cached_tokens)
        except (RuntimeError, aiohttp.ClientError) as error:
            wrong.append(str(error))
    wrong += server.trouble()[:5]
    return describe(f"{server.launch.name} seed {seed}", tally, busy), wrong


def describe(name: str, tally: Tally, busy: dict[str, float]) -> list[str]:
    """What was done, and what the plugin counted."""
    counts = {
        key.removeprefix("hisparse:").removesuffix("_total"): int(value)
        for key, value in busy.items()
        if key.startswith("hisparse:") and key.endswith("_total") and value
    }
    return [
        f"{name}: {tally.started} requests, {tally.finished} answered, {tally.aborted} aborted, "
        f"{tally.cut} cut; {tally.waiting} in the drain, of them {tally.unanswered} unanswered and cut; "
        f"tokens: {tally.prompt_tokens} of prompts ({tally.cached_tokens} cached), {tally.new_tokens} new",
        "  " + ", ".join(f"{key} {value}" for key, value in counts.items()),
    ]
