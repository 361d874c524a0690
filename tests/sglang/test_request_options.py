"""Options of single requests that lead SGLang's scheduler another way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from drive import Script
from engine import PAGE, Settings
from scenarios import HYBRID

HIGHEST_PRIORITY = 2**63 - 1


def answers_of_fixed_length(drive: Script) -> Iterator[None]:
    """Without a prefix cache SGLang admits requests that ignore the end of a text by a rule of their own."""
    rids = [drive.send(6 * PAGE + 10, 3 * PAGE) for _ in range(4)]
    for message in drive.outgoing:
        message.sampling_params.ignore_eos = True
    yield
    while any(map(drive.is_live, rids)):
        yield


@pytest.mark.parametrize(
    "settings",
    [replace(HYBRID, radix=False), replace(HYBRID, radix=False, tokens=17 * PAGE, chunk=2 * PAGE)],
    ids=["roomy", "tight device, chunks"],
)
def test_requests_that_ignore_the_end_of_a_text_without_a_prefix_cache(settings: Settings) -> None:
    assert Script(settings, answers_of_fixed_length).run()["ended by length"] == 4


def highest_priority(drive: Script) -> Iterator[None]:
    """The prompt of an ended request is worth more than its answer: there is no priority above this one."""
    rid = drive.send(2 * PAGE, 2 * PAGE)
    drive.outgoing[-1].priority = HIGHEST_PRIORITY
    yield
    while drive.is_live(rid):
        yield


@pytest.mark.parametrize("core", ["rust", "python"])
def test_the_highest_priority_that_a_request_can_have(core: str) -> None:
    settings = replace(HYBRID, core=core, priorities=True, eviction="priority")
    assert Script(settings, highest_priority).run()["ended by length"] == 1
