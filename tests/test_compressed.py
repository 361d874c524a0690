"""Rows of several tokens, groups beside them on the device, and states at page boundaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.kernels import backend
from hisparse_sgl.kernels.rows import RowFormat, row_view
from hisparse_sgl.mem_pool.layout import CacheGroup, IndexGroup, KVLayout, StateGroup
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.requests import Admission

SHARE, PAGE_ROWS, PAGE = 4, 4, 16
ROW = RowFormat.make((576, 8), PAGE_ROWS, align=576)
C4 = CacheGroup("c4", 2, ROW, (IndexGroup(0, (1,)),), 8, SHARE)
HEAVY = CacheGroup("heavy", 1, RowFormat.make((32,), 2), tokens_per_row=8, host_backed=False)
WINDOW = StateGroup("window", 64, 64)
STATELESS = KVLayout((C4, HEAVY), PAGE)
LAYOUT = KVLayout((C4, HEAVY), PAGE, (WINDOW,))
INTERPRETER = pytest.param(
    "interpreter", marks=pytest.mark.skipif(not backend.INTERPRETED, reason="needs TRITON_INTERPRET=1")
)


def make_pool(layout: KVLayout = STATELESS, **changes: Any) -> HiSparsePool:
    sizes = {"top_k": 4, "context_len": 256, "host_pages": 40, "device_pages": 12, "kernels": "reference"}
    return HiSparsePool(layout, HiSparseConfig(**{**sizes, "poison": True, **changes}))


def content(slots: torch.Tensor, layer: int) -> torch.Tensor:
    """uint8 [n, 584]: bytes that say which row of which layer they are."""
    column = torch.arange(ROW.row_bytes)
    return ((slots.long()[:, None] * 7 + column * 3 + layer * 11) % 251).to(torch.uint8)


def rows_at(pool: HiSparsePool, layer: int, device_rows: torch.Tensor) -> torch.Tensor:
    page, offset = device_rows.long() // PAGE_ROWS, device_rows.long() % PAGE_ROWS
    parts = [row_view(pool.pages(layer), ROW, part)[page, offset] for part in range(2)]
    return torch.cat(parts, dim=-1)


def step(pool: HiSparsePool, rid: str, n: int, positions: list[int] | None = None) -> list[int]:
    """One forward: writes the rows that its tokens complete, and compares what the positions select."""
    slots = pool.extend(rid, n)
    assert isinstance(slots, torch.Tensor), slots
    row_slots = pool.row_slots(slots)
    row_slots = row_slots[row_slots > 0]
    pool.begin_step([rid])
    for layer in range(2):
        if len(row_slots):
            pool.write(layer, row_slots, content(row_slots, layer))
    if positions:
        rows = pool.swap_in(0, torch.tensor([positions], dtype=torch.int32))[0]
        pages = pool.page_table([rid])[0]
        chosen = torch.tensor(positions)
        wanted = pages[chosen // PAGE_ROWS] * PAGE_ROWS + chosen % PAGE_ROWS
        for layer in range(2):
            assert torch.equal(rows_at(pool, layer, rows), content(wanted, layer))
    pool.step_done()
    pool.check_integrity()
    assert pool.audit() == 0
    return row_slots.tolist()


def test_a_row_belongs_to_the_token_that_completes_it() -> None:
    with make_pool(eager_host_mirror=True) as pool:
        assert pool.row_slots(torch.arange(16, 24)).tolist() == [0, 0, 0, 4, 0, 0, 0, 5]
        assert (pool.num_slots, pool.num_rows) == (40 * PAGE, 40 * PAGE_ROWS)
        pool.admit("r", list(range(100, 130)))
        assert step(pool, "r", 6) == [4]
        row_bytes = 2 * ROW.row_bytes
        assert pool.counters.device_to_host_bytes == row_bytes, "one row is complete"
        assert step(pool, "r", 1) == []
        assert pool.counters.device_to_host_bytes == row_bytes
        assert step(pool, "r", 1) == [5]
        assert pool.counters.device_to_host_bytes == 2 * row_bytes
        assert step(pool, "r", 9) == [6, 7]
        assert torch.equal(
            row_view(pool.host_pool.buffer[1], ROW, 0)[1], content(torch.arange(4, 8), 1)[:, :576]
        )
        assert torch.equal(
            row_view(pool.host_pool.buffer[1], ROW, 1)[1], content(torch.arange(4, 8), 1)[:, 576:]
        )


def test_a_page_is_published_with_its_last_row() -> None:
    with make_pool() as pool:
        pool.admit("r", list(range(40)))
        step(pool, "r", 15)
        step(pool, "r", 1)
        step(pool, "r", 1)
        pool.finish("r")
        assert pool.admit("again", list(range(40))) == Admission(PAGE, PAGE)


@pytest.mark.parametrize("kernels", ["reference", INTERPRETER])
@pytest.mark.parametrize("eager", [True, False])
def test_rows_of_two_parts_come_back_from_the_host_bit_for_bit(kernels: str, eager: bool) -> None:
    """A context of 10 pages of which a hot region, two tail pages and a few more fit on the device."""
    with make_pool(kernels=kernels, device_pages=9, eager_host_mirror=eager) as pool:
        assert pool.sizes.hot_pages == 2
        admission = pool.admit("r", list(range(90)))
        assert isinstance(admission, Admission) and not admission.hot
        step(pool, "r", 90)
        generator = torch.Generator().manual_seed(0)
        for token in range(70):
            pool.append_tokens("r", [token])
            count = (91 + token) // SHARE
            step(pool, "r", 1, torch.randperm(count, generator=generator)[:4].tolist())
        counters = pool.counters
        assert counters.hot_misses > 20 and counters.hot_hits > 0 and counters.resident_rows > 50
        assert counters.swapped_in_bytes == counters.hot_misses * 2 * ROW.row_bytes


def test_a_rewind_into_a_window_opens_it_again() -> None:
    with make_pool(device_pages=9) as pool:
        pool.admit("r", list(range(90)))
        step(pool, "r", 90)
        for token in range(38):
            pool.append_tokens("r", [token])
            step(pool, "r", 1, [0, (91 + token) // SHARE - 1])
        request = pool.coordinator.requests["r"]
        assert request.hot_pages and request.num_tokens == 128
        pool.rewind("r", 122)  # 30 rows are whole, the 31st and 32nd are not any more
        taken = [slot % PAGE_ROWS for region, slot in pool.coordinator.deltas.rewritten]
        assert taken == [2, 3]
        assert step(pool, "r", 1, [0, 29]) == []
        assert [slot % PAGE_ROWS for slot in step(pool, "r", 1, [0, 30])] == [2]


def test_a_group_on_the_device_lives_and_dies_with_its_slots() -> None:
    with make_pool() as pool:
        assert pool.group_rows("heavy", 0).shape == (40 * 2, 32)
        assert not pool.group_rows("heavy", 0)[:2].any(), "rows of the null page are zero"
        pool.admit("r", list(range(40)))
        slots = pool.extend("r", 32)
        assert isinstance(slots, torch.Tensor)
        pool.begin_step(["r"])
        row_slots = pool.row_slots(slots)
        for layer in range(2):
            pool.write(layer, row_slots, content(row_slots, layer))
        rows = slots[7::8].long() // 8
        pool.group_rows("heavy", 0)[rows] = rows[:, None].to(torch.uint8)
        pool.step_done()
        pool.step_done()
        pool.finish("r")
        pool.admit("again", list(range(40)))
        pages = pool.page_table(["again"])[0].long()
        found = pool.group_rows("heavy", 0)[(pages[:, None] * 2 + torch.arange(2)).flatten()]
        assert torch.equal(found[:, 0], rows.to(torch.uint8))
        for call, words in (
            (lambda: pool.group_rows("c4", 0), r"name is 'c4', the limit is .+ \['heavy'\]"),
            (lambda: pool.group_rows("heavy", 1), r"layer is 1, the limit is 0\.\.0"),
        ):
            with pytest.raises(ValueError, match=words):
                call()


def serve(pool: HiSparsePool, rid: str, tokens: list[int], states: dict[int, object]) -> None:
    assert isinstance(pool.admit(rid, tokens), Admission)
    step(pool, rid, len(tokens) - pool.coordinator.requests[rid].num_tokens)
    for num_tokens, state in states.items():
        pool.keep_state(rid, num_tokens, state)
    pool.step_done()
    pool.finish(rid)


def test_a_hit_ends_at_the_deepest_state() -> None:
    with make_pool(LAYOUT) as pool:
        tokens = list(range(70))
        serve(pool, "a", tokens, {16: "s16", 48: "s48"})
        found = pool.admit("b", tokens)
        assert found == Admission(48, 48, False, "s48", 16)
        assert (
            repr(found) == "Admission(cached_tokens=48, resident_tokens=48, hot=False, shortened_tokens=16)"
        )
        assert pool.admit("c", tokens[:48]) == Admission(16, 16, False, "s16", 16)
        assert pool.counters.prefix_hit_tokens == 64


def test_a_state_may_come_before_or_after_its_page_is_published() -> None:
    with make_pool(LAYOUT) as pool:
        tokens = list(range(70))
        serve(pool, "a", tokens, {})
        assert pool.admit("b", tokens) == Admission(0, 0, False, None, 64)
        step(pool, "b", 70)
        pool.keep_state("b", 32, "mine")  # the page of that prefix in the tree is a's
        pool.keep_state("b", 32, "later ones are dropped")
        pool.retract("b")
        assert pool.admit("b", tokens) == Admission(32, 32, False, "mine", 32)


def test_states_of_taken_back_tokens_and_of_dropped_pages_are_gone() -> None:
    with make_pool(LAYOUT) as pool:
        tokens = list(range(70))
        pool.admit("a", tokens)
        step(pool, "a", 70)
        pool.rewind("a", 64)
        pool.keep_state("a", 64, "kept")
        publication = pool.coordinator.requests["a"].publication
        assert publication.states == {3: "kept"}
        pool.rewind("a", 60)
        assert not publication.states
        pool.flush()
        assert not publication.states and not pool.coordinator.tree.nodes
        pool.keep_state("a", 32, "nobody publishes a any more")
        pool.finish("a")
        assert pool.admit("b", tokens) == Admission(0, 0)


def test_an_eviction_drops_the_state_with_the_page() -> None:
    with make_pool(LAYOUT, host_pages=18, context_len=256) as pool:
        tokens = list(range(70))
        serve(pool, "a", tokens, {64: object()})
        node = list(pool.coordinator.tree.nodes.values())[-1]
        assert node.state is not None
        for first in range(1000, 1500, 100):
            serve(pool, f"from {first}", list(range(first, first + 70)), {})
        assert not node.alive and node.state is None


@pytest.mark.parametrize("num_tokens", [0, 8, 24, 80, -16])
def test_a_state_belongs_to_a_page_boundary_of_the_request(num_tokens: int) -> None:
    with make_pool(LAYOUT) as pool:
        pool.admit("a", list(range(70)))
        step(pool, "a", 70)
        with pytest.raises(ValueError, match=rf"num_tokens is {num_tokens} for rid 'a', .+ multiple of 16"):
            pool.keep_state("a", num_tokens, "state")
