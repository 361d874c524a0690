"""Prompts that do not fit on the device: admitted into a hot region and computed out of it."""

from __future__ import annotations

import torch

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.requests import Admission, Deferred

ROW_BYTES = 16


def make_pool(
    device_pages: int = 9, host_pages: int = 40, page_size: int = 4, query_rows: int = 1
) -> HiSparsePool:
    layout = KVLayout.single(1, (ROW_BYTES,), page_size, (IndexGroup(0),), 0)
    config = HiSparseConfig(
        top_k=4,
        context_len=64,
        host_pages=host_pages,
        device_pages=device_pages,
        query_rows=query_rows,
        max_requests=2,
        kernels="reference",
        poison=True,
    )
    return HiSparsePool(layout, config)


def step(pool: HiSparsePool, rid: str, n: int, position: int) -> None:
    """Write ``n`` rows, each filled with its position."""
    slots = pool.extend(rid, n)
    while isinstance(slots, Deferred):
        assert pool.wait(), slots
        slots = pool.extend(rid, n)
    pool.begin_step([rid])
    rows = torch.arange(position, position + n, dtype=torch.uint8)[:, None].expand(n, ROW_BYTES)
    pool.write(0, slots, rows)
    selected = torch.tensor([[0, position // 2, max(0, position - 1), position + n - 1]], dtype=torch.int32)
    found = pool.swap_in(0, selected)
    assert bool((found >= 0).all())
    assert torch.equal(pool.rows(0)[found[0].long()][:, 0], selected[0].to(torch.uint8))
    pool.step_done()
    pool.check_integrity()
    assert pool.audit() == 0


def test_the_largest_resident_prompt_and_one_token_more() -> None:
    with make_pool() as pool:
        assert pool.admit("fits", list(range(24))) == Admission(0, 0, hot=False)
        pool.abort("fits")
        assert pool.admit("large", list(range(25))) == Admission(0, 0, hot=True)
        pool.check_integrity()


def test_a_large_prompt_is_computed_out_of_its_hot_region_and_published() -> None:
    with make_pool() as pool:
        tokens = list(range(50))
        pool.admit("large", tokens)
        for position in range(50):
            step(pool, "large", 1, position)
        pool.finish("large")
        while pool.wait():
            pass
        again = pool.admit("again", tokens)
        assert isinstance(again, Admission)
        assert (again.cached_tokens, again.hot) == (48, True)
        step(pool, "again", 1, 48)
        assert pool.counters.pages_reused > 0


def test_the_host_pages_of_a_large_prompt_are_promised_to_it() -> None:
    with make_pool(device_pages=12, host_pages=25) as pool:
        pool.admit("a", list(range(60)))
        assert pool.admit("b", list(range(100, 160))) == Deferred("host pages")
        for position in range(60):
            step(pool, "a", 1, position)
        pool.abort("a")
        assert pool.admit("b", list(range(100, 160))) == Admission(0, 0, hot=True)


def test_a_retracted_request_that_outgrew_the_device_comes_back() -> None:
    with make_pool() as pool:
        pool.admit("r", list(range(8)))
        step(pool, "r", 8, 0)
        for position in range(8, 40):
            pool.append_tokens("r", [position])
            step(pool, "r", 1, position)
        pool.retract("r")
        back = pool.admit("r", list(range(40)))
        assert isinstance(back, Admission)
        assert back.hot
        assert back.cached_tokens >= 32
        for position in range(back.cached_tokens, 44):
            if position >= 40:
                pool.append_tokens("r", [position])
            step(pool, "r", 1, position)


def test_a_large_prompt_leaves_room_for_the_hot_region_of_another() -> None:
    with make_pool(device_pages=15) as pool:
        pool.admit("resident", list(range(32)))
        step(pool, "resident", 24, 0)
        assert pool.admit("large", [7] * 51) == Deferred("device pages")
        step(pool, "resident", 8, 24)
        for position in range(32, 40):
            step(pool, "resident", 1, position)


def test_several_pages_a_step_are_left_to_a_running_request() -> None:
    with make_pool(device_pages=52, host_pages=120, page_size=1, query_rows=3) as pool:
        pool.admit("resident", list(range(20)))
        step(pool, "resident", 20, 0)
        assert pool.admit("large", [7] * 40) == Deferred("device pages")
        for position in range(20, 38, 3):
            step(pool, "resident", 3, position)
        pool.finish("resident")
        assert pool.admit("large", [7] * 40) == Admission(0, 0, hot=True)
