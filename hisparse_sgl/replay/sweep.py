"""Replays of one trace: a single one, or one for each host size, device size and policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hisparse_sgl.replay.measures import ratio
from hisparse_sgl.replay.prompts import replay_prompts
from hisparse_sgl.replay.sequences import Sequences
from hisparse_sgl.replay.setup import Setup, Size, make_engine, pool_pages
from hisparse_sgl.replay.simulate import Simulation

Result = dict[str, Any]


@dataclass(frozen=True)
class Sweeps:
    """Values to try, each sweep with all else as in the base setup. The host sweep runs for each policy."""

    host_gib: tuple[float, ...] = ()
    device_pages: tuple[int, ...] = ()
    policies: tuple[str, ...] = ()

    def points(self, base: Setup) -> dict[str, list[Setup]]:
        """The setups of each sweep that has values."""
        if self.device_pages and not base.timed:
            raise ValueError("a sweep over device pages says nothing without the clock: add --clock")
        policies = [replace(base, policy=policy) for policy in self.policies]
        hosts = [
            replace(each, host=Size(gib=gib)) for each in policies or [base] for gib in sorted(self.host_gib)
        ]
        devices = [replace(base, device=Size(pages=pages)) for pages in sorted(self.device_pages)]
        named = {"host": hosts, "device": devices, "policy": policies}
        return {name: setups for name, setups in named.items() if setups}


def replay_once(setup: Setup, sequences: Sequences, on_request: Callable[[], None] = lambda: None) -> Result:
    """The figures of one replay."""
    if setup.timed:
        return Simulation(setup, sequences, on_request).run()
    _, cached = replay_prompts(setup, sequences, on_request)
    query = sequences.trace.input_tokens
    return {
        "token_hit_rate": ratio(sum(cached), query),
        "hit_tokens": sum(cached),
        "query_tokens": query,
        "completed_requests": len(cached),
    }


class Runner:
    """Runs each different setup once. ``on_request`` is called for every request of every replay."""

    def __init__(self, sequences: Sequences, on_request: Callable[[], None] = lambda: None) -> None:
        self.sequences = sequences
        self.on_request = on_request
        self.results: dict[Setup, Result] = {}

    def check(self, setups: Iterator[Setup]) -> int:
        """Raise ``ValueError`` for the first setup that cannot work; else the number of different ones."""
        different = set(setups)
        for setup in sorted(different, key=repr):
            make_engine(setup, self.sequences)
        return len(different)

    def run(self, setup: Setup) -> Result:
        """The sizes of a setup and the figures of its replay."""
        if setup not in self.results:
            host, device = pool_pages(setup, self.sequences)
            sizes = {
                "policy": setup.policy,
                "host_pages": host,
                "host_gib": setup.host.gib,
                "device_pages": device,
                "device_gib": setup.device.gib,
            }
            self.results[setup] = sizes | replay_once(setup, self.sequences, self.on_request)
        return self.results[setup]


def hit_rate_ceiling(sequences: Sequences) -> float:
    """Token hit rate of the prompts, one after the other, if nothing were ever dropped."""
    seen: set[int] = set()
    hits = 0
    for index, request in enumerate(sequences.trace.requests):
        cached = next((n for n, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        hits += sequences.prompt_tokens(index, cached)
        seen.update(request.blocks)
        seen.update(block for block in sequences.of(index).answer if block < sequences.trace.num_blocks)
    return ratio(hits, sequences.trace.input_tokens)
