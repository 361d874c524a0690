"""The pool to replay against: model, sizes in GiB or pages, policy; and the coordinator of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isqrt

from hisparse_sgl.config import MAX_HOT_ROWS, HiSparseConfig
from hisparse_sgl.coordinator import Coordinator
from hisparse_sgl.replay.clock import Clock, Rates, SimulatedTransfers
from hisparse_sgl.replay.sequences import Sequences

GIB = 1 << 30
MAX_PAGES = 1 << 24
MAX_REQUESTS = 1 << 20


@dataclass(frozen=True)
class Model:
    """What one token costs and what one query row selects; the defaults are GLM-5.x with fp8 rows."""

    layers: int = 78
    row_bytes: int = 656
    top_k: int = 2048
    hot_rows: int = 4096

    def __post_init__(self) -> None:
        for name in ("layers", "row_bytes", "top_k", "hot_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1: correct it")
        if self.hot_rows < self.top_k:
            raise ValueError(
                f"hot_rows is {self.hot_rows}, one step selects top_k = {self.top_k} rows: raise hot_rows"
            )
        if self.hot_rows > MAX_HOT_ROWS:
            raise ValueError(f"hot_rows is {self.hot_rows}, the limit is {MAX_HOT_ROWS}: lower it")

    @property
    def token_bytes(self) -> int:
        return self.layers * self.row_bytes


@dataclass(frozen=True)
class Size:
    """Size of one pool: ``gib`` or ``pages``; neither means unlimited."""

    gib: float | None = None
    pages: int | None = None

    def __post_init__(self) -> None:
        if self.gib is not None and not 0 < self.gib < 1 << 30:
            raise ValueError(
                f"a size of {self.gib:g} GiB holds nothing or has no end: "
                f"give a number over 0 and below {1 << 30}"
            )
        if self.pages is not None and self.pages < 1:
            raise ValueError(f"a size of {self.pages} pages holds nothing: give at least 1, or 'unlimited'")

    @property
    def is_unlimited(self) -> bool:
        return self.gib is None and self.pages is None

    def count(self, page_bytes: int) -> int | None:
        """Pages of that size; None if unlimited."""
        return self.pages if self.gib is None else int(self.gib * GIB) // page_bytes


@dataclass(frozen=True)
class Setup:
    """Everything but the trace that decides a replay's outcome. Pages are blocks of the trace."""

    model: Model = field(default_factory=Model)
    rates: Rates = field(default_factory=Rates)
    host: Size = field(default_factory=lambda: Size(gib=256.0))
    device: Size = field(default_factory=lambda: Size(gib=24.0))
    policy: str = "lru"
    max_requests: int = 256
    slowdown: float = 1.0
    timed: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.slowdown < 1e9:
            raise ValueError(
                f"slowdown is {self.slowdown:g}, it must be positive: give 1 for the trace's pace"
            )
        if self.max_requests > MAX_REQUESTS:
            raise ValueError(f"max_requests is {self.max_requests}, the limit is {MAX_REQUESTS}: lower it")


@dataclass(frozen=True)
class Engine:
    """A coordinator with its clock and copies. One of its tokens is one block of the trace, so is a page."""

    coordinator: Coordinator
    clock: Clock
    transfers: SimulatedTransfers
    page_bytes: int


def pool_pages(setup: Setup, sequences: Sequences) -> tuple[int | None, int | None]:
    """Pages of the host and the device pool; None for an unlimited one."""
    page_bytes = sequences.block_size * setup.model.token_bytes
    return setup.host.count(page_bytes), setup.device.count(page_bytes)


def make_engine(setup: Setup, sequences: Sequences) -> Engine:
    """An empty engine for the trace of ``sequences``; ``ValueError`` where a size cannot work."""
    block, model = sequences.block_size, setup.model
    page_bytes = block * model.token_bytes
    config = _config(setup, sequences, page_bytes)
    to_host = to_device = 0.0
    if setup.timed:
        to_host = setup.rates.page_seconds(page_bytes, model.layers, to_host=True)
        to_device = setup.rates.page_seconds(page_bytes, model.layers, to_host=False)
    clock = Clock()
    transfers = SimulatedTransfers(clock, page_bytes, 1, to_host, to_device)
    coordinator = Coordinator(
        config,
        page_size=1,
        transfers=transfers,
        extent_pages=max(1, isqrt(config.host_pages)),  # only how fast a free page is found
        clock=lambda: clock.now,
    )
    return Engine(coordinator, clock, transfers, page_bytes)


def _config(setup: Setup, sequences: Sequences, page_bytes: int) -> HiSparseConfig:
    block, model = sequences.block_size, setup.model
    hot_pages = -(-model.hot_rows // block)
    host, device = pool_pages(setup, sequences)
    longest = sequences.most_pages
    if host is None:
        host = sequences.num_pages + setup.max_requests
    if host < longest:
        raise ValueError(
            f"the host pool holds {host} pages, the longest request of the trace has {longest}: "
            f"give at least {longest * page_bytes / GIB:.1f} GiB"
        )
    for pool, pages in (("host", host), ("device", device or 0)):
        if pages > MAX_PAGES:
            raise ValueError(
                f"the {pool} pool holds {pages} pages, a replay has at most {MAX_PAGES}: "
                f"give at most {MAX_PAGES * page_bytes / GIB:.0f} GiB, or 'unlimited' pages"
            )
    if device is None:
        # Twice the host pool: free pages never fall below the watermark that gives out hot regions.
        device = 2 * host + 4 * hot_pages + 16
    if device < 2 * hot_pages + 3:
        least = (2 * hot_pages + 3) * page_bytes / GIB
        raise ValueError(
            f"the device pool holds {device} pages, two hot regions and a tail take {2 * hot_pages + 3}: "
            f"give at least {least:.2f} GiB"
        )
    most = device - hot_pages - 1  # a page is for the token left to compute
    if not setup.timed and sequences.most_prompt_pages > most:
        raise ValueError(
            f"the device pool holds {device} pages, enough for a prompt of {most} without the clock, the "
            f"longest has {sequences.most_prompt_pages}: raise --device-gib, or give --device-pages unlimited"
        )
    return HiSparseConfig(
        top_k=-(-model.top_k // block),
        context_len=longest,
        # The null page; without a clock also the page that stands for the token left to compute.
        host_pages=host + (1 if setup.timed else 2),
        device_pages=device + 1,
        device_buffer_size=hot_pages,
        max_requests=setup.max_requests,
        eviction_policy=setup.policy,
    )
