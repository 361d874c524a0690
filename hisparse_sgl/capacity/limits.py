"""What limits the requests of a plan, and how long a context may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hisparse_sgl.capacity.costs import Costs

NO_LIMIT = 10**9


@dataclass(frozen=True)
class Limit:
    """Most requests of the wanted context that ``resource`` allows, if the others were endless."""

    resource: str
    requests: int
    fix: str


def device_limit(costs: Costs, kv_bytes: int) -> Limit:
    """Requests that fit into device memory with as few device pages each as can be.

    Named after what takes most of one more request: the indexer rows of its context, or its hot region.
    """
    context = costs.context_pages
    more = costs.device_bytes_needed(2, context) - costs.device_bytes_needed(1, context)
    requests = last_true(lambda n: costs.device_bytes_needed(n, context) <= kv_bytes, NO_LIMIT)
    if 2 * context * costs.page_device_bytes > more:
        fix = "lower --context or --concurrency, use more GPUs or a larger --mem-fraction"
        return Limit("indexer rows (HBM)", requests, fix)
    fix = "lower --hot-rows or --concurrency, use more GPUs or a larger --mem-fraction"
    return Limit("hot regions (HBM)", requests, fix)


def host_limit(costs: Costs, ram_pages: int) -> Limit:
    """Requests whose contexts fit into the host pool."""
    fix = "raise --host-ram-gib, share the host pool, or lower --context or --concurrency"
    return Limit("host RAM", max((ram_pages - 1) // costs.context_pages, 0), fix)


def pcie_limit(hot_budget: int | None, hot_of: Callable[[int], int]) -> Limit:
    """Requests of which at most ``hot_budget`` have hot regions. ``hot_of(n)`` never falls as n grows."""
    fix = "raise --step-ms, --hot-rows (a higher hit rate) or the device pages, or lower --concurrency"
    if hot_budget is None:
        return Limit("PCIe", NO_LIMIT, fix)
    return Limit("PCIe", last_true(lambda n: hot_of(n) <= hot_budget, NO_LIMIT), fix)


def longest_context(costs: Costs, kv_bytes: int, ram_pages: int, requests: int, most: int) -> int:
    """Tokens of the longest context that ``requests`` can have at one time, at most ``most``."""

    def fits(pages: int) -> bool:
        return 1 + requests * pages <= ram_pages and costs.device_bytes_needed(requests, pages) <= kv_bytes

    return min(last_true(fits, -(-most // costs.page_tokens)) * costs.page_tokens, most)


def last_true(holds: Callable[[int], bool], most: int) -> int:
    """The largest n in 1..most for which ``holds``, which stays false once it is; 0 if there is none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
