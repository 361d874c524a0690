"""Extents: which free block comes next, and how near a request's blocks lie."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_sgl.mem_pool.extents import Extents, extent_pages


def take(extents: Extents, n: int, near: int | None = None) -> list[int]:
    blocks = []
    for _ in range(n):
        near = extents.pop(near)
        blocks.append(near)
        extents.check_integrity()
    return blocks


def test_extent_pages() -> None:
    assert extent_pages(64 * 656) == 49
    assert extent_pages(2 << 20) == 1
    assert extent_pages(5 << 20) == 1
    with pytest.raises(ValueError, match="page_bytes"):
        extent_pages(0)


def test_order_of_preference() -> None:
    extents = Extents(12, 4)  # 1-3, 4-7, 8-11
    assert take(extents, 3) == [1, 2, 3]
    assert extents.pop(5) == 5, "a free block at `near` itself is the next one"
    assert extents.pop(5) == 6
    assert extents.pop(7) == 7
    assert extents.pop(7) == 4, "none after 7 in its extent: another one there"
    assert extents.pop(7) == 8, "the extent is used up: an entirely free one"
    extents.push(5)
    assert extents.pop(None) == 9, "no whole extent is left: the one with the most free blocks"
    extents.check_integrity()


def test_lowest_entirely_free_extent_wins() -> None:
    extents = Extents(20, 4)
    blocks = take(extents, 19)
    for block in (blocks[0], *range(12, 16), *range(8, 12)):
        extents.push(block)
    extents.check_integrity()
    assert extents.pop(None) == 8
    assert extents.pop(None) == 12
    assert extents.pop(None) == 9


@pytest.mark.parametrize(
    ("num_blocks", "extent_blocks"), [(2, 1), (7, 1), (9, 4), (10, 9), (10, 10), (10, 64)]
)
def test_hands_out_each_block_once(num_blocks: int, extent_blocks: int) -> None:
    extents = Extents(num_blocks, extent_blocks)
    extents.check_integrity()
    assert take(extents, num_blocks - 1) == list(range(1, num_blocks))
    assert len(extents) == 0
    with pytest.raises(AssertionError):
        extents.pop(None)


def test_refuses_wrong_sizes_and_wrong_blocks() -> None:
    with pytest.raises(ValueError, match="extent_blocks"):
        Extents(4, 0)
    with pytest.raises(ValueError, match="num_blocks"):
        Extents(0, 4)
    extents = Extents(4, 2)
    for block in (0, 1, 4, -1):
        with pytest.raises(AssertionError):
            extents.push(block)
    assert len(extents) == 3
    extents.check_integrity()


def test_check_integrity_sees_damage() -> None:
    extents = Extents(9, 4)
    extents.pop(None)
    extents._counts[0] += 1
    with pytest.raises(RuntimeError, match="extent 0"):
        extents.check_integrity()
    extents = Extents(9, 4)
    extents._buckets[1] = 2
    with pytest.raises(RuntimeError, match="extent 1"):
        extents.check_integrity()
    extents = Extents(9, 4)
    extents._len -= 1
    with pytest.raises(RuntimeError, match="8 free"):
        extents.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 40), st.integers(1, 9))
def test_best_block_by_brute_force(data: st.DataObject, num_blocks: int, extent_blocks: int) -> None:
    extents = Extents(num_blocks, extent_blocks)
    free = set(range(1, num_blocks))
    members = {
        e: {b for b in range(1, num_blocks) if b // extent_blocks == e}
        for e in range(num_blocks // extent_blocks + 1)
    }
    for _ in range(data.draw(st.integers(0, 40))):
        used = sorted(set(range(1, num_blocks)) - free)
        if used and (not free or data.draw(st.booleans())):
            block = data.draw(st.sampled_from(used))
            extents.push(block)
            free.add(block)
        else:
            near = data.draw(st.none() | st.integers(1, num_blocks - 1))
            local = [] if near is None else sorted(members[near // extent_blocks] & free)
            whole = [e for e, blocks in members.items() if blocks and blocks <= free]
            if local and near is not None:
                expected = min(local, key=lambda b, near=near: (b < near, b))
            elif whole:
                expected = min(members[whole[0]])
            else:
                most = max(members, key=lambda e: (len(members[e] & free), -e))
                expected = min(members[most] & free)
            assert extents.pop(near) == expected
            free.remove(expected)
        extents.check_integrity()
        assert {b for b in range(num_blocks) if b in extents} == free and len(extents) == len(free)


def test_requests_that_grow_together_stay_in_few_extents() -> None:
    extent_blocks, num_requests, length = 16, 12, 64
    extents = Extents(1 + 2 * num_requests * length, extent_blocks)
    requests: list[list[int]] = [[] for _ in range(num_requests)]
    order = [i for i in range(num_requests) for _ in range(length)]
    random.Random(0).shuffle(order)
    for i in order:
        requests[i].append(extents.pop(requests[i][-1] if requests[i] else None))
    extents.check_integrity()
    touched = [len({block // extent_blocks for block in request}) for request in requests]
    assert max(touched) <= length // extent_blocks + 1, touched


def test_cost_does_not_grow_with_the_pool() -> None:
    def seconds(num_blocks: int) -> float:
        extents = Extents(num_blocks, 49)
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            near, blocks = None, []
            for _ in range(1000):
                near = extents.pop(near)
                blocks.append(near)
            for block in blocks:
                extents.push(block)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(336_000) < 10 * seconds(3_360)
