"""SGLang's scheduler under random traffic, every row that a forward reads compared with what was written."""

from __future__ import annotations

from collections import Counter

import pytest
from drive import run
from scenarios import SCENARIOS

from hisparse_sgl.integrations.sglang import graphs

STEPS = 330  # of traffic; a run ends up to 150 steps later
SEEDS = range(4)  # tried in turn until a scenario has shown what it is for

ALWAYS = ("decode rows read", "prefill rows read", "ended by length", "padded rows", "duplicates")
TIGHT = ("hot_hits", "pages_restored", "pages_reused", "deferred_admissions", "aborts between chunks")
WANTED = {
    "all fits": ("detached_publications",),
    "tight device": TIGHT,
    "tight device, shared prefixes": TIGHT[:-1],
    "tight device, python core, no overlap": TIGHT,
    "tight host": ("hot_hits",),
    "outgrown host": ("retractions", "hot_hits"),
    "slow and failing copies": ("spill_failures", "detached_publications", "deferred_admissions"),
    "slow copies, python core": ("detached_publications", "hot_hits"),
    "preemption": ("retractions", "hot_hits"),
    "retractions": ("retractions", "pages_restored"),
    "few spills at a time": ("spill_failures", "hot_hits"),
    "rows mirrored in each step": ("spill_failures", "hot_hits"),
    "one hot region": ("hot_hits",),
    "graphs without swap-in": (*TIGHT[:3], f"steps: {graphs.RESIDENT}", f"steps: {graphs.SWAP_IN}"),
    "no prefix cache": ("hot_hits",),
}


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in WANTED])
def test_sglang_as_it_is(name: str) -> None:
    seen = run(name, SEEDS[0], 150)
    assert all(seen[wanted] for wanted in ALWAYS), seen


@pytest.mark.parametrize("name", WANTED)
def test_sglang_with_the_plugin(name: str) -> None:
    total = Counter[str]()
    for seed in SEEDS:
        seen = run(name, seed, STEPS)
        assert seen["host rows read"] and seen["resident_rows"], seen
        total += seen
        if all(total[wanted] for wanted in ALWAYS + WANTED[name]):
            return
    raise AssertionError(f"{len(SEEDS)} runs have not shown all of {WANTED[name]}: {total}")
