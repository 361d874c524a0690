"""What a replay counts, and the numbers that are reported from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MODES = ("resident", "hybrid", "hot")


@dataclass(slots=True)
class Measures:
    """Sums over one replay; times in simulated seconds."""

    query_tokens: int = 0
    hit_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    queueing: list[float] = field(default_factory=list)
    mode_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MODES, 0.0))
    running_seconds: float = 0.0  # requests x seconds
    busy_seconds: float = 0.0  # while any request was let in
    stalled_seconds: float = 0.0  # of these, in which the engine waited for copies
    makespan: float = 0.0  # until the last answer
    peak_running: int = 0
    peak_decoding: int = 0
    output_tokens: int = 0
    gathered_bytes: float = 0.0
    region_rows: int = 0  # rows selected by requests with a hot region
    region_rows_missing: int = 0  # of these, not on a resident page
    deferred: Counter[str] = field(default_factory=Counter)  # requests by what they lacked first
    retracted: Counter[int] = field(default_factory=Counter)  # retractions by request
    refused: int = 0
    completed: int = 0

    def lapse(self, seconds: float, running: int) -> None:
        """Time has passed with so many requests let in."""
        self.busy_seconds += seconds
        self.running_seconds += running * seconds
        self.peak_running = max(self.peak_running, running)

    def decode(self, seconds: float, decoding: int, hot_regions: dict[str, int], gathered: float) -> None:
        """So many requests have decoded meanwhile; hot regions took in ``gathered`` bytes."""
        self.peak_decoding = max(self.peak_decoding, decoding)
        for mode, count in hot_regions.items():
            self.mode_seconds[mode] += count * seconds
        self.mode_seconds["resident"] += (decoding - sum(hot_regions.values())) * seconds
        self.gathered_bytes += gathered


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, nearest-rank percentiles and maximum, in seconds to the microsecond; zeros for no values."""
    ordered = sorted(values) or [0.0]

    def rank(share: int) -> float:
        return round(ordered[max(0, -(-len(ordered) * share // 100) - 1)], 6)

    mean = round(sum(ordered) / len(ordered), 6)
    return {"mean": mean, "p50": rank(50), "p90": rank(90), "p99": rank(99), "max": round(ordered[-1], 6)}


def ratio(part: float, whole: float, digits: int = 6) -> float:
    return round(part / whole, digits) if whole else 0.0


def timed_result(measures: Measures, spilled: int, restored: int) -> dict[str, Any]:
    """The figures of a replay with a clock. Rates and shares are fractions of 1."""
    makespan = measures.makespan
    decode_seconds = sum(measures.mode_seconds.values())
    return {
        "token_hit_rate": ratio(measures.hit_tokens, measures.query_tokens),
        "hit_tokens": measures.hit_tokens,
        "query_tokens": measures.query_tokens,
        "completed_requests": measures.completed,
        "refused_requests": measures.refused,
        "deferred_requests": sum(measures.deferred.values()),
        "deferred_for": dict(sorted(measures.deferred.items())),
        "retracted_requests": len(measures.retracted),
        "retractions": sum(measures.retracted.values()),
        "ttft_seconds": percentiles(measures.ttft),
        "queueing_seconds": percentiles(measures.queueing),
        "makespan_seconds": round(makespan, 6),
        "stalled_seconds": round(measures.stalled_seconds, 6),
        "output_tokens_per_second": ratio(measures.output_tokens, makespan, 3),
        "concurrency_mean": ratio(measures.running_seconds, makespan, 3),
        "concurrency_busy_mean": ratio(measures.running_seconds, measures.busy_seconds, 3),
        "concurrency_peak": measures.peak_running,
        "decoding_peak": measures.peak_decoding,
        "decode_time_share": {
            mode: ratio(seconds, decode_seconds) for mode, seconds in measures.mode_seconds.items()
        },
        "resident_share_with_hot_region": ratio(
            measures.region_rows - measures.region_rows_missing, measures.region_rows
        ),
        "bytes_spilled": spilled,
        "bytes_restored": restored,
        "bytes_swapped_in": round(measures.gathered_bytes),
    }
