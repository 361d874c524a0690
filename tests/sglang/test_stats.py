"""Numbers of the pool in SGLang's log line and on its ``/metrics``."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats

from hisparse_sgl.integrations.sglang import prometheus
from hisparse_sgl.integrations.sglang.stats import LaggedCounters, describe, get_pool_stats
from hisparse_sgl.metrics import SECONDS_BUCKETS, Histogram, Metric

ROOT = Path(__file__).resolve().parents[2]


def counter(name: str, value: int) -> Metric:
    return Metric(f"hisparse:{name}_total", "counter", {}, value)


METRICS = [
    counter("hot_hits", 930),
    counter("hot_lookups", 1000),
    counter("prefix_hit_tokens", 128),
    counter("prefix_query_tokens", 512),
    Metric("hisparse:requests", "gauge", {"mode": "resident"}, 5),
    Metric("hisparse:requests", "gauge", {"mode": "hybrid"}, 2),
    Metric("hisparse:requests", "gauge", {"mode": "hot"}, 1),
    Metric("hisparse:spill_seconds", "histogram", {}, Histogram()),
]


def test_log_line_has_our_numbers() -> None:
    assert describe(METRICS) == ["#hot req: 3", "hot row hit rate: 0.93", "prefix hit rate: 0.25"]
    assert describe([]) == ["#hot req: 0", "hot row hit rate: 0.00", "prefix hit rate: 0.00"]


def observe(coordinator: object) -> Any:
    plain = PoolStats(
        full_num_used=10,
        full_token_usage=0.5,
        full_available_size=10,
        full_evictable_size=0,
        full_capacity=20,
    )
    return get_pool_stats(lambda self: plain, SimpleNamespace(hisparse_coordinator=coordinator))


def test_pool_statistics_of_our_pool() -> None:
    reads: list[int] = []

    def metrics() -> list[Metric]:
        reads.append(1)
        return METRICS

    tokens = SimpleNamespace(
        device_tokens=640, device_token_usage=0.25, host_tokens=1280, host_token_usage=0.125
    )
    found = observe(SimpleNamespace(metrics=metrics, get_token_stats=lambda: tokens))
    assert isinstance(found, PoolStats)
    assert (found.full_num_used, found.full_capacity, found.hisparse_host_tokens) == (10, 20, 1280)
    assert reads == []  # the scheduler asks for statistics often, for a line seldom
    line = ", ".join(found.get_decode_usage_msg_parts())
    assert line == (
        "#gpu token: 640, gpu token usage: 0.25, #cpu token: 1280, cpu token usage: 0.12, "
        "#hot req: 3, hot row hit rate: 0.93, prefix hit rate: 0.25"
    )
    assert reads == [1]


@pytest.mark.parametrize("coordinator", [None, SimpleNamespace(get_token_stats=None)])
def test_pool_statistics_of_other_pools_are_sglangs(coordinator: object) -> None:
    assert type(observe(coordinator)) is PoolStats


def test_counters_on_the_cpu_are_read_at_once() -> None:
    values = torch.tensor([[1, 2]])
    reader = LaggedCounters(values)
    first = reader.read()
    values += 1
    assert first.tolist() == [[1, 2]]
    assert reader.read().tolist() == [[2, 3]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_counters_on_a_gpu_are_read_without_waiting() -> None:
    values = torch.zeros(4, dtype=torch.int64, device="cuda")
    reader = LaggedCounters(values)
    torch.cuda._sleep(200_000_000)  # the current stream is busy for some 100 ms
    values += 7
    assert reader.read().tolist() == [0] * 4
    reader.stream.synchronize()  # the copy does not wait for the current stream
    torch.cuda.synchronize()
    reader.read()
    reader.stream.synchronize()
    assert reader.read().tolist() == [7] * 4


def test_new_values_of_a_histogram_keep_buckets_and_sum() -> None:
    source = random.Random(3)
    for _ in range(200):
        before, after = Histogram(), Histogram()
        for _ in range(source.randrange(4)):
            seconds = source.expovariate(1 / source.choice([0.0002, 0.02, 4.0]))
            before.observe(seconds)
            after.observe(seconds)
        for _ in range(source.randrange(6)):
            after.observe(source.expovariate(1 / source.choice([0.0002, 0.02, 4.0])))
        rebuilt = Histogram(list(before.counts), before.total)
        for value in prometheus.new_values(before, after):
            rebuilt.observe(value)
        assert rebuilt.counts == after.counts
        # Beside a value above the last bound, the others are put in the middle of their buckets.
        if after.counts[-1] == before.counts[-1]:
            assert rebuilt.total == pytest.approx(after.total, rel=1e-4, abs=1e-6)


def test_new_values_where_nothing_happened() -> None:
    assert prometheus.new_values(Histogram(), Histogram()) == []
    edge = Histogram()
    edge.observe(SECONDS_BUCKETS[0])
    assert prometheus.new_values(Histogram(), edge) == [pytest.approx(SECONDS_BUCKETS[0])]


EXPORT = """
import json, sys
from hisparse_sgl.integrations.sglang.prometheus import Exporter
from hisparse_sgl.metrics import Histogram, Metric

class Pool:
    hits, calls = 0, 0
    spills = Histogram()
    def metrics(self):
        self.calls += 1
        return [
            Metric("hisparse:hot_hits_total", "counter", {}, self.hits),
            Metric("hisparse:requests", "gauge", {"mode": "hot"}, self.hits // 10),
            Metric("hisparse:spill_seconds", "histogram", {}, self.spills),
        ]

pool, exporter = Pool(), Exporter({"tp_rank": 3, "model_name": "m"})
for now, hits in ((10.0, 5), (10.5, 6), (11.0, 40)):
    pool.hits = hits
    pool.spills.observe(0.002)
    exporter.export(pool, now)
from prometheus_client import CollectorRegistry, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
labels = {"tp_rank": "3", "model_name": "m"}
print(json.dumps({
    "calls": pool.calls,
    "hits": registry.get_sample_value("hisparse:hot_hits_total", labels),
    "hot": registry.get_sample_value("hisparse:requests", labels | {"mode": "hot"}),
    "spills": registry.get_sample_value("hisparse:spill_seconds_count", labels),
    "below": registry.get_sample_value("hisparse:spill_seconds_bucket", labels | {"le": "0.001"}),
    "seconds": registry.get_sample_value("hisparse:spill_seconds_sum", labels),
}))
"""


def test_series_reach_the_files_that_sglangs_processes_share(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", EXPORT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["calls"] == 2  # at most once a second
    assert (found["hits"], found["hot"], found["spills"], found["below"]) == (40, 4, 3, 0)
    assert found["seconds"] == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("hisparse", "metrics", "exports"), [(True, True, 1), (True, False, 0), (False, True, 0)]
)
def test_exports_only_where_sglang_does(hisparse: bool, metrics: bool, exports: int) -> None:
    context = SimpleNamespace(
        current_scheduler_metrics_enabled=metrics, collector=SimpleNamespace(labels={"tp_rank": 0})
    )
    scheduler = SimpleNamespace(enable_hisparse=hisparse)

    def original(self: Any) -> None:
        self.metrics_collector_context = context

    try:
        prometheus.init_metrics_collector(original, scheduler)
        assert len(prometheus._exporters) == exports
    finally:
        prometheus._exporters.clear()
