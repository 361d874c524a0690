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
from benchmarks.engine.server import Server

METRICS = ("hisparse:", "sglang:num_running_reqs", "sglang:num_queue_reqs")
IDLE_GAUGES = (
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "hisparse:pending_spills",
    "hisparse:host_pages/in_use",
    *(f"hisparse:requests/{mode}" for mode in ("resident", "hybrid", "hot")),
    *(f"hisparse:device_pages/{state}" for state in ("hot", "dirty", "spilling", "clean", "restoring")),
)  # fmt: skip
"""All 0 when nothing runs."""


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


@dataclass
class Tally:
    """What the client saw."""

    started: int = 0
    finished: int = 0
    aborted: int = 0
    cut: int = 0  # connections closed by us
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
        self.prefixes = [prompt(self.rng, self._length() * 2 // 3) for _ in range(load.prefixes)]
        self.histories: list[list[int]] = []

    async def run(self, seconds: float) -> Tally:
        """Load for that long; returns when the last request is answered."""
        end = time.perf_counter() + seconds
        next_burst = time.perf_counter() + self.load.burst_every / 2
        while time.perf_counter() < end:
            count = 1
            if time.perf_counter() >= next_burst:
                next_burst += self.load.burst_every
                count = self.load.burst
            for _ in range(min(count, self.load.most_live - len(self.live))):
                self._start()
            await asyncio.sleep(self.rng.expovariate(self.load.rate))
        if self.live:
            await asyncio.wait(self.live, timeout=300)
        if self.live:
            self.tally.failures.append(f"{len(self.live)} requests unanswered 300 s after the load")
        return self.tally

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
            self.live.add(ender)
            ender.add_done_callback(self.live.discard)

    async def _request(self, rid: str, tokens: list[int], new_tokens: int) -> None:
        try:
            answer = await self.client.generate(tokens, new_tokens, rid=rid)
        except asyncio.CancelledError:
            self.tally.cut += 1
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


async def at_rest(client: Client, tries: int = 8, pause: float = 5.0) -> dict[str, float]:
    """Metrics when nothing runs. SGLang brings its own up to date every 30 s at the latest."""
    found = await client.metrics(METRICS)
    for _ in range(tries):
        if not any(found.get(name) for name in IDLE_GAUGES):
            break
        await asyncio.sleep(pause)
        found = await client.metrics(METRICS)
    return found


def contradictions(busy: dict[str, float], flushed: dict[str, float], tally: Tally) -> list[str]:
    """What is wrong with the metrics of a server that has come to rest, and then was flushed."""

    def at(name: str) -> float:
        return busy.get(f"hisparse:{name}", 0.0)

    wrong = [f"{name} is {busy[name]:.0f} at rest" for name in IDLE_GAUGES if busy.get(name, 0.0)]
    missing = [name for name in IDLE_GAUGES if name not in busy]
    if missing:
        wrong.append(f"metrics {missing} are missing")
    never = ("audit_mismatches_total", "spill_failures_total", "restore_failures_total")
    wrong += [f"{name} is {at(name):.0f}" for name in never if at(name)]
    most = [
        ("hot_hits_total", "hot_lookups_total"),
        ("prefix_hit_tokens_total", "prefix_query_tokens_total"),
    ]
    wrong += [f"{one} {at(one):.0f} > {two} {at(two):.0f}" for one, two in most if at(one) > at(two)]
    if at("pages_reused_total") + at("pages_adopted_total") > at("pages_unpinned_total"):
        wrong.append("more pages were reused and adopted than unpinned")
    parts = at("restored_bytes_total") + at("swapped_in_bytes_total")
    if parts != at("host_to_device_bytes_total"):
        wrong.append(f"host_to_device_bytes is {at('host_to_device_bytes_total'):.0f}, its parts {parts:.0f}")
    if tally.cached_tokens > at("prefix_hit_tokens_total"):
        wrong.append(f"answers had {tally.cached_tokens} tokens cached, more than prefix_hit_tokens")
    if tally.prompt_tokens > at("prefix_query_tokens_total"):
        wrong.append(f"answers had {tally.prompt_tokens} prompt tokens, more than prefix_query_tokens")
    for pool, states in (("host_pages", ("evictable", "in_use")), ("device_pages", ("unpinned",))):
        kept = {state: flushed.get(f"hisparse:{pool}/{state}", 0.0) for state in states}
        wrong += [f"{pool} {state} is {value:.0f} after a flush" for state, value in kept.items() if value]
    return wrong


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
            wrong += contradictions(busy, flushed, tally)
        except (RuntimeError, aiohttp.ClientError) as error:
            wrong.append(str(error))
    wrong += server.trouble()[:5]
    name = f"{server.launch.name} seed {seed}"
    counts = {
        key.removeprefix("hisparse:").removesuffix("_total"): int(value)
        for key, value in busy.items()
        if key.startswith("hisparse:") and key.endswith("_total") and value
    }
    lines = [
        f"{name}: {tally.started} requests, {tally.finished} answered, {tally.aborted} aborted, "
        f"{tally.cut} cut; tokens: {tally.prompt_tokens} of prompts ({tally.cached_tokens} cached), "
        f"{tally.new_tokens} new",
        "  " + ", ".join(f"{key} {value}" for key, value in counts.items()),
    ]
    return lines, wrong
