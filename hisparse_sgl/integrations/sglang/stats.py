"""Numbers of the pool for SGLang's log line, and device counters read without stalling the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.managers.scheduler_components import pool_stats_observer

from hisparse_sgl.metrics import Metric


class LaggedCounters:
    """A device tensor of counters, as it was when the last copy of it landed.

    ``read`` never waits: where no copy is in flight it starts one, to pinned memory on a stream of its own,
    and it returns what landed last, zeros before the first. Words are copied whole, so a counter is never
    torn, but counters may be of slightly different moments. Do not call it while a CUDA graph is captured.

    Args:
        counters: any shape and dtype; must outlive this object.
    """

    def __init__(self, counters: torch.Tensor) -> None:
        self.counters = counters
        self.landed = torch.zeros_like(counters, device="cpu")
        self.in_flight = False
        if counters.is_cuda:
            self.pinned = torch.zeros_like(counters, device="cpu").pin_memory()
            self.stream = torch.cuda.Stream(counters.device)
            self.event = torch.cuda.Event()

    def read(self) -> torch.Tensor:
        """CPU tensor of the shape of the counters, replaced (not rewritten) by later calls."""
        if not self.counters.is_cuda:
            return self.counters.clone()
        if self.in_flight and self.event.query():
            self.landed = self.pinned.clone()
            self.in_flight = False
        if not self.in_flight:
            with torch.cuda.stream(self.stream):
                self.pinned.copy_(self.counters, non_blocking=True)
                self.event.record(self.stream)
            self.in_flight = True
        return self.landed


@dataclasses.dataclass
class HiSparsePoolStats(pool_stats_observer.PoolStats):
    """SGLang's pool statistics, with ours at the end of the decode log line."""

    metrics: Callable[[], list[Metric]] = list

    def get_decode_usage_msg_parts(self) -> list[str]:
        """Parts of the log line. The metrics are collected here: only when a line is printed."""
        return [*super().get_decode_usage_msg_parts(), *describe(self.metrics())]


def describe(metrics: Iterable[Metric]) -> list[str]:
    """Requests with a hot region, and the hit rates of hot rows and of prefixes since the start."""
    values: dict[str, int] = {}
    for metric in metrics:
        if isinstance(metric.value, int):
            key = metric.name.removeprefix("hisparse:") + "".join(f"/{v}" for v in metric.labels.values())
            values[key] = metric.value
    hot = values.get("requests/hot", 0) + values.get("requests/hybrid", 0)
    rows = _share(values, "hot_hits_total", "hot_lookups_total")
    prefix = _share(values, "prefix_hit_tokens_total", "prefix_query_tokens_total")
    return [f"#hot req: {hot}", f"hot row hit rate: {rows:.2f}", f"prefix hit rate: {prefix:.2f}"]


def get_pool_stats(original: Callable[[Any], Any], self: Any) -> Any:
    """Around ``SchedulerPoolStatsObserver.get_pool_stats``: add our pool where it is the one that serves."""
    stats = original(self)
    coordinator = self.hisparse_coordinator
    metrics = getattr(coordinator, "metrics", None)
    if metrics is None:
        return stats
    ours = coordinator.get_token_stats()
    fields = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    fields |= {
        "is_hisparse": True,
        "hisparse_device_tokens": ours.device_tokens,
        "hisparse_device_token_usage": ours.device_token_usage,
        "hisparse_host_tokens": ours.host_tokens,
        "hisparse_host_token_usage": ours.host_token_usage,
        "metrics": metrics,
    }
    return HiSparsePoolStats(**fields)


def _share(values: dict[str, int], part: str, whole: str) -> float:
    total = values.get(whole, 0)
    return values.get(part, 0) / total if total else 0.0
