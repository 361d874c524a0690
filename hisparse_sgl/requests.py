"""Records of the coordinator: a running request, what a call answers, and what the device must learn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hisparse_sgl.radix.gate import Publication
from hisparse_sgl.radix.page_hash import PageHasher


class Admission(NamedTuple):
    """A request was let in; its first ``cached_tokens`` tokens need no prefill.

    ``hot``: the prompt is too large to lie on the device, so the request starts with a hot region. The rest
    of the prompt is computed like decoding: through ``swap_in``, at most ``query_rows`` tokens a step.

    Of a layout that keeps state for each request (``KVLayout.needs_state``), ``state`` is what was kept for
    the boundary behind the cached tokens; other requests may get the same object, so only read it.
    ``shortened_tokens`` more tokens were found, and cannot be used because no state was kept behind them.
    """

    cached_tokens: int
    resident_tokens: int  # of these, on the device already
    hot: bool = False
    state: Any = None
    shortened_tokens: int = 0

    def __repr__(self) -> str:
        # A state may be all of a sliding window: not something to print.
        shortened = f", shortened_tokens={self.shortened_tokens}" if self.shortened_tokens else ""
        cached = f"cached_tokens={self.cached_tokens}, resident_tokens={self.resident_tokens}"
        return f"Admission({cached}, hot={self.hot}{shortened})"


class Deferred(NamedTuple):
    """Not now: nothing was changed. Run other requests and ask again, or retract one.

    ``reason`` is one of "request rows", "admission window", "host pages", "device pages", "restoring".
    """

    reason: str


@dataclass(slots=True, eq=False, kw_only=True)
class PagedRequest:
    """Pages of one running request. ``pages[pin_start:]`` are pinned on the device by this request.

    ``num_settled`` counts the rows that finished forwards wrote; ``promised`` host pages are kept for the
    part of the prompt whose pages are not handed out yet.
    """

    row: int  # its row in the device tables
    order: int  # position in the order of admission
    prompt_tokens: int
    pages: list[int]
    num_settled: int
    pin_start: int = 0
    restoring: list[int] = field(default_factory=list)  # pinned pages whose bytes are on their way
    promised: int = 0
    hot_pages: list[int] = field(default_factory=list)  # empty: fully resident
    region: int = -1  # number of its hot region, -1: none

    @property
    def prefilling(self) -> bool:
        return self.num_settled < self.prompt_tokens

    @property
    def promised_device(self) -> int:
        """Device pages kept for the rest of the prompt: none if it is computed out of a hot region."""
        return 0 if self.hot_pages else self.promised


@dataclass(slots=True, eq=False, kw_only=True)
class Request(PagedRequest):
    """One running request of the engine-neutral pool, with what it publishes."""

    rid: str
    hasher: PageHasher
    publication: Publication
    num_tokens: int  # slots handed out
    num_started: int = 0  # rows that the open step counts as written when it is over


@dataclass(slots=True)
class Deltas:
    """What changed since the last step and must reach the device tables before the next one.

    ``residency`` maps host page -> device page (0: none). ``page_runs`` are (row, first, host pages) pieces
    of the page table. ``hot_regions`` maps row -> (region, device pages), or (-1, []) for none; each region
    named there starts empty. ``rewritten`` are (region, row slot) pairs whose hot copies are stale.
    """

    residency: dict[int, int] = field(default_factory=dict)
    page_runs: list[tuple[int, int, list[int]]] = field(default_factory=list)
    hot_regions: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    rewritten: list[tuple[int, int]] = field(default_factory=list)

    def take(self, residency: dict[int, int]) -> Deltas:
        """Everything so far together with the residency changes; empties this record."""
        taken = Deltas(residency, self.page_runs, self.hot_regions, self.rewritten)
        self.page_runs, self.hot_regions, self.rewritten = [], {}, []
        return taken
