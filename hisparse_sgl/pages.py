"""The life of a page: written, spilled, durable, restored, freed."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from hisparse_sgl.mem_pool.allocator import TokenToKVAllocator
from hisparse_sgl.mem_pool.leases import DeviceLeases
from hisparse_sgl.metrics import Counters, Histogram
from hisparse_sgl.transfer_queue import Completion, PageCopy, TransferQueue


class PageState(Enum):
    """Where the bytes of a host page are. Pinned, unpinned and host-only pages are all ``DURABLE``."""

    EMPTY = "empty"
    DIRTY = "dirty"
    SPILLING = "spilling"
    DURABLE = "durable"
    RESTORING = "restoring"


@dataclass(slots=True)
class Flight:
    """One transfer that is not over; it holds a host reference and a device pin of each page."""

    kind: str
    pages: list[int]
    started: float


class Pages:
    """States of all host pages and the transfers that change them.

    Pins of a device page, all counted by ``leases``: one for each running request that needs it, one while
    the page is not durable, one for each transfer in flight. The last one to go unpins the page.

    ``ordered_restores``: whoever reads the device waits for the restores started before, so a page counts as
    readable as soon as its restore has started, and a restore that fails cannot be taken back.
    ``tokens_per_row`` tokens share a row, so a page has fewer rows than the allocator's tokens.
    """

    def __init__(
        self,
        allocator: TokenToKVAllocator,
        leases: DeviceLeases,
        transfers: TransferQueue,
        counters: Counters,
        num_pages: int,
        eager_host_mirror: bool,
        on_lease: Callable[[list[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        ordered_restores: bool = False,
        tokens_per_row: int = 1,
    ) -> None:
        self.allocator = allocator
        self.tokens_per_row = tokens_per_row
        self.page_rows = allocator.page_size // tokens_per_row
        self.leases = leases
        self.transfers = transfers
        self.counters = counters
        self.eager_host_mirror = eager_host_mirror
        self.on_lease = on_lease
        self.clock = clock
        self.ordered_restores = ordered_restores
        self.states = [PageState.EMPTY] * num_pages
        self.num_dirty = 0
        self.unmirrored: set[int] = set()  # dirty pages of which the host lacks rows
        self.to_spill: OrderedDict[int, None] = OrderedDict()  # sealed dirty pages
        self.spill_ids: dict[int, int] = {}  # spilling page -> the transfer that makes it durable
        self.flights: dict[int, Flight] = {}
        self.peak_in_use = 0
        self.spill_seconds = Histogram()
        self.restore_seconds = Histogram()

    def is_durable(self, page: int) -> bool:
        return self.states[page] in (PageState.DURABLE, PageState.RESTORING)

    def is_unsettled(self, page: int) -> bool:
        """The page will be durable once its copies are through."""
        return page in self.to_spill or page in self.spill_ids

    def open(self, pages: list[int]) -> None:
        """Lease device pages for the first write to empty host pages."""
        used = [page for page in pages if self.states[page] is not PageState.EMPTY]
        assert not used, f"host pages {used} are not empty"
        self.peak_in_use = max(self.peak_in_use, len(self.states) - 1 - self.allocator.num_free)
        self.lease(pages)
        for page in pages:
            self._soil(page)

    def lease(self, pages: list[int], readable: bool = True) -> list[int]:
        """Resident device pages for these host pages, with one pin each."""
        device_pages = self.leases.lease_resident(pages, readable)
        if self.on_lease:
            self.on_lease(device_pages)
        return device_pages

    def lease_hot(self, n: int) -> list[int]:
        """Device pages for a hot region."""
        device_pages = self.leases.lease_hot(n)
        if self.on_lease:
            self.on_lease(device_pages)
        return device_pages

    def reopen(self, page: int) -> None:
        """Rows of a resident page are going to be written again (a rewind): it is not durable any more."""
        assert self.leases.is_resident(page), page
        if self.states[page] is PageState.DURABLE:
            self.leases.pin(page)
        self.spill_ids.pop(page, None)
        self.to_spill.pop(page, None)
        self._soil(page)

    def _set_state(self, page: int, state: PageState) -> None:
        self.num_dirty += (state is PageState.DIRTY) - (self.states[page] is PageState.DIRTY)
        self.states[page] = state

    def _soil(self, page: int) -> None:
        self._set_state(page, PageState.DIRTY)
        if not self.eager_host_mirror:
            self.unmirrored.add(page)

    def seal(self, page: int) -> None:
        """All rows of a dirty page are written; it will be spilled."""
        assert self.states[page] is PageState.DIRTY, (page, self.states[page])
        self.to_spill[page] = None

    def settle(self, pages: Sequence[int], start: int, end: int) -> list[int]:
        """Tokens [start, end) of a request with these pages are written: seal the pages that are full now.

        A row is written with the last of its tokens. Answers the row slots to be mirrored one by one.
        """
        start, end, size = start // self.tokens_per_row, end // self.tokens_per_row, self.page_rows
        mirrored: list[int] = []
        for index in range(start // size, -(-end // size)):
            page, first = pages[index], index * size
            low, high = max(start, first), min(end, first + size)
            if high - low == size:
                self.unmirrored.add(page)  # written in one go: one page copy instead of many rows
            else:
                mirrored += range(page * size + low - first, page * size + high - first)
            if high == first + size:
                self.seal(page)
        return mirrored

    def device_rows(self, slots: list[int]) -> list[int]:
        """Where the rows of resident pages, named by row slot, lie on the device."""
        size, resident = self.page_rows, self.leases.resident_page
        return [resident[slot // size] * size + slot % size for slot in slots]

    def mirror(self, slots: list[int]) -> None:
        """Copy freshly written rows of resident pages, named by row slot, to the host."""
        if not slots:
            return
        pages = list(dict.fromkeys([slot // self.page_rows for slot in slots]))
        try:
            transfer_id = self.transfers.mirror(slots, self.device_rows(slots))
        except BaseException:  # out of device memory, for one: the spill has to bring these rows
            self.unmirrored.update(pages)
            raise
        self._take_off("mirror", pages, transfer_id)

    def spill(self, budget: int) -> None:
        """Start to copy sealed dirty pages to the host, oldest first, up to ``budget`` at a time."""
        pages = list(islice(self.to_spill, max(0, budget - len(self.spill_ids))))
        if not pages:
            return
        copies = [PageCopy(p, self.leases.device_page_of(p), p in self.unmirrored) for p in pages]
        transfer_id = self.transfers.spill(copies)
        for page in pages:
            del self.to_spill[page]
            self._set_state(page, PageState.SPILLING)
            self.spill_ids[page] = transfer_id
            self.unmirrored.discard(page)
        self._take_off("spill", pages, transfer_id)

    def restore(self, pages: list[int]) -> None:
        """Lease device pages for durable host-only pages and start to copy them, in one transfer.

        When it cannot start, the pages are host-only as before.
        """
        if not pages:
            return
        lost = [page for page in pages if self.states[page] is not PageState.DURABLE]
        assert not lost, f"host pages {lost} are not durable"
        copies = list(map(PageCopy, pages, self.lease(pages, readable=self.ordered_restores)))
        for page in pages:
            self._set_state(page, PageState.RESTORING)
        try:
            transfer_id = self.transfers.restore(copies)
        except BaseException:
            for page in pages:
                self._set_state(page, PageState.DURABLE)
                self.leases.drop(page)
            raise
        # The lease's own pin is the one that the transfer holds.
        self._take_off("restore", pages, transfer_id, pin=False)

    def _take_off(self, kind: str, pages: list[int], transfer_id: int, pin: bool = True) -> None:
        self.allocator.share(pages)
        if pin:
            self.leases.pin_all(pages)
        self.flights[transfer_id] = Flight(kind, pages, self.clock())

    def land(self, completions: Iterable[Completion]) -> None:
        """Carry out what completed transfers mean for their pages."""
        for transfer_id, ok in completions:
            flight = self.flights.pop(transfer_id)
            if flight.kind == "mirror":
                self._land_mirror(flight, ok)
            elif flight.kind == "spill":
                self._land_spill(flight, transfer_id, ok)
            else:
                self._land_restore(flight, ok)

    def _land_mirror(self, flight: Flight, ok: bool) -> None:
        if not ok:
            self.counters.spill_failures += 1
            self.unmirrored.update(p for p in flight.pages if not self.is_durable(p))
        self._let_go(flight.pages)

    def _land_spill(self, flight: Flight, transfer_id: int, ok: bool) -> None:
        self.counters.spill_failures += not ok
        durable = []
        for page in flight.pages:
            if self.spill_ids.get(page) != transfer_id:  # rewound meanwhile: the copy is out of date
                if not ok:
                    self.unmirrored.add(page)
                continue
            del self.spill_ids[page]
            if ok and page not in self.unmirrored:
                self._set_state(page, PageState.DURABLE)
                durable.append(page)
            else:
                self._set_state(page, PageState.DIRTY)
                self.unmirrored.add(page)
                self.to_spill[page] = None
        self.counters.pages_spilled += len(durable)
        self.leases.unpin_all(durable)
        if ok:
            self.spill_seconds.observe(self.clock() - flight.started)
        self._let_go(flight.pages)

    def _land_restore(self, flight: Flight, ok: bool) -> None:
        if ok:
            self.restore_seconds.observe(self.clock() - flight.started)
            for page in flight.pages:
                self._set_state(page, PageState.DURABLE)
                self.counters.pages_restored += 1
                if not self.ordered_restores:
                    self.leases.make_readable(page)
            self._let_go(flight.pages)
            return
        self.counters.restore_failures += 1
        if self.ordered_restores:
            raise RuntimeError(
                f"the restore of host pages {flight.pages} failed after they may have been read"
            )
        wanted = [p for p in flight.pages if self.leases.pins(p) > 1]
        for page in set(flight.pages) - set(wanted):
            self._set_state(page, PageState.DURABLE)
            self.leases.drop(page)
            self.free([page])
        if wanted:
            # The bytes go to the same device pages: requests that wait for them keep their pins.
            copies = [PageCopy(p, self.leases.device_page_of(p)) for p in wanted]
            self.flights[self.transfers.restore(copies)] = Flight("restore", wanted, self.clock())

    def _let_go(self, pages: list[int]) -> None:
        self.leases.unpin_all(pages)
        self.free(pages)

    def free(self, pages: list[int]) -> None:
        """Drop one host reference of each page; a page nobody holds is empty and its device copy is gone."""
        for page in self.allocator.free(pages):
            self._bury(page)

    def _bury(self, page: int) -> None:
        if self.leases.device_page_of(page):
            self.leases.drop(page)
        self._set_state(page, PageState.EMPTY)
        self.unmirrored.discard(page)
        self.to_spill.pop(page, None)
        self.spill_ids.pop(page, None)

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if the count of dirty pages is not that of the states."""
        dirty = self.states.count(PageState.DIRTY)
        if dirty != self.num_dirty:
            raise RuntimeError(f"{dirty} pages are dirty, {self.num_dirty} counted")
