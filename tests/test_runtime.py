"""The device side by itself: hot regions that change hands, batches from the device, plans kept in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hisparse_sgl import runtime
from hisparse_sgl.config import HiSparseConfig, Sizes
from hisparse_sgl.kernels import backend
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout
from hisparse_sgl.requests import Deltas
from hisparse_sgl.runtime import Runtime

PAGE, WIDTH, TOP_K, CONTEXT = 4, 16, 4, 32
GROUPS = (IndexGroup(0, (1, 2)), IndexGroup(3), IndexGroup(4, (5,)))
CONFIG = HiSparseConfig(
    top_k=TOP_K, context_len=CONTEXT, host_pages=33, device_pages=12, max_requests=6, kernels="reference"
)
SIZES = Sizes.of(CONFIG, PAGE)
# What positions select in each request: host page of its own for each page, nothing resident.
PAGES = {row: list(range(1 + 8 * row, 9 + 8 * row)) for row in range(4)}


class Side:
    """A runtime over pools of random bytes, and the host's bytes of any selection."""

    def __init__(self, num_plans: int | None = None, wanted: str = "reference") -> None:
        torch.manual_seed(0)
        self.layout = layout = KVLayout.single(6, (WIDTH,), PAGE, GROUPS, 0)
        self.where = "cuda" if wanted == "triton" else "cpu"
        self.host = HostPool(layout, CONFIG.host_pages, pinned=wanted == "triton")
        self.host.buffer.copy_(torch.randint(0, 256, self.host.buffer.shape, dtype=torch.uint8))
        self.device = DevicePool(layout, CONFIG.device_pages, CONFIG.host_pages, self.where)
        self.runtime = Runtime(layout, CONFIG, SIZES, self.host, self.device, wanted, num_plans)
        self.runtime.apply(Deltas(page_runs=[(row, 0, pages) for row, pages in PAGES.items()]))

    def give(self, **hot_regions: tuple[int, list[int]]) -> None:
        """Apply one batch of changes; the request of row 2 is called ``r2``."""
        self.runtime.apply(Deltas(hot_regions={int(name[1:]): held for name, held in hot_regions.items()}))
        self.runtime.check_integrity()

    def holds(self, layer: int, rows: torch.Tensor, request: int, positions: torch.Tensor) -> bool:
        """Every selected row of a request has the host's bytes in that layer."""
        rows = rows.long().cpu()
        pages = torch.tensor(PAGES[request])[positions.long() // PAGE]
        want = self.host.buffer[layer].view(-1, PAGE, WIDTH)[pages, positions.long() % PAGE]
        got = self.device.buffer[layer].cpu().view(-1, WIDTH)[rows]
        return bool((rows >= 0).all()) and torch.equal(got, want)


MakeSide = Callable[..., Side]


@pytest.fixture
def make_side() -> Iterator[MakeSide]:
    """Closes what it made: pinned memory that is only forgotten cannot be pinned again."""
    made: list[Side] = []

    def make(num_plans: int | None = None, wanted: str = "reference") -> Side:
        made.append(Side(num_plans, wanted))
        return made[-1]

    yield make
    for side in made:
        side.host.close()
        side.device.close()


@pytest.fixture
def side(make_side: MakeSide) -> Side:
    return make_side()


def selection(*positions: list[int]) -> torch.Tensor:
    return torch.tensor(positions, dtype=torch.int32)


def test_two_requests_swap_their_regions_within_one_batch_of_changes(side: Side) -> None:
    side.give(r0=(0, [2, 3]), r1=(1, [4, 5]))
    side.runtime.set_batch([0, 1], 1)
    side.runtime.swap_in(0, selection([0, 1, 2, 3], [9, 8, 7, 6]))
    side.give(r0=(1, [6, 7]), r1=(0, [2, 3]))
    assert side.runtime.hot_region.tolist() == [1, 0, -1, -1, -1, -1]
    assert side.runtime.tables.hot_pages[:2].tolist() == [[2, 3], [6, 7]]
    assert bool((side.runtime.hot.keys == -1).all())
    side.runtime.set_batch([0, 1], 1)
    rows = side.runtime.swap_in(0, selection([0, 1, 2, 3], [9, 8, 7, 6]))
    assert side.holds(0, rows[0], 0, torch.arange(4))
    assert {int(row) // PAGE for row in rows[0]} <= {6, 7}
    assert {int(row) // PAGE for row in rows[1]} <= {2, 3}


def test_a_region_passes_on_within_one_batch_of_changes_in_either_order(side: Side) -> None:
    side.give(r2=(1, [4, 5]))
    side.give(r2=(-1, []), r3=(1, [8, 9]))
    side.give(r0=(1, [6, 7]), r3=(-1, []))
    assert side.runtime.region_of == [1, -1, -1, -1, -1, -1]
    assert side.runtime.tables.hot_pages.tolist() == [[0, 0], [6, 7], [0, 0], [0, 0], [0, 0]]
    side.give(r0=(-1, []))
    assert not side.runtime.tables.hot_pages.any()


def test_both_tables_are_written_by_one_upload(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[dict[int, int]] = []
    upload_cells = runtime.upload_cells
    monkeypatch.setattr(runtime, "upload_cells", lambda c, where: uploads.append(c) or upload_cells(c, where))
    monkeypatch.delattr(runtime, "upload")
    tables = side.runtime.tables
    before = tables.page_table.clone()
    runs = [(2, 0, [7, 0, 9]), (5, CONTEXT // PAGE - 1, [31]), (2, 1, [8])]
    side.runtime.apply(Deltas(residency={1: 3, 32: 11}, page_runs=runs))
    assert len(uploads) == 1
    before[2, :3], before[5, -1] = torch.tensor([7, 8, 9]), 31
    assert torch.equal(tables.page_table, before), "the last of two runs over one page stands"
    assert tables.resident_page.nonzero().flatten().tolist() == [1, 32]
    assert tables.resident_page[[1, 32]].tolist() == [3, 11]
    side.runtime.apply(Deltas())
    assert len(uploads) == 1


def test_changes_that_were_cut_short_are_applied_again(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.give(r0=(0, [2, 3]))

    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(side.runtime.hot), "reset", fail)
        with pytest.raises(MemoryError):
            side.give(r0=(-1, []), r1=(3, [2, 3]))
    side.give(r0=(-1, []), r1=(3, [2, 3]))
    assert side.runtime.region_of == [-1, 3, -1, -1, -1, -1]


def test_a_request_without_a_region_is_served_what_is_resident(side: Side) -> None:
    side.runtime.apply(Deltas(residency={PAGES[1][0]: 9}, hot_regions={0: (0, [2, 3])}))
    side.runtime.set_batch([1, 0], 1)
    rows = side.runtime.swap_in(0, selection([0, 3, 4, 31], [5, 6, 7, 8]))
    assert rows[0].tolist() == [36, 39, -1, -1]
    assert side.holds(0, rows[1], 0, torch.arange(5, 9))
    assert side.runtime.stats[0].tolist() == [0, 6, 2, 2]
    with pytest.raises(RuntimeError, match="2 selected rows"):
        side.runtime.check_integrity()


def test_a_region_that_two_requests_hold_is_found(side: Side) -> None:
    side.runtime.apply(Deltas(hot_regions={0: (1, [2, 3]), 4: (1, [2, 3])}))
    with pytest.raises(RuntimeError, match=r"hold the hot regions \[1, 1\]"):
        side.runtime.check_integrity()


WANTED = [
    "reference",
    pytest.param(
        "interpreter", marks=pytest.mark.skipif(not backend.INTERPRETED, reason="needs TRITON_INTERPRET=1")
    ),
    pytest.param(
        "triton",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_batch_from_the_device_equals_one_from_the_cpu(
    make_side: MakeSide, dtype: torch.dtype, wanted: str
) -> None:
    side = make_side(wanted=wanted)
    side.give(r0=(2, [2, 3]), r3=(0, [4, 5]), r5=(4, [6, 7]))
    own = side.runtime
    addresses = own.request_rows.data_ptr(), own.region_rows.data_ptr()
    for rows in ([5, 1, 0], [3], [], [4, 3, 2, 1, 0, 5]):
        for padding in range(7 - len(rows)):
            own.set_batch(rows, 1)
            expected = own.batch_rows.clone()
            own.batch_rows.fill_(99)
            padded = torch.tensor([*rows, *[1] * padding], dtype=dtype, device=side.where)
            real = torch.tensor([len(rows)], dtype=torch.int32, device=side.where)
            own.set_device_batch(padded, real)
            assert torch.equal(own.batch_rows, expected)
            assert own.batch == len(rows) + padding
    assert (own.request_rows.data_ptr(), own.region_rows.data_ptr()) == addresses
    assert own.region_rows.tolist() == [-1, 0, -1, -1, 2, 4]
    with pytest.raises(ValueError, match="request_rows has 7 rows, the limit is 6"):
        own.set_device_batch(own.hot_region.new_zeros(7), own.hot_region[:1])


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("num_plans", [None, 1, 2, 3, 9])
def test_groups_that_take_plans_in_turn_give_the_same_rows(
    make_side: MakeSide, num_plans: int | None, wanted: str
) -> None:
    plain, turns = make_side(), make_side(num_plans, wanted)
    kept = min(num_plans or 3, 3)
    assert (len(turns.runtime.plans), turns.runtime.rows.shape[0]) == (kept, kept)
    for side in (plain, turns):
        side.give(r0=(0, [2, 3]), r2=(1, [4, 5]))
        side.runtime.set_batch([2, 0], 1)
    for step in range(6):
        torch.manual_seed(step)
        for group, index_group in enumerate(GROUPS):
            positions = torch.stack([torch.randperm(CONTEXT)[:TOP_K] for _ in range(2)]).int()
            expected, rows = (
                side.runtime.swap_in(group, positions.to(side.where)) for side in (plain, turns)
            )
            assert torch.equal(rows.cpu(), expected)
            for layer in index_group.layers:
                turns.runtime.wait_layer(layer)
                assert turns.holds(layer, rows[0], 2, positions[0])
                assert turns.holds(layer, rows[1], 0, positions[1])
        turns.runtime.check_integrity()
    assert torch.equal(plain.runtime.stats, turns.runtime.stats.cpu())


def test_a_plan_is_overwritten_only_behind_the_copies_that_read_it(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make_side(num_plans=2)
    side.give(r0=(0, [2, 3]))
    side.runtime.set_batch([0], 1)
    calls: list[object] = []
    monkeypatch.setattr(side.runtime, "wait_layer", calls.append)
    monkeypatch.setattr(runtime, "resolve", lambda *args, **kwargs: calls.append("resolve"))
    for group, waited in ((0, [1, 2, 5]), (1, []), (2, [1, 2, 5]), (0, [1, 2, 5])):
        calls.clear()
        side.runtime.swap_in(group, selection([3, 9]))
        assert calls == [*waited, "resolve"]


def test_a_number_of_plans_below_one_is_refused(side: Side) -> None:
    with pytest.raises(ValueError, match="num_plans is 0, the limit is at least 1"):
        Runtime(side.layout, CONFIG, SIZES, side.host, side.device, num_plans=0)


@pytest.mark.parametrize("wanted", WANTED)
def test_resident_rows_are_those_of_swap_in_while_all_is_on_the_device(
    make_side: MakeSide, wanted: str
) -> None:
    side = make_side(wanted=wanted)
    pages = PAGES[1][:3] + PAGES[2][:2]
    side.runtime.apply(Deltas(residency={page: 3 + index for index, page in enumerate(pages)}))
    padded = torch.tensor([2, 1, 5], device=side.where)
    side.runtime.set_device_batch(padded, torch.tensor([2], dtype=torch.int32, device=side.where))
    positions = selection([7, 0, -1, 3], [11, 4, 4, 0], [0, 1, 2, 3]).to(side.where)
    found = side.runtime.resident_rows(positions)
    assert not side.runtime.stats.any() and found.dtype == torch.int32
    assert found.tolist() == side.runtime.swap_in(0, positions).tolist()
    assert found[0].tolist() == [(3 + 4) * PAGE + 3, (3 + 3) * PAGE, -1, (3 + 3) * PAGE + 3]
    assert found[2].tolist() == [-1] * 4, "padding"
    elsewhere = selection([31, 8, 0, 0], [12, 0, 0, 0], [0, 0, 0, 0]).to(side.where)
    assert side.runtime.resident_rows(elsewhere)[:, 0].tolist() == [-1, -1, -1], "not on the device"
