"""The sizes of the plugin's pools: hot regions, and what SGLang reports of host memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from drive import Script
from engine import CONTEXT, PAGE, Engine, Settings
from scenarios import HYBRID
from sglang.srt.managers.scheduler import Scheduler

DEVICE_TOKENS, HOST_TOKENS = 15 * PAGE, 60 * PAGE
SMALL = replace(HYBRID, tokens=DEVICE_TOKENS, ratio=4)


def three_answers(drive: Script) -> Iterator[None]:
    """Two requests run, a third one waits; the reports are looked at in each step."""
    assert drive.scheduler.get_init_info()["max_total_num_tokens"] == HOST_TOKENS
    assert drive.scheduler.kv_events_publisher.max_total_num_tokens == HOST_TOKENS
    assert drive.scheduler.max_req_len == DEVICE_TOKENS - 1
    rids = [drive.send(3 * PAGE + 10, PAGE) for _ in range(3)]
    yield
    used = []
    while any(map(drive.is_live, rids)):
        used.append(check_reports(drive.scheduler))
        yield
    while drive.scheduler.hisparse_coordinator.lifecycle.pages.flights:  # they hold pages that nobody wants
        yield
    assert max(used) > 6 * PAGE, used
    assert check_reports(drive.scheduler) == 0
    assert drive.scheduler.tree_cache.evictable_size() > 0


def check_reports(scheduler: Any) -> int:
    """Tokens in use and not cached."""
    stats = scheduler.pool_stats_observer.get_pool_stats()
    assert stats.full_capacity == HOST_TOKENS
    free = scheduler.token_to_kv_pool_allocator.available_size()
    cached = scheduler.tree_cache.evictable_size()
    assert (stats.full_available_size, stats.full_evictable_size) == (free, cached)
    assert stats.full_num_used == HOST_TOKENS - free - cached >= 0
    assert stats.full_token_usage == stats.full_num_used / HOST_TOKENS == stats.get_max_pool_usage()
    assert stats.get_prefill_usage_msg_parts() == [f"token usage: {stats.full_token_usage:.2f}"]
    load = scheduler.load_inquirer.get_loads()
    assert load.max_total_num_tokens == HOST_TOKENS
    assert load.num_used_tokens == stats.full_num_used
    assert load.token_usage == round(stats.full_token_usage, 4)
    return stats.full_num_used


def test_reports_count_host_tokens_of_the_host_pool() -> None:
    Script(replace(SMALL, max_requests=2), three_answers).run()


def test_sglangs_own_size_gives_a_negative_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hook is for: the device's tokens less the host's free ones."""
    monkeypatch.setattr(Scheduler, "init_model_worker", Scheduler.init_model_worker.__wrapped__)
    drive = Script(SMALL, three_answers)
    try:
        stats = drive.scheduler.pool_stats_observer.get_pool_stats()
        assert stats.full_token_usage == 1 - HOST_TOKENS / DEVICE_TOKENS
    finally:
        drive.engine.close()


# Two leaders; key and order of each hot row, a hint for each position. SGLang's rows of requests are some
# positions longer than the context.
REGION_BYTES = 2 * (6 * 2 * PAGE + 2 * (CONTEXT + PAGE))
MANY = replace(HYBRID, tokens=120 * PAGE, max_requests=40)


@pytest.mark.parametrize(
    ("settings", "regions"),
    [
        (MANY, 121 * PAGE * 3 * 96 * 5 // 100 // REGION_BYTES),
        (replace(MANY, tokens=40 * PAGE), 8),
        (replace(MANY, tokens=12 * PAGE), 12 // 2),
        (replace(MANY, max_requests=4), 4 + 1),
        (replace(MANY, hisparse=(("max_hot_requests", 30),)), 30),
    ],
    ids=["5 %", "at least 8", "room for 6", "rows of 4 requests and of padding", "as told"],
)
def test_hot_regions(settings: Settings, regions: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hisparse_sgl"):
        engine = Engine(settings, seed=0)
    try:
        coordinator: Any = engine.scheduler.hisparse_coordinator
        assert coordinator.lifecycle.sizes.hot_regions == regions
        state = sum(tensor.nbytes for tensor in coordinator.runtime.hot)
        assert state == regions * REGION_BYTES
        pages = settings.tokens // PAGE
        assert f"{pages + 1} device pages of 0.02 MiB, {pages * settings.ratio + 1} host pages" in caplog.text
        assert f"up to {regions} hot regions of 128 rows, {state / 2**20:.1f} MiB of hot state" in caplog.text
    finally:
        engine.close()
