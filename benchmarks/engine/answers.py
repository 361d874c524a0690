"""Everything that one server is asked for comparing: alone, pressed, warm, at once, and how soon.

Passes over the four prompts, each one request after the other unless it says otherwise:

cold: after a flush.
pressed: after a flush too; while a prompt is decoded, two other prompts are prefilled that end with their
    first token. So the prompt decodes alone as in the cold pass, and its answer must be equal to that bit for
    bit; but on a small device its rows are pushed off. (A request that is alone never misses: the plugin
    takes no prompt that does not fit the device beside a hot region.)
warm: again, with whatever is cached.
batch: the four at once, warm.
crowd: six more prompts at once, cold and warm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.engine.client import Answer, Client, counts_of
from benchmarks.engine.server import Server, machine

PROMPT_TOKENS = (300, 5000, 9000, 20000)
NEW_TOKENS = 48
CROWD = (6, 9000)
PRESS_TOKENS = 16_000
TTFT_RUNS = 7
VOCABULARY = (3, 8000)


def prompt(rng: Random, tokens: int) -> list[int]:
    return [rng.randrange(*VOCABULARY) for _ in range(tokens)]


def the_prompts() -> list[list[int]]:
    """One stream of random numbers, seed 0: the same in every run."""
    rng = Random(0)
    return [prompt(rng, tokens) for tokens in PROMPT_TOKENS]


class Asked:
    """The passes over one server; ``record`` is what is written of them.

    ``scale`` divides all lengths, for tests.
    """

    def __init__(self, client: Client, is_ours: bool, scale: int = 1) -> None:
        self.client = client
        self.is_ours = is_ours
        self.scale = scale
        self.four = [p[: len(p) // scale] for p in the_prompts()]
        self.rng = Random(1)
        self.crowd = [prompt(self.rng, CROWD[1] // scale) for _ in range(CROWD[0])]
        self.record: dict[str, Any] = {}
        self.counts: dict[str, dict[str, float]] = {}

    async def ask(self, tokens: list[int], **kwargs: Any) -> Answer:
        return await self.client.generate(tokens, NEW_TOKENS, logprobs=True, **kwargs)

    async def run(
        self,
        name: str,
        work: Callable[[], Awaitable[list[Answer]]],
        flush: bool = False,
        count: bool = True,
    ) -> None:
        """One pass, and what the plugin had counted at its end: for metrics one has to wait."""
        if flush:
            await self.client.flush()
        start = time.perf_counter()
        answers = await work()
        self.record[name] = {
            "seconds": time.perf_counter() - start,
            "answers": [asdict(answer) for answer in answers],
        }
        if self.is_ours and count:
            self.counts[name] = counts_of(await self.client.metrics())

    async def alone(self) -> list[Answer]:
        return [await self.ask(tokens) for tokens in self.four]

    async def at_once(self, prompts: list[list[int]]) -> list[Answer]:
        return list(await asyncio.gather(*map(self.ask, prompts)))

    async def pressed(self) -> list[Answer]:
        """Each prompt alone, pressed by two others that never decode beside it."""
        answers = []
        for tokens in self.four:
            first = asyncio.Event()
            asked = asyncio.create_task(self.ask(tokens, first=first))
            await first.wait()
            await asyncio.gather(*(self.push() for _ in range(2)))
            answers.append(await asked)
        return answers

    async def push(self) -> Answer:
        return await self.client.generate(prompt(self.rng, PRESS_TOKENS // self.scale), 1)

    async def time_to_first_token(self, restored: bool) -> list[float]:
        """Of the longest prompt, cached, and one token. ``restored``: pushed off the device before."""
        await self.ask(self.four[-1])
        seconds = []
        for run in range(TTFT_RUNS):
            for _ in range(2 * restored):
                await self.push()
            answer = await self.client.generate([*self.four[-1], 5 + run], 1)
            seconds.append(answer.ttft)
        return seconds


async def equal_part(asked: Asked) -> None:
    """What is compared bit for bit, and near to it. Other servers may run on the card."""
    await asked.run("cold", asked.alone, flush=True)
    await asked.run("warm", asked.alone)
    await asked.run("batch", lambda: asked.at_once(asked.four))
    if asked.is_ours:
        await asked.run("pressed", asked.pressed, flush=True)
    await asked.run("crowd cold", lambda: asked.at_once(asked.crowd), flush=True)
    await asked.run("crowd warm", lambda: asked.at_once(asked.crowd))


async def timed_part(asked: Asked, restored: bool) -> None:
    """What is compared in seconds: nothing else runs on the card."""
    await asked.run("cold", asked.alone, flush=True, count=False)
    await asked.run("warm", asked.alone, count=False)
    batches = []
    for left in (2, 1, 0):
        await asked.run("batch", lambda: asked.at_once(asked.four), count=left == 0)
        batches.append(asked.record["batch"]["seconds"])
    asked.record["batch_seconds"] = batches
    asked.record["ttft"] = await asked.time_to_first_token(restored)
    if asked.is_ours:
        asked.counts["ttft"] = counts_of(await asked.client.metrics())


async def fault_part(asked: Asked, folder: Path) -> None:
    """The pressed pass with each fault of ``faults.py``, then without."""
    from benchmarks.engine.faults import FAULTS, set_fault

    for fault in FAULTS:
        await asked.client.flush()
        set_fault(folder, fault)
        try:
            await asked.run(f"fault {fault}", asked.pressed)
        finally:
            set_fault(folder, None)
    await asked.run("fault cleared", asked.alone, flush=True)


async def ask_server(
    server: Server, part: str = "equal", faults: Path | None = None, scale: int = 1
) -> dict[str, Any]:
    """All passes of a part over a server that is up: a record for ``compare.py``.

    Args:
        part: ``equal`` or ``timed``.
        faults: folder of the toggle with which the server was started, or None.
    """
    async with Client(server.url, server.launch.kind.caches) as client:
        asked = Asked(client, server.launch.kind.plugin, scale)
        await client.generate(prompt(Random(9), 256 // scale), 4)  # kernels that compile at their first use
        if part == "timed":
            await timed_part(asked, restored=server.launch.engine == "tight")
        else:
            await equal_part(asked)
        # With a fault the audit is to find differences: they are no part of the counts before.
        trouble = server.trouble()
        if faults is not None:
            await fault_part(asked, faults)
        metrics = await client.metrics() if asked.is_ours else {}
    server.check_alive()
    launch = server.launch
    return {
        "name": launch.name,
        "engine": launch.engine,
        "model": launch.model.rstrip("/").rsplit("/", 1)[-1],
        "dtype": launch.dtype,
        "graphs": launch.graphs,
        "audit_every": launch.audit_every,
        "part": part,
        "scale": scale,
        "seconds_to_start": server.seconds_to_start,
        "host_pool_seconds": server.host_pool_seconds(),
        "passes": asked.record,
        "counts": asked.counts,
        "trouble": trouble,
        "metrics": metrics,
        "sizes": server.sizes(),
        **machine(),
    }
