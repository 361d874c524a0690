"""Pools so small that a few requests use up every resource, and what is done to them."""

from __future__ import annotations

from random import Random

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.mem_pool.layout import CacheGroup, IndexGroup, KVLayout, StateGroup

PAGE_SIZE = 4
PLAIN = "plain"
CONTEXT_LEN = 48
GROUPS = (IndexGroup(0, (1,)), IndexGroup(2))
NUM_LAYERS = 3
ROW_BYTES = 16
INDEX_ROW_BYTES = 8
TENANTS = (None, None, None, "a", ("a", 1))
ACTIONS = (
    ("step",) * 15 + ("admit",) * 5 + ("land",) * 7 + ("end", "run", "fail", "rewind", "rewind", "flush")
)


def make_layout(tokens_per_row: int) -> KVLayout:
    """A row for each token; or page-padded rows of two parts for several, beside a plain group on the device.

    The second needs a state to resume.
    """
    if tokens_per_row == 1:
        return KVLayout.single(NUM_LAYERS, (ROW_BYTES,), PAGE_SIZE, GROUPS, INDEX_ROW_BYTES)
    row = RowFormat.make((ROW_BYTES, 8), PAGE_SIZE // tokens_per_row, align=64)
    compressed = CacheGroup("compressed", NUM_LAYERS, row, GROUPS, INDEX_ROW_BYTES, tokens_per_row)
    plain = CacheGroup(PLAIN, 2, RowFormat.make((ROW_BYTES,), PAGE_SIZE), host_backed=False)
    return KVLayout((plain, compressed), PAGE_SIZE, (StateGroup("window", 8, 8),))


def random_config(rng: Random, page_rows: int = PAGE_SIZE) -> HiSparseConfig:
    """Small enough that a few requests use up every resource."""
    small = page_rows < PAGE_SIZE  # fewer rows in the same context
    top_k = rng.choice((1, 2) if small else (2, 3, 4))
    query_rows = rng.choice((1, 1, 2) if small else (1, 1, 1, 2, 3))
    hot_pages = -(-2 * top_k * query_rows // page_rows)
    return HiSparseConfig(
        top_k=top_k,
        query_rows=query_rows,
        context_len=CONTEXT_LEN,
        host_pages=rng.randint(18, 40),
        device_pages=2 * hot_pages + 4 + rng.choice((0, 2, 5, 9, 15)),
        max_requests=4,
        max_hot_requests=rng.choice((None, None, None, 1, 2)),
        eager_host_mirror=rng.random() < 0.6,
        max_spill_pages=rng.choice((None, None, 1, 3)),
        admission_window=rng.choice((None, None, 24)),
        eviction_policy=rng.choice(("lru", "lfu")),
        kernels="reference",
        kv_events=rng.random() < 0.3,
        poison=True,
    )
