"""The invariants of a coordinator, recomputed from its requests and compared with every count it keeps."""

from __future__ import annotations

from collections import Counter

from hisparse_sgl.config import ACTIVE_TAIL_PAGES
from hisparse_sgl.coordinator import Coordinator
from hisparse_sgl.pages import PageState
from hisparse_sgl.requests import Request

UNDURABLE = (PageState.DIRTY, PageState.SPILLING)


def check_integrity(coordinator: Coordinator) -> None:
    """Raise ``RuntimeError`` naming the first invariant of docs/design.md that does not hold."""
    coordinator.allocator.check_integrity()
    coordinator.leases.check_integrity()
    coordinator.pages.check_integrity()
    coordinator.gate.check_integrity()
    for request in coordinator.requests.values():
        _check_request(coordinator, request)
    _check_references(coordinator)
    _check_pins(coordinator)
    _check_states(coordinator)
    _check_promises(coordinator)


def _check_request(c: Coordinator, request: Request) -> None:
    request.hasher.check_integrity()
    needed = -(-request.num_tokens // c.page_size)
    if len(request.pages) != needed or request.num_settled > request.num_tokens:
        raise RuntimeError(
            f"{request.rid}: {len(request.pages)} pages for {request.num_tokens} tokens, "
            f"{request.num_settled} settled"
        )
    if request.hot_pages and len(request.hot_pages) != c.sizes.hot_pages:
        raise RuntimeError(f"{request.rid}: {len(request.hot_pages)} hot pages, {c.sizes.hot_pages} expected")
    if bool(request.hot_pages) != (request.region >= 0):
        raise RuntimeError(f"{request.rid}: hot region {request.region}, hot pages {request.hot_pages}")
    first = max(0, len(request.pages) - ACTIVE_TAIL_PAGES) if request.hot_pages else 0
    unpinned = [p for p in request.pages[request.pin_start :] if not c.leases.is_pinned(p)]
    if unpinned:
        raise RuntimeError(
            f"{request.rid}: pages {unpinned} are needed on the device and not pinned (rules 4, 5)"
        )
    if request.pin_start < first:
        raise RuntimeError(f"{request.rid}: pins from page {request.pin_start} on, needs {first}")
    waiting = {p for p in request.pages[request.pin_start :] if c.leases.is_restoring(p)}
    if not waiting <= set(request.restoring):
        raise RuntimeError(
            f"{request.rid}: pages {waiting} are restoring, {request.restoring} are waited for"
        )
    lost = [p for p in request.pages if not c.leases.is_resident(p) and not c.pages.is_durable(p)]
    if lost:
        raise RuntimeError(f"{request.rid}: pages {lost} are neither on the device nor durable (rule 1)")


def _check_references(c: Coordinator) -> None:
    expected: Counter[int] = Counter()
    for request in c.requests.values():
        expected.update(request.pages)
    expected.update(node.page for node in c.tree.nodes.values())
    for publication in c.gate.detached:
        expected.update(publication.pages)
    for flight in c.pages.flights.values():
        expected.update(flight.pages)
    for page, count in enumerate(c.allocator.pool.ref_counts):
        if count != expected[page]:
            raise RuntimeError(f"host page {page} has {count} references, {expected[page]} holders")


def _check_pins(c: Coordinator) -> None:
    expected: Counter[int] = Counter(p for p, state in enumerate(c.pages.states) if state in UNDURABLE)
    for request in c.requests.values():
        expected.update(request.pages[request.pin_start :])
    for flight in c.pages.flights.values():
        expected.update(flight.pages)
    for page in range(c.config.host_pages):
        if c.leases.pins(page) != expected[page]:
            raise RuntimeError(f"host page {page} has {c.leases.pins(page)} pins, {expected[page]} holders")


def _check_states(c: Coordinator) -> None:
    pages = c.pages
    for page, state in enumerate(pages.states):
        held = c.allocator.pool.ref_counts[page] > 0
        if held == (state is PageState.EMPTY):
            raise RuntimeError(
                f"host page {page} is {state.value} with {'some' if held else 'no'} references"
            )
        if (state is PageState.SPILLING) != (page in pages.spill_ids):
            raise RuntimeError(f"host page {page} is {state.value}, its spill is {pages.spill_ids.get(page)}")
        if (state is PageState.RESTORING) != c.leases.is_restoring(page):
            raise RuntimeError(f"host page {page} is {state.value} and restoring on the device or not")
        if page in pages.to_spill and state is not PageState.DIRTY:
            raise RuntimeError(f"host page {page} waits for its spill and is {state.value}")
        if page in pages.unmirrored and state not in UNDURABLE:
            raise RuntimeError(f"host page {page} lacks rows and is {state.value}")
    if not set(pages.spill_ids.values()) <= pages.flights.keys():
        raise RuntimeError(f"spills {pages.spill_ids} name transfers that are not in flight")


def _check_promises(c: Coordinator) -> None:
    requests, residency = c.requests.values(), c.residency
    budgets = {
        "host": (sum(r.promised for r in requests), residency.promised_host, c.allocator.num_free),
        "device": (sum(r.promised_device for r in requests), residency.promised, c.leases.num_free),
    }
    for name, (promised, counted, free) in budgets.items():
        if promised != counted or promised > free:
            raise RuntimeError(f"{promised} {name} pages promised, {counted} counted, {free} free (rule 10)")
    rows = sorted([r.row for r in c.requests.values()] + c.free_rows)
    if rows != list(range(c.config.max_requests)):
        raise RuntimeError(f"request rows {rows} are not each in one place")
    held = [r.region for r in requests if r.region >= 0]
    if sorted(held + residency.free_regions) != list(range(c.sizes.hot_regions)):
        raise RuntimeError(
            f"hot regions {held} are held, {residency.free_regions} free, of {c.sizes.hot_regions} in all"
        )
