"""Random requests under pressure, with late and failing copies; hypothesis seeks a fault.

Two pools: one with a row for each token, and one with a compressed group beside a plain one.
"""

from __future__ import annotations

from random import Random

import pytest
from driver import Driver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from random_pools import ACTIONS
from soak import run_chunk

SEEDS = st.integers(0, 2**32 - 1)


class PoolMachine(RuleBasedStateMachine):
    """Each rule is one action of the driver, which checks everything after it."""

    driver: Driver | None = None
    shares = st.just(1)

    @initialize(seed=SEEDS, data=st.data())
    def start(self, seed: int, data: st.DataObject) -> None:
        self.driver = Driver(seed, tokens_per_row=data.draw(self.shares))
        self.driver.act("admit", seed)

    @rule(action=st.sampled_from(ACTIONS), seed=SEEDS)
    def act(self, action: str, seed: int) -> None:
        assert self.driver is not None
        self.driver.act(action, seed)

    def teardown(self) -> None:
        if self.driver is not None:
            try:
                self.driver.drain(Random(0))
            finally:
                self.driver.close()


class CompressedPoolMachine(PoolMachine):
    """Two or four tokens share a row; a hit needs a state."""

    shares = st.sampled_from((2, 4))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestCompressedPool = CompressedPoolMachine.TestCase
TestCompressedPool.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(("tokens_per_row", "special"), [(1, ()), (2, ("shortened hits",))])
def test_the_driver_reaches_what_it_is_for(tokens_per_row: int, special: tuple[str, ...]) -> None:
    """A test that never meets pressure, failures or shared prefixes would prove nothing."""
    met: set[str] = set()
    for seed in range(13):
        driver, rng = Driver(seed, tokens_per_row=tokens_per_row), Random(seed)
        for _ in range(150):
            driver.act(rng.choice(ACTIONS), rng.randrange(2**32))
        driver.drain(rng)
        driver.run_alone(rng)
        counters = driver.pool.counters
        met |= {name for name, count in driver.seen.items() if count}
        met |= {name for name in COUNTERS if getattr(counters, name)}
        driver.close()
    missing = {*COUNTERS, *DEFERRALS, *special, "prefix hits", "hot admissions", "rewinds"} - met
    assert not missing, f"thirteen runs never met {sorted(missing)}"


COUNTERS = (
    "hot_hits",
    "hot_misses",
    "resident_rows",
    "pages_spilled",
    "pages_restored",
    "pages_unpinned",
    "pages_reused",
    "pages_adopted",
    "spill_failures",
    "restore_failures",
    "detached_publications",
)
DEFERRALS = (
    "admit: device pages",
    "admit: host pages",
    "admit: request rows",
    "admit: admission window",
    "extend: device pages",
    "extend: host pages",
    "extend: restoring",
)


@pytest.mark.parametrize(("seed", "actions"), [(770049, 820), (770050, 170)])
def test_what_long_runs_have_found(seed: int, actions: int) -> None:
    """770049: making room takes unpinned pages of the prompt's own prefix. 770050: making room for a prompt
    that needs a hot region gives the last one to another request."""
    run_chunk(seed, actions)
