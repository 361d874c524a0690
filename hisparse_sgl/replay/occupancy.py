"""How much of each request's context is on the device, kept up to date from the coordinator's deltas."""

from __future__ import annotations

from collections import defaultdict

from hisparse_sgl.coordinator import Coordinator
from hisparse_sgl.requests import Request


class Occupancy:
    """Requests with a hot region: how many of their pages are resident.

    ``holders`` maps a host page to the rids of such requests that have it. A request is *hybrid* while a page
    it does not pin is resident, *hot* otherwise. ``selected_rows`` sums the rows of one selection over these
    requests, ``missing_rows`` those of them that are not resident: a selection is spread evenly over the
    context.
    """

    def __init__(self, coordinator: Coordinator, block_size: int, top_k: int) -> None:
        self.coordinator = coordinator
        self.block_size = block_size
        self.top_k = top_k
        self.holders: dict[int, set[str]] = defaultdict(set)
        self.resident: dict[str, int] = {}  # rid -> resident pages
        self.requests: dict[str, Request] = {}
        self.seen: set[int] = set()  # pages of these requests that count as resident
        self.modes: dict[str, str] = {}
        self.counts = {"hybrid": 0, "hot": 0}
        self.rows: dict[str, tuple[int, int]] = {}  # selected, missing
        self.selected_rows = 0
        self.missing_rows = 0

    def grow(self, rid: str) -> None:
        """The request has one page more, a resident one."""
        request = self.requests.get(rid)
        if request is not None:
            self._hold(request, request.pages[-1])
            self._judge(rid)

    def remove(self, rid: str) -> None:
        """The request is about to end."""
        request = self.requests.pop(rid, None)
        if request is None:
            return
        for page in request.pages:
            self.holders[page].discard(rid)
            if not self.holders[page]:
                del self.holders[page]
                self.seen.discard(page)
        self.counts[self.modes.pop(rid)] -= 1
        self._set_rows(rid, 0, 0)
        del self.rows[rid]
        del self.resident[rid]

    def update(self) -> None:
        """Take in what the coordinator changed since the last call."""
        deltas = self.coordinator.take_deltas()
        touched: set[str] = set()
        for page, device_page in deltas.residency.items():
            if page in self.holders and (page in self.seen) != bool(device_page):
                self._flip(page, bool(device_page))
                touched |= self.holders[page]
        given = [row for row, (region, _) in deltas.hot_regions.items() if region >= 0]
        if given:
            rows = {request.row: request for request in self.coordinator.requests.values()}
            for row in given:
                if rows[row].rid not in self.requests:
                    self._add(rows[row])
                    touched.add(rows[row].rid)
        for rid in sorted(touched):
            self._judge(rid)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless all counts are those of the coordinator's tables."""
        leases = self.coordinator.leases
        expected = {r.rid: r for r in self.coordinator.requests.values() if r.hot_pages}
        if expected.keys() != self.requests.keys():
            raise RuntimeError(f"hot regions of {sorted(expected)}, known of {sorted(self.requests)}")
        for rid, request in expected.items():
            resident = sum(map(leases.is_resident, request.pages))
            behind = any(map(leases.is_resident, request.pages[: request.pin_start]))
            if resident != self.resident[rid] or (self.modes[rid] == "hybrid") != behind:
                raise RuntimeError(
                    f"{rid}: {resident} of {len(request.pages)} pages resident, {behind} behind the tail, "
                    f"counted {self.resident[rid]} and {self.modes[rid]}"
                )
        selected, missing = (sum(rows[i] for rows in self.rows.values()) for i in (0, 1))
        if (selected, missing) != (self.selected_rows, self.missing_rows):
            raise RuntimeError(f"{self.missing_rows} of {self.selected_rows} rows missing, {self.rows}")
        if sum(self.counts.values()) != len(expected):
            raise RuntimeError(f"{len(expected)} requests with hot regions, counted {self.counts}")

    def _add(self, request: Request) -> None:
        rid = request.rid
        self.requests[rid] = request
        self.resident[rid] = 0
        self.modes[rid] = "hot"
        self.counts["hot"] += 1
        self.rows[rid] = (0, 0)
        for page in request.pages:
            self._hold(request, page)

    def _hold(self, request: Request, page: int) -> None:
        self.holders[page].add(request.rid)
        if self.coordinator.leases.is_resident(page):
            self.seen.add(page)
            self.resident[request.rid] += 1

    def _flip(self, page: int, resident: bool) -> None:
        change = 1 if resident else -1
        if resident:
            self.seen.add(page)
        else:
            self.seen.discard(page)
        for rid in self.holders[page]:
            self.resident[rid] += change

    def _judge(self, rid: str) -> None:
        request, resident = self.requests[rid], self.resident[rid]
        pages = len(request.pages)
        mode = "hybrid" if resident > pages - request.pin_start else "hot"
        self.counts[self.modes[rid]] -= 1
        self.counts[mode] += 1
        self.modes[rid] = mode
        selected = min(self.top_k, pages * self.block_size)
        self._set_rows(rid, selected, selected * (pages - resident) // pages)

    def _set_rows(self, rid: str, selected: int, missing: int) -> None:
        before = self.rows[rid]
        self.selected_rows += selected - before[0]
        self.missing_rows += missing - before[1]
        self.rows[rid] = (selected, missing)
