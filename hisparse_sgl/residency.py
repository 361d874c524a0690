"""Which device pages each running request pins, and how the pool yields under pressure (rules 4 to 6)."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable

from hisparse_sgl.config import ACTIVE_TAIL_PAGES, Sizes
from hisparse_sgl.mem_pool.leases import DeviceLeases
from hisparse_sgl.pages import Pages
from hisparse_sgl.requests import Deltas, PagedRequest


class Residency:
    """Pins of requests, hot regions, and the pages promised to prompts that are still being prefilled.

    A request without a hot region pins every page it has, one with a region only its tail: so a page that
    several requests share is unpinned when the last of them holds a region (rule 5), and no sooner. Requests
    with much in common may thus need fewer pages without regions than with them: then they keep their pages.
    """

    def __init__(self, pages: Pages, leases: DeviceLeases, sizes: Sizes, deltas: Deltas) -> None:
        self.pages = pages
        self.leases = leases
        self.sizes = sizes
        self.deltas = deltas
        self.free_regions = list(range(sizes.hot_regions))
        self.promised = 0
        self.promised_host = 0

    @property
    def available(self) -> int:
        """Device pages that are free and promised to nobody."""
        return self.leases.num_free - self.promised

    @property
    def num_hot(self) -> int:
        """Requests that hold a hot region; the pages of all others are on the device."""
        return self.sizes.hot_regions - len(self.free_regions)

    @property
    def can_give_hot(self) -> bool:
        """A hot region is free, and pages for it."""
        return bool(self.free_regions) and self.available >= self.sizes.hot_pages

    def first_needed(self, request: PagedRequest) -> int:
        """Index of the first page that the request must pin."""
        return max(0, len(request.pages) - ACTIVE_TAIL_PAGES) if request.hot_pages else 0

    def cost(self, pages: Iterable[int]) -> int:
        """Free device pages that pinning these host pages takes: missing copies and unpinned ones."""
        return self.leases.pin_cost(pages)

    def pin(self, request: PagedRequest) -> None:
        """Pin what the request needs; missing pages start to be restored. The caller knows there is room."""
        first = self.first_needed(request)
        wanted = request.pages[first : request.pin_start]
        missing = self.leases.missing(wanted)
        gone = set(missing)
        present = [page for page in wanted if page not in gone] if missing else wanted
        self.leases.pin_all(present)
        try:
            self.pages.restore(missing)
        except BaseException:
            self.leases.unpin_all(present)
            raise
        self.leases.pin_all(missing)
        request.pin_start = first
        request.restoring = self._restoring(request.pages[first:])

    def is_ready(self, request: PagedRequest) -> bool:
        """Every page that the request needs on the device can be read there."""
        request.restoring = self._restoring(request.restoring)
        return not request.restoring and request.pin_start <= self.first_needed(request)

    def open_pages(self, request: PagedRequest, first: int) -> None:
        """Lease resident pages for ``request.pages[first:]``, just allocated, and trim the pins."""
        opened = request.pages[first:]
        self.pages.open(opened)
        self.leases.pin_all(opened)
        self.promise(request, -min(request.promised, len(request.pages) - first))
        self._trim(request)

    def relieve(self, target: int, requests: Iterable[PagedRequest]) -> bool:
        """Give resident requests hot regions, largest context first, until ``target`` pages are available.

        Only those whose regions take fewer pages than they give back, alone or with others of their prefix.
        """
        if self.available >= target:
            return True
        self.pages.spill(self.sizes.spill_budget)
        resident = sorted(filter(self._can_yield, requests), key=lambda r: (-len(r.pages), r.order))
        while self.available < target and self.can_give_hot:
            chosen = self._next_to_yield([request for request in resident if not request.hot_pages])
            if not chosen:
                break
            for request in chosen:
                self.give_hot(request)
        return self.available >= target

    def has_room(self, request: PagedRequest, pages: int) -> bool:
        """Whether the request can take more pages. May give it a hot region.

        It is not to become one that must yield and cannot, because its region does not fit any more: not even
        when it is the last.
        """
        count = len(request.pages) + pages
        most = self.leases.num_device_pages - 1 - self.sizes.hot_pages
        stays = (
            count <= self.sizes.hot_pages + ACTIVE_TAIL_PAGES
            or self.available >= pages + self.sizes.hot_pages
        )
        if not (request.hot_pages or stays) and (count > most or self._pays(request)):
            if request.prefilling or request.restoring or not self.can_give_hot:
                return False
            self.give_hot(request)
        return self.available >= pages

    def give_hot(self, request: PagedRequest) -> None:
        """Lease an empty hot region for a request; from now on only its tail is pinned."""
        request.hot_pages = self.pages.lease_hot(self.sizes.hot_pages)
        request.region = heapq.heappop(self.free_regions)
        self.deltas.hot_regions[request.row] = (request.region, request.hot_pages)
        self._trim(request)

    def promise(self, request: PagedRequest, pages: int) -> None:
        """Keep more host pages for the rest of a prompt, and as many device pages if it is to lie there.

        They are available to nobody else. A negative number takes a promise back, or counts it as kept.
        """
        request.promised += pages
        self.promised_host += pages
        if not request.hot_pages:
            self.promised += pages

    def release(self, request: PagedRequest) -> None:
        """Drop the pins, the hot region and the promise of a request that ends."""
        self._unpin(request, len(request.pages))
        self.promise(request, -request.promised)
        if request.hot_pages:
            self.leases.release_hot(request.hot_pages)
            heapq.heappush(self.free_regions, request.region)
            request.hot_pages, request.region = [], -1
            self.deltas.hot_regions[request.row] = (-1, [])

    def cut(self, request: PagedRequest, count: int) -> list[int]:
        """Take the request's pages from index ``count`` on away from it; the caller frees them."""
        gone = request.pages[count:]
        self.leases.unpin_all(request.pages[max(count, request.pin_start) :][::-1])
        del request.pages[count:]
        request.pin_start = min(request.pin_start, count)
        request.restoring = [page for page in request.restoring if page not in gone]
        return gone

    def _restoring(self, pages: list[int]) -> list[int]:
        return [page for page in pages if self.leases.is_restoring(page)] if self.leases.restoring else []

    def _can_yield(self, request: PagedRequest) -> bool:
        if request.hot_pages or request.prefilling or request.restoring:
            return False
        return len(request.pages) > self.sizes.hot_pages + ACTIVE_TAIL_PAGES

    def _pays(self, request: PagedRequest) -> bool:
        """Whether the request alone pins more pages than a region and a tail take.

        Requests share pages from the first one on, so one page tells it of all behind it.
        """
        index = len(request.pages) - self.sizes.hot_pages - ACTIVE_TAIL_PAGES - 1
        return index >= request.pin_start and self._is_own(request.pages[index])

    def _is_own(self, page: int) -> bool:
        """One request alone pins the page: copies in flight also do, of pages that are not durable yet."""
        return self.leases.pins(page) == 1 or not self.pages.is_durable(page)

    def _next_to_yield(self, resident: list[PagedRequest]) -> list[PagedRequest]:
        """The first request that pays; if none does, the first that pay together, whose common pages are
        unpinned with the last of them."""
        for request in resident:
            if self._pays(request):
                return [request]
        families: dict[int, list[PagedRequest]] = {}
        for request in resident:
            families.setdefault(request.pages[0], []).append(request)
        return next((group for family in families.values() if (group := self._paying(family))), [])

    def _paying(self, family: list[PagedRequest]) -> list[PagedRequest]:
        """The first of these requests that pay when all of them get regions, one after the other. None of
        them pays alone."""
        if not self._can_pay(family):
            return []
        counts, device_page_of = self.leases.pool.ref_counts, self.leases.device_page_of
        pins: dict[int, int] = {}
        gain = 0
        for count, request in enumerate(family[: len(self.free_regions)], start=1):
            if self.available + gain < self.sizes.hot_pages:
                break
            for page in request.pages[request.pin_start : -ACTIVE_TAIL_PAGES]:
                left = pins[page] = (pins.get(page) or counts[device_page_of(page)]) - 1
                gain += not left
            gain -= self.sizes.hot_pages
            if gain > 0:
                return family[:count]
        return []

    def _can_pay(self, family: list[PagedRequest]) -> bool:
        """A quick no, from the pages that each has alone and the number of requests that pin each other one.

        Until the first common page is unpinned, each region takes more than it gives back. And a request
        whose region takes more than its own pages and its share of each common one lets no group pay.
        """
        hot = self.sizes.hot_pages
        sharers, losses = [], []
        best: dict[int, tuple[int, PagedRequest, int]] = {}  # by last common page: the most own pages
        for request in family:
            pages, end = request.pages, len(request.pages)
            first = bisect_left(
                range(end), True, lo=end - hot - ACTIVE_TAIL_PAGES, key=lambda i: self._is_own(pages[i])
            )
            own = max(0, end - ACTIVE_TAIL_PAGES - first)
            common = pages[first - 1]
            sharers.append(self.leases.pins(common))
            losses.append(hot - own)
            if common not in best or own > best[common][0]:
                best[common] = own, request, first
        before = min(sharers) - 1
        if before >= len(self.free_regions) or sum(sorted(losses)[:before]) + hot > self.available:
            return False
        return any(own + self._share(request, first) > hot for own, request, first in best.values())

    def _share(self, request: PagedRequest, end: int) -> float:
        """The pages up to ``end`` that the request pins, each divided by the number of its pins.

        Pins get fewer from the first page on, as requests part.
        """
        pages, pins, start, share = request.pages, self.leases.pins, request.pin_start, 0.0
        while start < end:
            count = pins(pages[start])
            stop = bisect_left(range(end), True, lo=start, key=lambda i: pins(pages[i]) < count)
            share += (stop - start) / count
            start = stop
        return share

    def _trim(self, request: PagedRequest) -> None:
        if request.hot_pages:
            self._unpin(request, self.first_needed(request))

    def _unpin(self, request: PagedRequest, end: int) -> None:
        # Last page first: it is reused first, and the head of a prefix is worth more than its tail.
        self.leases.unpin_all(request.pages[request.pin_start : end][::-1])
        request.pin_start = max(request.pin_start, end)
