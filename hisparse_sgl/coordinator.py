"""The page life cycle of all requests: admission, growth, pressure, publication. Imports no torch.

Every decision is a function of the calls made and of the completed transfers, so ranks that see the same of
both decide alike (rule 8).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence

from hisparse_sgl.admission import AdmissionControl
from hisparse_sgl.config import ACTIVE_TAIL_PAGES, HiSparseConfig, Sizes
from hisparse_sgl.mem_pool.allocator import TokenToKVAllocator
from hisparse_sgl.mem_pool.leases import DeviceLeases
from hisparse_sgl.metrics import Counters
from hisparse_sgl.pages import Pages
from hisparse_sgl.radix.events import EventLog
from hisparse_sgl.radix.gate import PublicationGate
from hisparse_sgl.radix.page_hash import ExtraKey, PageHasher, TokenIds
from hisparse_sgl.radix.tree import Match, PrefixTree
from hisparse_sgl.requests import Admission, Deferred, Deltas, Request
from hisparse_sgl.residency import Residency
from hisparse_sgl.transfer_queue import TransferQueue


class Coordinator:
    """Owns the requests; ``pages``, ``residency``, ``tree`` and ``gate`` own the rest of the state.

    Counts tokens and pages of ``page_size`` tokens; ``tokens_per_row`` of them share a row. With
    ``needs_state`` a prefix is used up to the last page only at whose end a state was kept.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        page_size: int,
        transfers: TransferQueue,
        counters: Counters | None = None,
        extent_pages: int = 1,
        on_lease: Callable[[list[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tokens_per_row: int = 1,
        needs_state: bool = False,
    ) -> None:
        self.config = config
        self.sizes = Sizes.of(config, page_size, tokens_per_row)
        self.page_size = page_size
        self.tokens_per_row = tokens_per_row
        self.needs_state = needs_state
        self.counters = counters or Counters()
        self.transfers = transfers
        self.allocator = TokenToKVAllocator(config.host_pages, page_size, extent_pages)
        self.leases = DeviceLeases(config.device_pages, config.host_pages)
        self.pages = Pages(
            self.allocator,
            self.leases,
            transfers,
            self.counters,
            config.host_pages,
            config.eager_host_mirror,
            on_lease,
            clock,
            tokens_per_row=tokens_per_row,
        )
        self.deltas = Deltas()
        self.residency = Residency(self.pages, self.leases, self.sizes, self.deltas)
        self.events = EventLog(enabled=config.kv_events)
        self.tree = PrefixTree(
            page_size, config.eviction_policy, is_resident=self.leases.is_resident, events=self.events
        )
        self.admission = AdmissionControl(
            config, self.sizes, self.allocator, self.tree, self.pages, self.residency
        )
        self.gate = PublicationGate(
            self.tree, self.pages.is_durable, lambda page: self.allocator.share([page])
        )
        self.requests: dict[str, Request] = {}
        self.free_rows = list(range(config.max_requests))
        self.num_admitted = 0

    def admit(self, rid: str, token_ids: TokenIds, extra_key: ExtraKey = None) -> Admission | Deferred:
        """Let a request in with its longest durable prefix, pinned.

        The prefix is whole pages and leaves at least one token to compute. Those that are not on the
        device start to be restored; ``extend`` is deferred until they are.
        """
        if rid in self.requests:
            raise ValueError(
                f"rid {rid!r} is running already: finish, abort or retract it, or use another id"
            )
        self.admission.check_prompt(len(token_ids))
        hasher = PageHasher(self.page_size, extra_key)
        hasher.extend(token_ids)
        outcome = self._try_admit(rid, hasher)
        for _ in range(0 if self.requests else self._worth_waiting()):
            if isinstance(outcome, Admission) or not self.wait():
                break  # else nothing runs that could give pages back, besides the copies in flight
            outcome = self._try_admit(rid, hasher)
        if isinstance(outcome, Deferred):
            self.counters.deferred_admissions += 1
        else:
            self.counters.prefix_query_tokens += len(token_ids)
            self.counters.prefix_hit_tokens += outcome.cached_tokens
        return outcome

    def extend(self, rid: str, n: int) -> list[int] | Deferred:
        """Slots for the next ``n`` tokens; new pages are leased resident. Deferred changes nothing."""
        request = self.request(rid)
        self._check_growth(request, n)
        reason = self._unready(request) or self._cannot_grow(request, n)
        for _ in range(self._worth_waiting()):
            if reason not in ("host pages", "device pages") or not self.wait():
                break
            reason = self._unready(request) or self._cannot_grow(request, n)
        if reason:
            return Deferred(reason)
        if request.num_tokens % self.page_size:
            self.pages.reopen(request.pages[-1])
        held = len(request.pages)
        slots = self.allocator.extend(request.pages, request.num_tokens, n)
        assert slots is not None
        request.num_tokens += n
        self.residency.open_pages(request, held)
        if len(request.pages) > held:
            self.deltas.page_runs.append((request.row, held, request.pages[held:]))
        return slots

    def append_tokens(self, rid: str, token_ids: TokenIds) -> None:
        """Tell which tokens follow the ones known so far: a page is published once its tokens are known."""
        request = self.request(rid)
        known = request.hasher.num_tokens + len(token_ids)
        if known > self.config.context_len:
            raise ValueError(
                f"token_ids brings rid {rid!r} to {known} tokens, the limit is context_len "
                f"{self.config.context_len}: finish the request or raise context_len"
            )
        request.hasher.extend(token_ids)

    def rewind(self, rid: str, num_tokens: int) -> None:
        """Take back all tokens after the first ``num_tokens``: rejected drafts, or rows to be written again.

        Published tokens cannot be taken back. The token ids behind ``num_tokens`` are forgotten too, unless
        nothing is taken back. The hot copies of the slots taken back are invalidated.
        """
        request = self.request(rid)
        least = max(1, request.publication.published * self.page_size)
        if not least <= num_tokens <= request.num_tokens:
            raise ValueError(
                f"num_tokens is {num_tokens} for rid {rid!r}, it must be between {least} (published) and "
                f"{request.num_tokens} (tokens it has)"
            )
        if num_tokens == request.num_tokens:
            return
        if request.hot_pages:
            taken = range(num_tokens // self.tokens_per_row, request.num_tokens // self.tokens_per_row)
            self.deltas.rewritten += [(request.region, self._row_slot(request, row)) for row in taken]
        self.gate.drop_states(request.publication, num_tokens // self.page_size)
        request.num_tokens = num_tokens
        request.num_settled = min(request.num_settled, num_tokens)
        request.num_started = min(request.num_started, num_tokens)
        if request.hasher.num_tokens > num_tokens:
            request.hasher.truncate(num_tokens)
        kept = -(-num_tokens // self.page_size)
        gone = self.residency.cut(request, kept)
        if gone:
            self.deltas.page_runs.append((request.row, kept, [0] * len(gone)))
        self.pages.free(gone)

    def keep_state(self, rid: str, num_tokens: int, state: object) -> None:
        """Keep the engine's state behind the first ``num_tokens`` tokens, a page boundary, with that page."""
        request = self.request(rid)
        if not 0 < num_tokens <= request.num_tokens or num_tokens % self.page_size:
            raise ValueError(
                f"num_tokens is {num_tokens} for rid {rid!r}, it must be a multiple of {self.page_size} (a "
                f"page) in {self.page_size}..{request.num_tokens} (tokens it has)"
            )
        self.gate.keep_state(request.publication, num_tokens // self.page_size - 1, state)

    def begin_step(self, requests: Sequence[Request]) -> None:
        """A forward starts that writes the rows of all tokens these requests have now."""
        for request in requests:
            request.num_started = request.num_tokens

    def step_done(self, requests: Sequence[Request]) -> None:
        """The forward of these requests is over: what they had at its begin and still have is written.

        Requests that have ended since are passed over.
        """
        mirrored: list[int] = []
        for request in requests:
            if self.requests.get(request.rid) is request:
                mirrored += self._settle(request, request.num_started)
        if self.config.eager_host_mirror:
            self.pages.mirror(mirrored)
        self.collect()

    def collect(self) -> None:
        """Take in completed transfers, start spills, publish what is durable, yield if few pages are free."""
        self.pages.land(self.transfers.poll())
        self._advance()

    def wait(self) -> bool:
        """Block for the oldest transfer in flight. False if there is none."""
        if not self.pages.flights:
            return False
        self.pages.land(self.transfers.wait())
        self._advance()
        return True

    def finish(self, rid: str) -> None:
        """The request is complete. Its whole pages are published, now or when their copies are through."""
        request = self.request(rid)
        sealed = request.num_settled // self.page_size
        unsettled = any(self.pages.is_unsettled(page) for page in request.pages[:sealed])
        kept = 0
        if self.gate.finish(request.publication, sealed, waiting=unsettled):
            self.counters.detached_publications += 1
            kept = len(request.publication.pages)
        self._leave(request)
        self.pages.free(request.pages[kept:])

    def retract(self, rid: str) -> None:
        """Take a running request back. Its durable prefix is published: its next admission finds it."""
        request = self.request(rid)
        self.gate.advance(request.publication, request.num_settled // self.page_size)
        self.counters.retractions += 1
        self._drop(request)

    def abort(self, rid: str) -> None:
        """End a request whose result nobody wants; nothing more of it is published."""
        self._drop(self.request(rid))

    def flush(self) -> None:
        """Forget every prefix. Running requests go on, with empty hot regions, and are not published."""
        flushed = self.gate.flush()
        self.pages.free(flushed.tree_pages)
        for publication in flushed.detached:
            self.pages.free(publication.pages)
        for request in self.requests.values():
            if request.hot_pages:
                self.deltas.hot_regions[request.row] = (request.region, request.hot_pages)

    def take_deltas(self) -> Deltas:
        """What the device tables must learn before the next forward."""
        return self.deltas.take(self.leases.take_deltas())

    @property
    def num_evictable(self) -> int:
        """Host pages that only the prefix tree holds."""
        return self.tree.num_evictable

    def request(self, rid: str) -> Request:
        """The running request of that id; ``ValueError`` if there is none."""
        if rid not in self.requests:
            raise ValueError(
                f"rid {rid!r} is not running: it was never admitted, or it has ended. Admit it first"
            )
        return self.requests[rid]

    def _check_growth(self, request: Request, n: int) -> None:
        most = self.config.context_len
        if n < 1:
            raise ValueError(
                f"n is {n} for rid {request.rid!r}, the limit is at least 1: extend by new tokens"
            )
        if request.num_tokens + n > most:
            raise ValueError(
                f"n is {n} for rid {request.rid!r} with {request.num_tokens} tokens, the limit is "
                f"{most - request.num_tokens} (context_len {most}): finish the request or raise context_len"
            )
        needed = self.allocator.pages_needed(request.num_tokens, n, len(request.pages))
        limit = self.config.device_pages - 1 - self.sizes.hot_pages - ACTIVE_TAIL_PAGES
        if needed - request.promised_device > limit:
            raise ValueError(
                f"n is {n} for rid {request.rid!r}: {needed} new pages, the limit of this pool is {limit} at "
                "once. Extend in smaller pieces, each with its own forward, or raise device_pages"
            )

    def _worth_waiting(self) -> int:
        """How many copies to wait for at most: those in flight, and one for each page not durable yet."""
        return len(self.pages.flights) + len(self.pages.to_spill) + len(self.pages.spill_ids)

    def _try_admit(self, rid: str, hasher: PageHasher) -> Admission | Deferred:
        hashes = hasher.hashes[: (hasher.num_tokens - 1) // self.page_size]
        found = self.tree.peek(hashes)
        match = self.tree.resumable(found) if self.needs_state else found
        self.tree.lock(match.node)
        try:
            reason = self.admission.lacks(match, hasher.num_tokens, self.requests)
            if reason:
                return Deferred(reason)
            used = hashes[: len(match.pages)]
            self.tree.match(used)  # counts as a use, which a deferred admission must not
            num_resident = sum(map(self.leases.is_resident, match.pages))
            request = self._enter(rid, hasher, match)
            return Admission(
                request.num_tokens,
                num_resident * self.page_size,
                bool(request.hot_pages),
                match.node.state,
                (len(found.pages) - len(match.pages)) * self.page_size,
            )
        finally:
            self.tree.unlock(match.node)

    def _enter(self, rid: str, hasher: PageHasher, match: Match) -> Request:
        pages = list(match.pages)
        cached = len(pages) * self.page_size
        request = Request(
            rid=rid,
            row=heapq.heappop(self.free_rows),
            order=self.num_admitted,
            prompt_tokens=hasher.num_tokens,
            hasher=hasher,
            publication=self.gate.open(rid, pages, hasher, match),
            pages=pages,
            num_tokens=cached,
            num_settled=cached,
            pin_start=len(pages),
        )
        self.num_admitted += 1
        self.requests[rid] = request
        self.allocator.share(pages)
        if self.admission.is_hot(request.prompt_tokens):
            self.residency.give_hot(request)
        self.residency.promise(request, -(-request.prompt_tokens // self.page_size) - len(pages))
        try:
            self.residency.pin(request)
        except BaseException:  # a restore that cannot start: the request was never here
            self._drop(request)
            raise
        self.deltas.page_runs.append((request.row, 0, list(pages)))
        return request

    def _unready(self, request: Request) -> str | None:
        if self.residency.is_ready(request):
            return None
        self.collect()
        if self.residency.is_ready(request):
            return None
        unpinned = request.pages[self.residency.first_needed(request) : request.pin_start]
        # Giving hot regions can unpin or reuse these very pages.
        while self.residency.available < self.residency.cost(unpinned):
            if not self.residency.relieve(self.residency.cost(unpinned), self.requests.values()):
                return "device pages"
        self.residency.pin(request)
        return None if self.residency.is_ready(request) else "restoring"

    def _cannot_grow(self, request: Request, n: int) -> str | None:
        needed = self.allocator.pages_needed(request.num_tokens, n, len(request.pages))
        extra = max(0, needed - request.promised_device)
        if extra == 0 and min(self.leases.num_free, self.allocator.num_free) >= needed:
            return None
        if not self.admission.make_host_room(max(0, needed - request.promised)):
            return "host pages"
        # Yield before the last pages go: a hot region can only be given while one still fits.
        self.residency.relieve(extra + self.sizes.transition_watermark, self.requests.values())
        return None if self.residency.has_room(request, extra) else "device pages"

    def _row_slot(self, request: Request, row: int) -> int:
        page, offset = divmod(row, self.sizes.page_rows)
        return request.pages[page] * self.sizes.page_rows + offset

    def _settle(self, request: Request, end: int) -> list[int]:
        start = request.num_settled
        request.num_settled = max(start, end)
        return self.pages.settle(request.pages, start, end)

    def _advance(self) -> None:
        self.pages.spill(self.sizes.spill_budget)
        for request in self.requests.values():
            self.gate.advance(request.publication, request.num_settled // self.page_size)
        for publication in self.gate.advance_detached():
            self.pages.free(publication.pages)
        self.residency.relieve(self.sizes.transition_watermark, self.requests.values())

    def _leave(self, request: Request) -> None:
        self.residency.release(request)
        self.deltas.page_runs.append((request.row, 0, [0] * len(request.pages)))
        del self.requests[request.rid]
        heapq.heappush(self.free_rows, request.row)

    def _drop(self, request: Request) -> None:
        self.gate.cancel(request.publication)
        self._leave(request)
        self.pages.free(request.pages)
