"""Steps of scripts: what a test asks for, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from drive import Script
from engine import PAGE, Settings
from scenarios import HYBRID
from sglang.srt.managers.io_struct import (
    FlushCacheReqOutput,
    OpenSessionReqOutput,
    UpdateWeightFromDiskReqOutput,
)

ROOMY = replace(HYBRID, tokens=60 * PAGE, copy_rate=1.0)
OVERLAP = pytest.mark.parametrize("overlap", [True, False])
LATE = pytest.mark.parametrize("copy_rate", [0.0, 1.0], ids=["copies are late", "copies are through"])
REPLIES = (FlushCacheReqOutput, OpenSessionReqOutput, UpdateWeightFromDiskReqOutput)


def play(settings: Settings, script: Callable[[Script], Iterator[None]]) -> Any:
    """Run a script; answers to what is no request are kept in ``drive.replies``."""
    drive: Any = Script(settings, script)
    drive.replies, outbox = [], drive.scheduler.channels.outbox
    drive.scheduler.channels.outbox = lambda output: (
        drive.replies.append(output) if isinstance(output, REPLIES) else outbox(output)
    )
    return drive.run()


def words(count: int) -> list[int]:
    return [2 + i * i % 40 for i in range(count)]


def steps(drive: Any, *rids: str, more: int = 5) -> Iterator[None]:
    """Until these requests have ended, and some steps more."""
    yield
    while any(map(drive.is_live, rids)):
        yield
    for _ in range(more):
        yield


def decoding(drive: Any, rid: str) -> Iterator[None]:
    """Until the request has decoded some tokens."""
    requests = drive.scheduler.hisparse_coordinator.lifecycle.requests
    yield
    while rid not in requests or requests[rid].num_tokens <= requests[rid].prompt_tokens + 3:
        yield


def ask(drive: Any, prompt: list[int], new_tokens: int) -> str:
    drive.outgoing.append(drive.traffic.send(prompt, None, new_tokens))
    return drive.outgoing[-1].rid


def cached(drive: Any, prompt: list[int]) -> Generator[None, None, int]:
    """Ask once more; the cached tokens that were found."""
    rid = ask(drive, prompt, 1)
    yield from steps(drive, rid)
    return drive.forwards.cached[rid]
