"""A server without ``--enable-hisparse`` beside the applied hooks is SGLang's, object by object."""

from __future__ import annotations

import gc

import pytest
from drive import Drive
from engine import Settings
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats
from traffic import Load


def ours() -> set[type]:
    """Classes of the plugin that have an instance."""
    kinds = {type(thing) for thing in gc.get_objects()}
    return {kind for kind in kinds if str(kind.__module__).startswith("hisparse_sgl.integrations.sglang.")}


@pytest.mark.usefixtures("plugin")
def test_nothing_of_ours_is_built_and_traffic_is_served() -> None:
    before = ours()
    drive = Drive(Settings(), Load(), seed=1, steps=60)
    scheduler = drive.scheduler
    try:
        assert ours() == before
        assert scheduler.hisparse_coordinator is None
        assert scheduler.get_prefill_adder_class() is PrefillAdder
        assert type(scheduler.pool_stats_observer.get_pool_stats()) is PoolStats
        drive.engine.run()
        assert drive.seen["requests"] > 0
        assert ours() == before
    finally:
        drive.engine.close()
