"""Random requests under pressure, with late and failing copies; hypothesis seeks a fault."""

from __future__ import annotations

from random import Random

from driver import Driver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from random_pools import ACTIONS

SEEDS = st.integers(0, 2**32 - 1)


class PoolMachine(RuleBasedStateMachine):
    """Each rule is one action of the driver, which checks everything after it."""

    driver: Driver | None = None

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        self.driver = Driver(seed)
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


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def test_the_driver_reaches_what_it_is_for() -> None:
    """A test that never meets pressure, failures or shared prefixes would prove nothing."""
    met: set[str] = set()
    for seed in range(13):
        driver, rng = Driver(seed), Random(seed)
        for _ in range(150):
            driver.act(rng.choice(ACTIONS), rng.randrange(2**32))
        driver.drain(rng)
        driver.run_alone(rng)
        counters = driver.pool.counters
        met |= {name for name, count in driver.seen.items() if count}
        met |= {name for name in COUNTERS if getattr(counters, name)}
        driver.close()
    missing = {*COUNTERS, *DEFERRALS, "prefix hits", "hot admissions", "rewinds"} - met
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
