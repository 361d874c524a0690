"""What must hold for the metrics of a server that has come to rest."""

from __future__ import annotations

import asyncio

from benchmarks.engine.client import Client

METRICS = ("hisparse:", "sglang:num_running_reqs", "sglang:num_queue_reqs")
IDLE_GAUGES = (
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "hisparse:pending_spills",
    "hisparse:host_pages/in_use",
    *(f"hisparse:requests/{mode}" for mode in ("resident", "hybrid", "hot")),
    *(f"hisparse:device_pages/{state}" for state in ("hot", "dirty", "spilling", "clean", "restoring")),
)  # fmt: skip
"""All 0 when nothing runs."""


async def at_rest(client: Client, tries: int = 8, pause: float = 5.0) -> dict[str, float]:
    """Metrics when nothing runs. SGLang brings its own up to date every 30 s at the latest."""
    found = await client.metrics(METRICS)
    for _ in range(tries):
        if not any(found.get(name) for name in IDLE_GAUGES):
            break
        await asyncio.sleep(pause)
        found = await client.metrics(METRICS)
    return found


def contradictions(
    busy: dict[str, float], flushed: dict[str, float], prompt_tokens: int, cached_tokens: int
) -> list[str]:
    """What is wrong with the metrics of a server that has come to rest, and then was flushed.

    ``prompt_tokens`` and ``cached_tokens`` are those of the answers that were seen.
    """

    def at(name: str) -> float:
        return busy.get(f"hisparse:{name}", 0.0)

    wrong = [f"{name} is {busy[name]:.0f} at rest" for name in IDLE_GAUGES if busy.get(name, 0.0)]
    missing = [name for name in IDLE_GAUGES if name not in busy]
    if missing:
        wrong.append(f"metrics {missing} are missing")
    never = ("audit_mismatches_total", "spill_failures_total", "restore_failures_total")
    wrong += [f"{name} is {at(name):.0f}" for name in never if at(name)]
    most = [
        ("hot_hits_total", "hot_lookups_total"),
        ("prefix_hit_tokens_total", "prefix_query_tokens_total"),
    ]
    wrong += [f"{one} {at(one):.0f} > {two} {at(two):.0f}" for one, two in most if at(one) > at(two)]
    if at("pages_reused_total") + at("pages_adopted_total") > at("pages_unpinned_total"):
        wrong.append("more pages were reused and adopted than unpinned")
    parts = at("restored_bytes_total") + at("swapped_in_bytes_total")
    if parts != at("host_to_device_bytes_total"):
        wrong.append(f"host_to_device_bytes is {at('host_to_device_bytes_total'):.0f}, its parts {parts:.0f}")
    if cached_tokens > at("prefix_hit_tokens_total"):
        wrong.append(f"answers had {cached_tokens} tokens cached, more than prefix_hit_tokens")
    if prompt_tokens > at("prefix_query_tokens_total"):
        wrong.append(f"answers had {prompt_tokens} prompt tokens, more than prefix_query_tokens")
    for pool, states in (("host_pages", ("evictable", "in_use")), ("device_pages", ("unpinned",))):
        kept = {state: flushed.get(f"hisparse:{pool}/{state}", 0.0) for state in states}
        wrong += [f"{pool} {state} is {value:.0f} after a flush" for state, value in kept.items() if value]
    return wrong
