"""Engines and loads to try: named ones, and as many random ones as there are seeds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from engine import PAGE, Settings
from traffic import Load

GROWING = Load(
    arrival=0.5, abort=0.002, flush=0.0, most_live=20, prefix_tokens=(20, 120), tail_tokens=(1, 60),
    new_tokens=(200, 500), stop_every=5000,
)  # fmt: skip
"""Short prompts and long answers: requests outgrow what their admission was planned for."""

BUSY = Load(arrival=0.25, burst=0.02, abort=0.04, most_live=30)
SHORT_ANSWERS = Load(arrival=0.35, abort=0.03, most_live=20, new_tokens=(0, 12))
SHARED = Load(
    arrival=0.5, abort=0, flush=0, most_live=8, prefix_tokens=(380, 420), tail_tokens=(1, 100),
    new_tokens=(20, 60), stop_every=1000, longest=700,
)  # fmt: skip
CONVERSATIONS = Load(arrival=0.2, abort=0.01, prefix_tokens=(200, 420), new_tokens=(30, 140), most_live=12)

HYBRID = Settings(hybrid=True)
TIGHT = replace(HYBRID, tokens=19 * PAGE, chunk=2 * PAGE, conservativeness=0.3)

SCENARIOS: dict[str, tuple[Settings, Load]] = {
    "as it is": (Settings(tokens=120 * PAGE), Load()),
    "as it is, tight": (Settings(tokens=20 * PAGE, conservativeness=0.1, overlap=False, core="python"), BUSY),
    "as it is, preemption": (Settings(priorities=True, policy="lpm", max_requests=4), BUSY),
    "all fits": (replace(HYBRID, tokens=120 * PAGE), Load()),
    "tight device": (TIGHT, BUSY),
    "tight device, shared prefixes": (replace(TIGHT, tokens=15 * PAGE), SHARED),
    "tight device, python core, no overlap": (replace(TIGHT, core="python", overlap=False), BUSY),
    "tight host": (replace(HYBRID, tokens=26 * PAGE, ratio=1, conservativeness=0.1), CONVERSATIONS),
    "outgrown host": (
        replace(HYBRID, tokens=24 * PAGE, ratio=1, conservativeness=0.1, max_requests=8),
        GROWING,
    ),
    "slow and failing copies": (
        replace(TIGHT, copy_rate=0.04, failure_rate=0.2, overlap=False),
        SHORT_ANSWERS,
    ),
    "slow copies, python core": (
        replace(TIGHT, copy_rate=0.02, core="python", tokens=24 * PAGE),
        CONVERSATIONS,
    ),
    "preemption": (
        replace(TIGHT, tokens=24 * PAGE, priorities=True, max_requests=3, core="python", policy="lpm"),
        BUSY,
    ),
    "retractions": (replace(TIGHT, retract_every=9, ratio=2), BUSY),
    "few spills at a time": (replace(TIGHT, failure_rate=0.1, hisparse=(("max_spill_pages", 2),)), BUSY),
    "rows mirrored in each step": (
        replace(TIGHT, failure_rate=0.1, hisparse=(("eager_host_mirror", True),)),
        BUSY,
    ),
    "one hot region": (replace(TIGHT, hisparse=(("max_hot_requests", 1),), eviction="lfu"), BUSY),
    "graphs without swap-in": (replace(TIGHT, hisparse=(("resident_graphs", True),)), BUSY),
    "no prefix cache": (replace(TIGHT, radix=False), BUSY),
}


def random_engine(seed: int) -> tuple[Settings, Load]:
    rng = Random(seed)
    settings = Settings(
        overlap=rng.random() < 0.7,
        core=rng.choice(("rust", "python")),
        tokens=rng.choice((19, 21, 24, 40, 120)) * PAGE,
        max_requests=rng.choice((3, 8, 16)),
        chunk=rng.choice((2, 4, 8)) * PAGE,
        top_k=rng.choice((32, 48, 64)),
        priorities=rng.random() < 0.3,
        policy=rng.choice(("fcfs", "lpm")),
        eviction=rng.choice(("lru", "lfu", "fifo")),
        conservativeness=rng.choice((0.1, 0.3, 1.0)),
        retract_every=rng.choice((0, 0, 7, 30)),
        radix=rng.random() < 0.95,
        hybrid=True,
        ratio=rng.choice((1, 2, 4)),
        hot_rows=rng.choice((1, 2, 2, 4)) * PAGE,
        copy_rate=rng.choice((0.02, 0.1, 0.3, 0.8)),
        failure_rate=rng.choice((0.0, 0.0, 0.1)),
        hisparse=(
            ("eager_host_mirror", rng.random() < 0.4),
            ("max_spill_pages", rng.choice((None, 1, 3))),
            ("max_hot_requests", rng.choice((None, None, 1))),
            ("audit_every", rng.choice((0, 0, 3))),
            ("resident_graphs", seed % 2 == 0),
        ),
    )
    load = rng.choice((Load(), GROWING, BUSY, SHORT_ANSWERS, CONVERSATIONS))
    return settings, replace(
        load,
        abort=rng.choice((0.0, 0.01, 0.05)),
        most_live=rng.choice((4, 12, 30)),
        flush=rng.choice((0, 0.01)),
    )
