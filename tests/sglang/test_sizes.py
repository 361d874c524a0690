"""What SGLang reports of its memory while the plugin's pools serve: host tokens of the host pool's size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from drive import Script
from engine import PAGE
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
