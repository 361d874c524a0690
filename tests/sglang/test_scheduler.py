"""SGLang's scheduler under random traffic, every row that a forward reads compared with what was written."""

from __future__ import annotations

import pytest
from drive import Drive
from engine import PAGE, Settings
from traffic import Load

PRESSED = Load(arrival=0.25, burst=0.02, abort=0.04, most_live=30, new_tokens=(0, 300))
ROOMY = Settings(tokens=120 * PAGE)
TIGHT = Settings(tokens=20 * PAGE, conservativeness=0.1, chunk=2 * PAGE)


@pytest.mark.parametrize(
    ("settings", "load", "seed"),
    [
        (ROOMY, Load(), 1),
        (Settings(overlap=False, core="python"), PRESSED, 2),
        (TIGHT, PRESSED, 3),
        (Settings(priorities=True, policy="lpm", max_requests=4), PRESSED, 4),
    ],
    ids=["roomy", "no overlap, python core", "tight", "priorities"],
)
def test_sglang_as_it_is(settings: Settings, load: Load, seed: int) -> None:
    seen = Drive(settings, load, seed, steps=200).run()
    assert seen["decode rows read"] and seen["prefill rows read"] and seen["cached tokens"], seen
