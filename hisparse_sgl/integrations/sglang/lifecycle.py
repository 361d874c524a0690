"""Slots, device pages and copies of the requests that SGLang schedules. Imports neither torch nor SGLang.

SGLang's own tree owns the pages that are published, a request owns the others; each page has one owner, who
frees it once. What SGLang decides (whom to admit, to retract, to evict) stays its own; here is what those
decisions need to know and what they cost on the device. Every decision is a function of the calls made and of
the completed transfers, so ranks that see the same of both decide alike (rule 8).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hisparse_sgl.config import ACTIVE_TAIL_PAGES, HiSparseConfig, Sizes
from hisparse_sgl.mem_pool.allocator import TokenToKVAllocator
from hisparse_sgl.mem_pool.leases import DeviceLeases
from hisparse_sgl.metrics import Counters
from hisparse_sgl.pages import Pages
from hisparse_sgl.requests import Deltas, PagedRequest
from hisparse_sgl.residency import Residency
from hisparse_sgl.transfer_queue import TransferQueue


@dataclass(slots=True, eq=False, kw_only=True)
class ServedRequest(PagedRequest):
    """A request from its admission to the release of its row. ``row`` is -1 until SGLang gives it one."""

    req: Any  # SGLang's Req
    num_tokens: int  # slots handed out
    num_durable: int  # leading pages known to be durable
    released: bool = False  # holds nothing on the device any more


class Lifecycle:
    """Owns the pages; ``requests`` by SGLang's request id, ``rows`` the same by their row of req_to_token.

    Args:
        config: sizes and policies; ``max_requests`` counts the rows of req_to_token.
        page_size: tokens a page.
        transfers: the copies in flight.
        counters, extent_pages, on_lease, clock: as for ``hisparse_sgl.coordinator.Coordinator``.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        page_size: int,
        transfers: TransferQueue,
        counters: Counters,
        extent_pages: int = 1,
        on_lease: Callable[[list[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.page_size = page_size
        self.sizes = Sizes.of(config, page_size)
        self.transfers = transfers
        self.counters = counters
        self.allocator = TokenToKVAllocator(config.host_pages, page_size, extent_pages)
        self.leases = DeviceLeases(config.device_pages, config.host_pages)
        self.pages = Pages(
            self.allocator,
            self.leases,
            transfers,
            counters,
            config.host_pages,
            config.eager_host_mirror,
            on_lease,
            clock,
            ordered_restores=True,
        )
        self.deltas = Deltas()
        self.residency = Residency(self.pages, self.leases, self.sizes, self.deltas)
        self.requests: dict[str, ServedRequest] = {}
        self.rows: dict[int, ServedRequest] = {}
        self.num_admitted = 0
        self.evict: Callable[[int], int] = lambda pages: 0
        """Ask the tree to free that many pages; answers how many it freed."""
        self.give_up: Callable[[], bool] = lambda: False
        """Give up the oldest publication that still waits for copies; False if there is none."""
        self.evictable_pages: Callable[[], int] = lambda: 0

    @property
    def num_evictable(self) -> int:
        return self.evictable_pages()

    @property
    def available_tokens(self) -> int:
        """Tokens for which there are host pages, those promised to running prompts left out."""
        return max(0, self.allocator.num_free - self.residency.promised_host) * self.page_size

    @property
    def host_room(self) -> int:
        """Tokens that SGLang can hand out, pages of the tree included. Those of a request that has left come
        back after their copies."""
        return self.available_tokens + self.num_evictable * self.page_size

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that this pool can serve.

        It must fit the device once, because after a retraction all of it is computed again, and a hot region
        and a page to grow must fit beside it.
        """
        device = self.config.device_pages - 1 - self.sizes.hot_pages - 1
        return min(self.config.context_len, min(device, self.config.host_pages - 1) * self.page_size)

    def has_room(self, prefix: Sequence[int], prompt_tokens: int) -> bool:
        """Whether a prompt with this cached prefix can be on the device. May give others hot regions.

        Besides its own pages there must be room for the others to go on: a step of each and the next hot
        regions. Nothing of it is waited for.
        """
        return self._make_room(len(prefix), prompt_tokens, lambda: self.residency.cost(prefix))

    def has_room_beside(self, prefix_pages: int, prompt_tokens: int) -> bool:
        """The same if the prefix took none: where this is False, nobody need look for its pages."""
        return self._make_room(prefix_pages, prompt_tokens, lambda: 0)

    def _make_room(self, prefix_pages: int, prompt_tokens: int, cost: Callable[[], int]) -> bool:
        """Giving hot regions changes the target: it can unpin or reuse pages of the prompt's own prefix,
        which is ``cost``, and for those who hold one none is kept."""

        def target() -> int:
            return self._pages_beside(prefix_pages, prompt_tokens) + cost()

        if self._over_window(prompt_tokens):
            return False
        residency = self.residency
        while residency.available < target():
            if not residency.relieve(target(), self.requests.values()):
                return residency.available >= target()
        return True

    def _pages_beside(self, prefix_pages: int, prompt_tokens: int) -> int:
        growing = any(not r.hot_pages for r in self.requests.values())
        room = len(self.requests) + self.sizes.hot_pages * (2 if growing else 1)
        return self._num_pages(prompt_tokens) - prefix_pages + room

    def room(self) -> tuple[int, ...]:
        """What an answer of ``has_room`` depends on: as long as this stays the same, so does the answer."""
        residency, counters = self.residency, self.counters
        prefilling = sum(request.prefilling for request in self.requests.values())
        durable = counters.pages_spilled + counters.pages_restored
        return residency.available, len(residency.free_regions), len(self.requests), prefilling, durable

    def admit(self, rid: str, req: Any, prefix: Sequence[int], prompt_tokens: int) -> ServedRequest:
        """Let a request in: pin its prefix, start to restore what is missing, keep room for the prompt.

        The tree holds the prefix. ``has_room`` was just answered with True.
        """
        assert rid not in self.requests, f"request {rid} is admitted twice"
        cached = len(prefix) * self.page_size
        request = ServedRequest(
            row=-1,
            order=self.num_admitted,
            prompt_tokens=prompt_tokens,
            pages=list(prefix),
            num_settled=cached,
            pin_start=len(prefix),
            req=req,
            num_tokens=cached,
            num_durable=len(prefix),
        )
        self.num_admitted += 1
        self.residency.promise(request, self._num_pages(prompt_tokens) - len(prefix))
        self.residency.pin(request)
        self.requests[rid] = request
        self.counters.prefix_query_tokens += prompt_tokens
        self.counters.prefix_hit_tokens += cached
        return request

    def bind(self, request: ServedRequest, row: int) -> None:
        """SGLang gave the request its row of req_to_token."""
        if request.row == row:
            return
        assert request.row < 0 and row not in self.rows, f"row {row} of a second request"
        request.row = row
        self.rows[row] = request
        if request.pages:
            self.deltas.page_runs.append((row, 0, list(request.pages)))

    def extend(self, request: ServedRequest, end: int) -> np.ndarray | None:
        """Slots int64 of positions [num_tokens, end); None, and nothing changed, if host pages lack."""
        start = request.num_tokens
        if not self._open_pages(request, end):
            return None
        request.num_tokens = end
        return self.allocator.slots(request.pages, start, end)

    def _open_pages(self, request: ServedRequest, end: int) -> bool:
        """Hand out the pages that ``end`` tokens need. False, and nothing changed, if host pages lack."""
        held = len(request.pages)
        needed = self.allocator.pages_needed(end, 0, held)
        if not needed:
            return True
        if not self.make_host_room(needed, own=min(needed, request.promised)):
            return False
        assert self.leases.num_free >= needed, f"{needed} device pages were promised"
        grown = self.allocator.grow(request.pages, end)
        assert grown, f"{needed} host pages are free"
        self.residency.open_pages(request, held)
        self.deltas.page_runs.append((request.row, held, request.pages[held:]))
        return True

    def can_grow(self, requests: Iterable[ServedRequest]) -> bool:
        """Whether each of these can take one more token. Waits for copies, because else one is retracted."""
        size = self.page_size
        growing = [r for r in requests if r.num_tokens == len(r.pages) * size]
        if not growing:
            self.residency.relieve(self.sizes.transition_watermark, self.requests.values())
            return True
        if not self.make_host_room(len(growing)):
            return False
        # Yield before the last pages go: a hot region can only be given while one still fits.
        self.residency.relieve(len(growing) + self.sizes.transition_watermark, self.requests.values())
        for _ in range(self._worth_waiting() + 1):
            if all(self.residency.has_room(request, len(growing)) for request in growing):
                return True
            if not self.wait():
                break
        return False

    def grow(self, requests: Iterable[ServedRequest]) -> list[int]:
        """The slots of one more token of each, after ``can_grow``."""
        size, slots = self.page_size, []
        for request in requests:
            position = request.num_tokens
            if position < len(request.pages) * size:
                request.num_tokens = position + 1
                slots.append(request.pages[position // size] * size + position % size)
            else:
                opened = self._open_pages(request, position + 1)
                assert opened, f"no host page for row {request.row}, which can_grow promised"
                request.num_tokens = position + 1
                slots.append(request.pages[-1] * size)
        return slots

    def make_host_room(self, pages: int, own: int = 0) -> bool:
        """Free host pages until ``pages`` of them are free besides promised ones; ``own`` are the caller's.

        Evicts prefixes, then gives up publications that wait for copies, then waits for copies that hold
        pages nobody else wants.
        """

        def missing() -> int:
            return pages - own + self.residency.promised_host - self.allocator.num_free

        while missing() > 0:
            if not (self.evict(missing()) or self.give_up() or self.wait()):
                return False
        return True

    def settle(self, launched: Iterable[tuple[ServedRequest, int]]) -> list[int]:
        """A forward that writes the rows of each request up to an end was launched; answers the slots to
        mirror one by one. Requests that were released since are left out.

        Copies started from now on run behind that forward.
        """
        size, mirrored = self.page_size, []
        for request, end in launched:
            start = request.num_settled
            if request.released:
                continue
            if end == start + 1 and end % size:  # a decode step that fills no page
                request.num_settled = end
                mirrored.append(request.pages[start // size] * size + start % size)
            else:
                request.num_settled = max(start, end)
                mirrored += self.pages.settle(request.pages, start, end)
        return mirrored

    def collect(self, poll: bool = True) -> None:
        """Take in completed transfers if ``poll``, start spills, yield if few device pages are free."""
        if poll and self.pages.flights:
            self.pages.land(self.transfers.poll())
        self.pages.spill(self.sizes.spill_budget)
        self.residency.relieve(self.sizes.transition_watermark, self.requests.values())

    def wait(self) -> bool:
        """Block for the oldest transfer in flight. False if there is none."""
        self.pages.spill(self.sizes.spill_budget)
        if not self.pages.flights:
            return False
        self.pages.land(self.transfers.wait())
        return True

    def num_durable(self, request: ServedRequest) -> int:
        """Leading pages of the request that are durable."""
        sealed = request.num_settled // self.page_size
        while request.num_durable < sealed and self.pages.is_durable(request.pages[request.num_durable]):
            request.num_durable += 1
        return request.num_durable

    def release(self, request: ServedRequest) -> None:
        """Give back what the request holds on the device; its pages are still its own."""
        if not request.released:
            self.residency.release(request)
            request.released = True

    def forget(self, rid: str) -> None:
        """The request's row is given back, and so were the pages it owned."""
        request = self.requests.pop(rid)
        self.release(request)
        if request.row >= 0:
            del self.rows[request.row]
            self.deltas.page_runs.append((request.row, 0, [0] * len(request.pages)))

    def clear(self) -> None:
        """Free every page, after the copies in flight. ``RuntimeError`` while requests run."""
        if self.requests:
            raise RuntimeError(f"the pool is cleared while requests {sorted(self.requests)} hold pages of it")
        while self.pages.flights:
            self.pages.land(self.transfers.wait())
        self.pages.free([page for page, count in enumerate(self.allocator.pool.ref_counts) if page and count])

    def take_deltas(self) -> Deltas:
        """What the device tables must learn before the next forward."""
        return self.deltas.take(self.leases.take_deltas())

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if the records contradict each other."""
        self.allocator.check_integrity()
        self.leases.check_integrity()
        self.pages.check_integrity()
        promised = sum(request.promised for request in self.requests.values())
        if promised != self.residency.promised_host:
            raise RuntimeError(f"requests were promised {promised} pages, not {self.residency.promised_host}")
        for rid, request in self.requests.items():
            if request.row >= 0 and self.rows.get(request.row) is not request:
                raise RuntimeError(f"row {request.row} of request {rid} belongs to another one")
            if len(request.pages) != self._num_pages(request.num_tokens):
                raise RuntimeError(f"request {rid}: {len(request.pages)} pages, {request.num_tokens} tokens")
            pinned = [] if request.released else request.pages[request.pin_start :]
            loose = [page for page in pinned if not self.leases.is_pinned(page)]
            if loose:
                raise RuntimeError(f"request {rid} pins host pages {loose}, which are not on the device")
            if request.hot_pages and len(request.pages) - request.pin_start > ACTIVE_TAIL_PAGES:
                raise RuntimeError(f"request {rid} holds a hot region and pins from page {request.pin_start}")

    def _worth_waiting(self) -> int:
        """How many copies to wait for at most: those in flight, and one for each page not durable yet."""
        return len(self.pages.flights) + len(self.pages.to_spill) + len(self.pages.spill_ids)

    def _over_window(self, prompt_tokens: int) -> bool:
        """Too many prompt tokens are admitted and not prefilled; one prompt is always let in."""
        window = self.config.admission_window
        unsettled = sum(r.prompt_tokens for r in self.requests.values() if r.prefilling)
        return window is not None and unsettled > 0 and unsettled + prompt_tokens > window

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
