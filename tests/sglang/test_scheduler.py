"""SGLang's scheduler under random traffic, every row that a forward reads compared with what was written."""

from __future__ import annotations

from collections import Counter

import pytest
from drive import run
from scenarios import SCENARIOS

STEPS = 330  # of traffic; a run ends up to 150 steps later
SEED = 2

STOCK = ("as it is", "as it is, tight", "as it is, preemption")


def check_work(seen: Counter[str]) -> None:
    wanted = ("decode rows read", "prefill rows read", "ended by length", "padded rows", "duplicates")
    assert all(seen[name] for name in wanted), seen


@pytest.mark.parametrize("name", STOCK)
def test_sglang_as_it_is(name: str) -> None:
    check_work(run(name, SEED, 150))


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in STOCK])
def test_sglang_with_the_plugin(name: str) -> None:
    seen = run(name, SEED, STEPS)
    check_work(seen)
    assert seen["host rows read"] and seen["resident_rows"], seen
    if name.startswith("tight device"):
        assert seen["hot_hits"] and seen["pages_restored"] and seen["pages_reused"], seen
    if name in ("retractions", "outgrown host", "preemption"):
        assert seen["retractions"], seen
    if "failing" in name:
        assert seen["spill_failures"], seen
