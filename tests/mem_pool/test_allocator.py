"""TokenToKVAllocator: slots in page order, all or nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_sgl.mem_pool.allocator import TokenToKVAllocator


def test_extend_fills_the_last_page_first() -> None:
    allocator = TokenToKVAllocator(8, 4)
    pages: list[int] = []
    assert allocator.extend(pages, 0, 6) == [4, 5, 6, 7, 8, 9]
    assert pages == [1, 2]
    assert allocator.extend(pages, 6, 3) == [10, 11, 12]
    assert pages == [1, 2, 3]
    assert allocator.extend(pages, 9, 0) == []
    allocator.check_integrity()


def test_pages_needed() -> None:
    allocator = TokenToKVAllocator(8, 4)
    assert allocator.pages_needed(0, 0, 0) == 0
    assert allocator.pages_needed(0, 4, 0) == 1
    assert allocator.pages_needed(4, 1, 1) == 1
    assert allocator.pages_needed(3, 1, 1) == 0
    assert allocator.pages_needed(2, 1, 3) == 0, "pages held in advance are used first"


def test_no_room_changes_nothing() -> None:
    allocator = TokenToKVAllocator(4, 4)
    pages: list[int] = []
    allocator.extend(pages, 0, 5)
    assert allocator.extend(pages, 5, 8) is None
    full, part = list(pages), [3]
    other: list[int] = []
    assert allocator.decode([(pages, 8), (part, 2), (other, 0)]) is None
    assert pages == full and part == [3] and other == [] and allocator.num_free == 1
    allocator.check_integrity()
    assert allocator.decode([(pages, 8)]) == [12]


def test_decode_takes_a_page_only_where_one_is_full() -> None:
    allocator = TokenToKVAllocator(8, 4)
    one: list[int] = []
    two: list[int] = []
    allocator.extend(one, 0, 4)
    allocator.extend(two, 0, 2)
    assert allocator.decode([(one, 4), (two, 2)]) == [12, 10]
    assert one == [1, 3] and two == [2]
    assert allocator.decode([]) == []


def test_shared_pages_outlive_the_first_holder() -> None:
    allocator = TokenToKVAllocator(4, 4)
    pages: list[int] = []
    allocator.extend(pages, 0, 8)
    allocator.share(pages[:1])
    allocator.free(pages)
    assert allocator.num_free == 2
    allocator.free(pages[:1])
    assert allocator.num_free == 3
    with pytest.raises(AssertionError):
        allocator.free(pages[:1])
    with pytest.raises(AssertionError):
        allocator.share(pages[:1])
    allocator.check_integrity()


def test_two_growing_requests_use_their_own_extents() -> None:
    allocator = TokenToKVAllocator(65, 4, extent_pages=8)
    one: list[int] = []
    two: list[int] = []
    for step in range(6):
        allocator.extend(one, 4 * step, 4)
        allocator.extend(two, 4 * step, 4)
    assert {page // 8 for page in one} == {0} and {page // 8 for page in two} == {1}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((1, 64), "num_host_pages"),
        ((8, 3), "page_size"),
        ((8, 0), "page_size"),
        ((8, 64, 0), "extent_blocks"),
    ],
)
def test_wrong_sizes(arguments: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TokenToKVAllocator(*arguments)


def test_slots_fit_int32() -> None:
    with pytest.raises(ValueError, match=r"num_host_pages is 33554433, the limit is 33554432"):
        TokenToKVAllocator(2**25 + 1, 64)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_two_tokens_share_a_slot(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 2, 8]))
    allocator = TokenToKVAllocator(12, page_size, extent_pages=3)
    requests: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["new", "extend", "decode", "free"]))
        if action == "new":
            requests.append(([], []))
        elif action == "decode":
            slots = allocator.decode([(pages, len(owned)) for pages, owned in requests])
            for (_, owned), slot in zip(requests, slots or [], strict=slots is not None):
                owned.append(slot)
        elif requests:
            index = data.draw(st.integers(0, len(requests) - 1))
            pages, owned = requests[index]
            if action == "free":
                allocator.free(pages)
                del requests[index]
            else:
                owned += allocator.extend(pages, len(owned), data.draw(st.integers(0, 3 * page_size))) or []
        allocator.check_integrity()
        slots = [slot for _, owned in requests for slot in owned]
        assert len(set(slots)) == len(slots) and min(slots, default=page_size) >= page_size
        for pages, owned in requests:
            assert owned == [pages[i // page_size] * page_size + i % page_size for i in range(len(owned))]
            assert len(pages) == -(-len(owned) // page_size)
        assert allocator.num_free == 11 - sum(len(pages) for pages, _ in requests)


def test_page_records_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from hisparse_sgl.mem_pool import allocator, layout, leases\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
