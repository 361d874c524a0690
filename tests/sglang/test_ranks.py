"""Two ranks of a tensor parallel group, whose copies take different times, launch the same forwards."""

from __future__ import annotations

from two_ranks import run_ranks

SCENARIO = "slow and failing copies"  # none fails here: that is no matter of time
SEED = 1
STEPS = 120


def test_two_ranks_decide_alike() -> None:
    (seen, launched), (other_seen, other_launched) = run_ranks(SCENARIO, SEED, STEPS)
    assert launched == other_launched
    assert seen["deferred_admissions"] and seen["detached_publications"], seen
    assert seen["host rows read"] != other_seen["host rows read"], "the copies took the same time"


def test_they_would_not_without_agreeing_on_copies() -> None:
    try:
        (_, launched), (_, other_launched) = run_ranks(SCENARIO, SEED, STEPS, agree=False)
    except AssertionError:
        return
    assert launched != other_launched
