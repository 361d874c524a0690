"""A server without ``--enable-hisparse`` beside the applied hooks is SGLang's, object by object."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from drive import Drive
from engine import Settings
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats
from traffic import Load


def ours() -> Counter[str]:
    """Live objects of the plugin's classes."""
    gc.collect()
    kinds = Counter(type(thing) for thing in gc.get_objects())
    home = "hisparse_sgl.integrations.sglang."
    return Counter({k.__name__: n for k, n in kinds.items() if str(k.__module__).startswith(home)})


@pytest.mark.usefixtures("plugin")
def test_nothing_of_ours_is_built_and_traffic_is_served() -> None:
    before = ours()
    drive = Drive(Settings(), Load(), seed=1, steps=60)
    scheduler = drive.scheduler
    try:
        assert not ours() - before
        assert scheduler.hisparse_coordinator is None
        assert scheduler.get_prefill_adder_class() is PrefillAdder
        assert type(scheduler.pool_stats_observer.get_pool_stats()) is PoolStats
        drive.engine.run()
        assert drive.seen["requests"] > 0
        assert not ours() - before
    finally:
        drive.engine.close()
