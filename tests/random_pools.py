"""Pools so small that a few requests use up every resource, and what is done to them."""

from __future__ import annotations

from random import Random

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.mem_pool.layout import IndexGroup

PAGE_SIZE = 4
CONTEXT_LEN = 48
GROUPS = (IndexGroup(0, (1,)), IndexGroup(2))
NUM_LAYERS = 3
TENANTS = (None, None, None, "a", ("a", 1))
ACTIONS = (
    ("step",) * 15 + ("admit",) * 5 + ("land",) * 7 + ("end", "run", "fail", "rewind", "rewind", "flush")
)


def random_config(rng: Random) -> HiSparseConfig:
    """Small enough that a few requests use up every resource."""
    top_k, query_rows = rng.choice((2, 3, 4)), rng.choice((1, 1, 1, 2, 3))
    hot_pages = -(-2 * top_k * query_rows // PAGE_SIZE)
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
