"""The settings of a pool, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVE_TAIL_PAGES = 2
"""Pages at the end of a running request that are never unpinned (rule 4)."""

MAX_HOT_ROWS = 32768
"""Hot rows a request: the order is kept in int16."""

MAX_CONTEXT = 1 << 20
"""Tokens a request: one kernel program scans a bit for each position."""

MIN_HOT_REQUESTS = 8
"""Hot regions that ``hot_requests_within`` gives in any case."""

KERNELS = ("auto", "triton", "reference", "interpreter")
EVICTION_POLICIES = ("lru", "lfu")


@dataclass(frozen=True)
class HiSparseConfig:
    """Sizes and policies of one pool. Every field is checked; a bad one raises ``ValueError``.

    Args:
        top_k: positions that the indexer selects for one query row.
        context_len: most tokens a request may hold, prompt and answer together.
        host_pages: pages of the host pool, page 0 (the null page) included.
        device_pages: pages of the device pool, page 0 included.
        device_buffer_size: hot rows of one request; None means twice what one step can select,
            rounded up to whole pages.
        query_rows: query rows of a request in one decode step (1, or drafts + 1).
        max_requests: most requests that run at the same time.
        max_hot_requests: most of them that may hold a hot region, each with its state; None means as many as
            the device pool has room for.
        eager_host_mirror: copy the rows of every step to the host at its end, so that spilling a
            sealed page moves no bytes. False copies whole pages once they are sealed.
        max_spill_pages: most pages that one step may start to spill; None means one context.
        admission_window: most prompt tokens that may be admitted and not yet prefilled; one prompt is
            always let in. None sets no limit besides the device pool.
        eviction_policy: which unlocked prefix leaves the tree first, "lru" or "lfu".
        kernels: "auto" picks by device; "triton", "reference" and "interpreter" force one backend.
        kv_events: record stored / removed / cleared events.
        poison: fill each device page with 0xFF bytes (NaN in every float format) when it is handed
            out, so that a read of bytes nobody wrote is seen. For tests and demonstrations.
    """

    top_k: int
    context_len: int
    host_pages: int
    device_pages: int
    device_buffer_size: int | None = None
    query_rows: int = 1
    max_requests: int = 64
    max_hot_requests: int | None = None
    eager_host_mirror: bool = False
    max_spill_pages: int | None = None
    admission_window: int | None = None
    eviction_policy: str = "lru"
    kernels: str = "auto"
    kv_events: bool = False
    poison: bool = False

    def __post_init__(self) -> None:
        for field in ("top_k", "context_len", "query_rows", "max_requests"):
            _check_whole(field, getattr(self, field), 1)
        if self.context_len > MAX_CONTEXT:
            raise ValueError(
                f"context_len is {self.context_len}, the limit is {MAX_CONTEXT} (one kernel program scans "
                "a bit for each position): lower context_len"
            )
        for field in ("max_hot_requests", "max_spill_pages", "admission_window", "device_buffer_size"):
            if getattr(self, field) is not None:
                _check_whole(field, getattr(self, field), 1)
        _check_choice("eviction_policy", self.eviction_policy, EVICTION_POLICIES)
        _check_choice("kernels", self.kernels, KERNELS)
        for field in ("host_pages", "device_pages"):
            _check_whole(field, getattr(self, field), 2)
        for field in ("eager_host_mirror", "kv_events", "poison"):
            _check_choice(field, getattr(self, field), (True, False))


@dataclass(frozen=True)
class Sizes:
    """A configuration counted in pages. ``ValueError`` where the two do not fit each other."""

    page_size: int  # tokens a page
    page_rows: int  # rows a page: fewer where tokens share a row
    hot_rows: int
    hot_pages: int  # device pages of one hot region
    hot_regions: int  # most hot regions at one time
    context_pages: int  # pages of the longest request
    transition_watermark: int  # free device pages below which requests are given hot regions
    spill_budget: int  # most pages one step may start to spill

    @classmethod
    def of(cls, config: HiSparseConfig, page_size: int, tokens_per_row: int = 1) -> Sizes:
        _check_whole("page_size", page_size, 1)
        if page_size & (page_size - 1):
            raise ValueError(f"page_size is {page_size}, it must be a power of two: use 16, 32 or 64")
        page_rows = page_size // tokens_per_row
        hot_rows = _hot_rows(config, page_rows)
        hot_pages = hot_rows // page_rows
        context_pages = -(-config.context_len // page_size)
        if config.host_pages <= context_pages:
            raise ValueError(
                f"host_pages is {config.host_pages}, the limit is {context_pages + 1}: the null page and one "
                f"request of context_len {config.context_len}. Raise host_pages or lower context_len"
            )
        least = 2 * hot_pages + ACTIVE_TAIL_PAGES + 2
        if config.device_pages < least:
            raise ValueError(
                f"device_pages is {config.device_pages}, the limit is {least}: the null page, a request of "
                f"up to {hot_pages} + {ACTIVE_TAIL_PAGES} + 1 resident pages and the {hot_pages} pages of "
                "the hot region that takes its place. Raise device_pages or lower device_buffer_size"
            )
        return cls(
            page_size=page_size,
            page_rows=page_rows,
            hot_rows=hot_rows,
            hot_pages=hot_pages,
            hot_regions=min(
                config.max_hot_requests or config.max_requests,
                config.max_requests,
                (config.device_pages - 1) // hot_pages,
            ),
            context_pages=context_pages,
            transition_watermark=max(hot_pages, config.device_pages // 10),
            spill_budget=config.max_spill_pages or context_pages,
        )


def hot_requests_within(pool_bytes: int, region_bytes: int) -> int:
    """Regions whose hot state, ``region_bytes`` each, takes 5 % of a device pool of ``pool_bytes``.

    At least ``MIN_HOT_REQUESTS``. For an engine that gives its memory to the pool and leaves little besides.
    """
    return max(pool_bytes * 5 // 100 // region_bytes, MIN_HOT_REQUESTS)


def _hot_rows(config: HiSparseConfig, page_rows: int) -> int:
    least = config.query_rows * config.top_k
    rows = config.device_buffer_size
    if rows is None:
        rows = -(-2 * least // page_rows) * page_rows
    if rows < least:
        raise ValueError(
            f"device_buffer_size is {rows}, one step can select query_rows x top_k = "
            f"{config.query_rows} x {config.top_k} = {least} rows: set it to at least {least}"
        )
    if rows > MAX_HOT_ROWS:
        raise ValueError(
            f"device_buffer_size is {rows}, the limit is {MAX_HOT_ROWS} (the order is int16): "
            "lower device_buffer_size, query_rows or top_k"
        )
    if rows % page_rows:
        raise ValueError(
            f"device_buffer_size is {rows}, it must be a multiple of page_size {page_rows}: "
            f"use {-(-rows // page_rows) * page_rows}"
        )
    return rows


def _check_whole(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{field} is {value!r}, it must be a whole number of at least {least}: correct it")


def _check_choice(field: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field} is {value!r}, it must be one of {', '.join(map(str, choices))}: use one")
