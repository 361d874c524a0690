"""What a pool counts, under its Prometheus names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from hisparse_sgl.config import HiSparseConfig
    from hisparse_sgl.mem_pool.allocator import TokenToKVAllocator
    from hisparse_sgl.mem_pool.leases import DeviceLeases
    from hisparse_sgl.pages import Pages
    from hisparse_sgl.requests import PagedRequest

SECONDS_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


@dataclass(slots=True)
class Histogram:
    """Seconds in buckets: ``counts[i]`` of them up to ``SECONDS_BUCKETS[i]`` and above the bucket before."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.total += seconds


@dataclass(slots=True)
class Counters:
    """Everything a pool counts; each only grows. ``swapped_in_bytes`` are part of the bytes to the device."""

    hot_hits: int = 0
    hot_lookups: int = 0
    resident_rows: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    restored_bytes: int = 0
    swapped_in_bytes: int = 0
    device_to_host_bytes: int = 0
    pages_spilled: int = 0
    pages_restored: int = 0
    pages_unpinned: int = 0
    pages_reused: int = 0
    pages_adopted: int = 0
    spill_failures: int = 0
    restore_failures: int = 0
    deferred_admissions: int = 0
    retractions: int = 0
    detached_publications: int = 0
    audit_mismatches: int = 0

    def fill(self, leases: DeviceLeases) -> None:
        """Set the counts that the leases of device pages keep themselves."""
        self.pages_unpinned, self.pages_reused = leases.unpinned, leases.reused
        self.pages_adopted = leases.adopted

    @property
    def hot_misses(self) -> int:
        return self.hot_lookups - self.hot_hits

    @property
    def host_to_device_bytes(self) -> int:
        """Bytes of restored pages and of rows swapped in."""
        return self.restored_bytes + self.swapped_in_bytes


class Metric(NamedTuple):
    """One Prometheus series; a histogram's value is a ``Histogram``."""

    name: str
    kind: str  # "counter", "gauge" or "histogram"
    labels: dict[str, str]
    value: int | Histogram


class Observed(Protocol):
    """What the gauges are read from: a coordinator, or an engine's own."""

    @property
    def config(self) -> HiSparseConfig: ...
    @property
    def allocator(self) -> TokenToKVAllocator: ...
    @property
    def leases(self) -> DeviceLeases: ...
    @property
    def pages(self) -> Pages: ...
    @property
    def requests(self) -> Mapping[str, PagedRequest]: ...
    @property
    def num_evictable(self) -> int:
        """Host pages that only the prefix tree holds."""
        ...


def snapshot(counters: Counters, coordinator: Observed) -> list[Metric]:
    """All series of a pool."""
    named = {f.name: getattr(counters, f.name) for f in fields(counters)}
    named["host_to_device_bytes"] = counters.host_to_device_bytes
    series = [Metric(f"hisparse:{name}_total", "counter", {}, value) for name, value in named.items()]
    gauges = {
        "device_pages": ("state", _device_pages(coordinator)),
        "host_pages": ("state", _host_pages(coordinator)),
        "requests": ("mode", _modes(coordinator)),
    }
    for name, (label, values) in gauges.items():
        series += [Metric(f"hisparse:{name}", "gauge", {label: k}, v) for k, v in values.items()]
    pages = coordinator.pages
    pending = len(pages.to_spill) + len(pages.spill_ids)
    series.append(Metric("hisparse:pending_spills", "gauge", {}, pending))
    series.append(Metric("hisparse:spill_seconds", "histogram", {}, pages.spill_seconds))
    series.append(Metric("hisparse:restore_seconds", "histogram", {}, pages.restore_seconds))
    return series


def _device_pages(coordinator: Observed) -> dict[str, int]:
    leases, pages = coordinator.leases, coordinator.pages
    dirty, spilling = pages.num_dirty, len(pages.spill_ids)
    restoring, hot = len(leases.restoring), len(leases.hot)
    return {
        "free": leases.pool.num_truly_free,
        "unpinned": leases.pool.num_unpinned,
        "hot": hot,
        "dirty": dirty,
        "spilling": spilling,
        "clean": leases.num_in_use - hot - dirty - spilling - restoring,
        "restoring": restoring,
    }


def _host_pages(coordinator: Observed) -> dict[str, int]:
    free = coordinator.allocator.num_free
    evictable = coordinator.num_evictable
    return {
        "free": free,
        "evictable": evictable,
        "in_use": coordinator.config.host_pages - 1 - free - evictable,
    }


def _modes(coordinator: Observed) -> dict[str, int]:
    counts = {"resident": 0, "hybrid": 0, "hot": 0}
    for request in coordinator.requests.values():
        if not request.hot_pages:
            counts["resident"] += 1
        elif any(coordinator.leases.is_resident(page) for page in request.pages[: request.pin_start]):
            counts["hybrid"] += 1
        else:
            counts["hot"] += 1
    return counts
