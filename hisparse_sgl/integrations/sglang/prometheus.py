"""The pool's metrics on SGLang's ``/metrics``.

SGLang's processes share ``prometheus_client``'s multiprocess files, in which custom collectors are not seen.
So plain counters, gauges and histograms are kept here and moved on by what the pool counted since last time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hisparse_sgl.metrics import SECONDS_BUCKETS, Histogram, Metric

INTERVAL = 1.0
"""Least seconds between two exports."""


class Source(Protocol):
    """What is exported: ``Coordinator``, or anything else that counts."""

    def metrics(self) -> list[Metric]: ...


class Exporter:
    """Series of one scheduler.

    Args:
        labels: what SGLang puts on its own series of this scheduler.
    """

    def __init__(self, labels: dict[str, Any]) -> None:
        self.labels = labels
        self.series: dict[str, Any] = {}
        self.exported: dict[tuple[str, ...], int | Histogram] = {}
        self.due = 0.0

    def export(self, source: Source, now: float) -> None:
        """Bring all series up to date, at most once in ``INTERVAL`` seconds of the clock ``now`` is of."""
        if now < self.due:
            return
        self.due = now + INTERVAL
        for metric in source.metrics():
            self._update(metric)

    def _update(self, metric: Metric) -> None:
        child = self._series(metric).labels(**self.labels, **metric.labels)
        if metric.kind == "gauge":
            child.set(metric.value)
            return
        key = (metric.name, *metric.labels.values())
        if isinstance(metric.value, Histogram):
            before = self.exported.get(key, Histogram())
            assert isinstance(before, Histogram)
            for seconds in new_values(before, metric.value):
                child.observe(seconds)
            self.exported[key] = Histogram(list(metric.value.counts), metric.value.total)
        else:
            last = self.exported.get(key, 0)
            assert isinstance(last, int)
            child.inc(max(0, metric.value - last))
            self.exported[key] = metric.value

    def _series(self, metric: Metric) -> Any:
        if metric.name not in self.series:
            # Not at the top: SGLang names the directory of the multiprocess files before this import.
            import prometheus_client as client

            text = metric.name.removeprefix("hisparse:").replace("_", " ") + " of the HiSparse pool"
            names = [*self.labels, *metric.labels]
            if metric.kind == "gauge":
                made: Any = client.Gauge(metric.name, text, names, multiprocess_mode="mostrecent")
            elif metric.kind == "histogram":
                made = client.Histogram(metric.name, text, names, buckets=SECONDS_BUCKETS)
            else:
                made = client.Counter(metric.name, text, names)
            self.series[metric.name] = made
        return self.series[metric.name]


_exporters: list[Exporter] = []


def export(source: Source, now: float) -> None:
    """Export the metrics of this process's pool; nothing without ``--enable-metrics``.

    Args:
        now: seconds of a monotonic clock. Calls within a second of the last export return at once.
    """
    for exporter in _exporters:
        exporter.export(source, now)


def init_metrics_collector(original: Callable[[Any], None], self: Any) -> None:
    """Around ``Scheduler.init_metrics_collector``: export under the same conditions and labels as SGLang."""
    original(self)
    context = self.metrics_collector_context
    _exporters.clear()
    if self.enable_hisparse and context.current_scheduler_metrics_enabled:
        _exporters.append(Exporter(context.collector.labels))


def new_values(before: Histogram, after: Histogram) -> list[float]:
    """Values that lead from one state of a histogram to the next: same buckets, same sum.

    The values themselves are not kept; each is put between the bounds of its bucket, all at the same fraction
    of the way, or the rest goes to the open bucket.
    """
    counts = [b - a for a, b in zip(before.counts, after.counts, strict=True)]
    lows, total = (0.0, *SECONDS_BUCKETS), after.total - before.total
    bounds = list(zip(counts, lows, SECONDS_BUCKETS, strict=False))
    least = sum(count * low for count, low, _ in bounds)
    span = sum(count * (high - low) for count, low, high in bounds)
    open_count, top = counts[-1], SECONDS_BUCKETS[-1]
    share = (total - open_count * top - least) / span if span else 0.0
    share = min(max(share, 1e-6), 0.5 if open_count else 1.0)
    values = [low + share * (high - low) for count, low, high in bounds for _ in range(count)]
    if open_count:
        rest = (total - sum(values)) / open_count
        values += [max(rest, top * (1 + 1e-6))] * open_count
    return values
