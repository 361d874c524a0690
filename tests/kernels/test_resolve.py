"""`resolve`: kernel against reference, bit for bit, and what every step must hold."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hisparse_sgl.kernels import backend, resolve
from hisparse_sgl.kernels.state import CopyPlan, HotState, Scratch, Tables

CPU = pytest.param(
    "cpu", marks=pytest.mark.skipif(not backend.INTERPRETED, reason="needs Triton with TRITON_INTERPRET=1")
)
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
devices = pytest.mark.parametrize("device", [CPU, CUDA])


@dataclass
class World:
    """What a sequence of steps keeps. All tensors are on the CPU."""

    tables: Tables
    hot: HotState
    page_size: int
    query_rows: int
    num_slots: int

    @property
    def context(self) -> int:
        return self.tables.page_table.shape[1] * self.page_size


@dataclass
class Outcome:
    """What one step left behind, on the CPU."""

    out_rows: torch.Tensor
    stats: list[int]
    hot: HotState
    plan: CopyPlan


def make_world(
    *,
    page_size: int = 4,
    hot_rows: int = 16,
    max_pages: int = 16,
    max_requests: int = 5,
    resident: float = 0.3,
    query_rows: int = 1,
    seed: int = 0,
) -> World:
    """Each request has its own pages and a hot region; a share of the host pages is resident."""
    torch.manual_seed(seed)
    num_host_pages = max_requests * max_pages + 1
    tables = Tables.empty(max_requests, max_pages, num_host_pages, hot_rows // page_size)
    tables.page_table.copy_((torch.randperm(num_host_pages - 1) + 1).reshape(max_requests, max_pages))
    num_hot = tables.hot_pages.numel()
    device_pages = torch.randperm(num_host_pages + num_hot) + 1
    tables.hot_pages.copy_(device_pages[:num_hot].reshape(tables.hot_pages.shape))
    kept = torch.rand(num_host_pages) < resident
    kept[0] = False
    tables.resident_page.copy_(torch.where(kept, device_pages[num_hot:], 0))
    tables.check_integrity()
    hot = HotState.empty(max_requests, hot_rows)
    return World(tables, hot, page_size, query_rows, num_host_pages * page_size)


def select(world: World, batch: int, top_k: int, window: int | None = None) -> torch.Tensor:
    """Random positions of the context's end, with repeats and pads."""
    low = max(0, world.context - (window or world.context))
    positions = torch.randint(low, world.context, (batch * world.query_rows, top_k))
    return torch.where(torch.rand(positions.shape) < 0.1, -1, positions).int()


def run(
    world: World, positions: torch.Tensor, requests: torch.Tensor, device: str, wanted: str | None = None
) -> Outcome:
    """One step on copies of the world."""
    batch, hot_rows = requests.numel(), world.hot.keys.shape[1]
    plan = CopyPlan.empty(positions.numel(), batch, device)
    scratch = Scratch.empty(batch, world.tables.page_table.shape[1], world.page_size, hot_rows, device)
    tables = Tables(*(tensor.clone().to(device) for tensor in world.tables))
    hot = HotState(*(tensor.clone().to(device) for tensor in world.hot))
    stats = torch.full((4,), 5, dtype=torch.int64, device=device)
    out_rows = torch.full(positions.shape, -7, dtype=torch.int32, device=device)
    sizes = {"page_size": world.page_size, "num_slots": world.num_slots, "query_rows": world.query_rows}
    args = (positions.to(device), requests.to(device), tables, hot, scratch, plan, out_rows, stats)
    resolve.resolve(*args, **sizes, backend=wanted)
    scratch.check_integrity()
    plan.check_integrity(batch)
    assert all(torch.equal(old, new.cpu()) for old, new in zip(world.tables, tables, strict=True))
    on_cpu = CopyPlan(*(getattr(plan, name).cpu() for name in ("slots", "rows", "count", "starts", "counts")))
    return Outcome(out_rows.cpu(), (stats.cpu() - 5).tolist(), HotState(*(x.cpu() for x in hot)), on_cpu)


def step(world: World, positions: torch.Tensor, requests: list[int], device: str) -> Outcome:
    """Run kernel and reference, compare them bit for bit, keep the new hot state."""
    rows = torch.tensor(requests, dtype=torch.int32)
    expected = run(world, positions, rows, "cpu", "reference")
    actual = run(world, positions, rows, device)
    assert torch.equal(actual.out_rows, expected.out_rows)
    assert actual.stats == expected.stats
    for name, one, other in zip(HotState._fields, actual.hot, expected.hot, strict=True):
        assert torch.equal(one, other), name
    for row in range(len(requests)):
        assert actual.plan.segment(row) == expected.plan.segment(row)
    world.hot = expected.hot
    return actual


def check_step(
    world: World, before: HotState, positions: torch.Tensor, requests: list[int], out: Outcome
) -> None:
    """What a step promises, entry by entry. Needs a sound world."""
    size, tables = world.page_size, world.tables
    world.hot.check_integrity()
    by_request = (tensor.reshape(len(requests), -1).tolist() for tensor in (positions, out.out_rows))
    per_request = zip(requests, *by_request, strict=True)
    for index, (request, entries, rows) in enumerate(per_request):
        loads = []
        for position, row in dict(zip(entries, rows, strict=True)).items():
            page = int(tables.page_table[request, position // size]) if request >= 0 <= position else 0
            if page == 0:
                assert row == -1
                continue
            resident = int(tables.resident_page[page])
            if resident:
                assert row == resident * size + position % size
                continue
            hot_page = tables.hot_pages[request].tolist().index(row // size)
            hot_row, slot = hot_page * size + row % size, page * size + position % size
            assert int(world.hot.keys[request, hot_row]) == slot
            assert int(world.hot.positions[request, hot_row]) == position
            if int(before.keys[request, hot_row]) != slot:
                assert slot not in before.keys[request]
                loads.append((position, slot, row))
        assert out.plan.segment(index) == [(slot, row) for _, slot, row in sorted(loads)]


@pytest.mark.parametrize("device", [pytest.param("reference"), CPU, CUDA])
def test_worked_example(device: str) -> None:
    """top_k 8, 16 hot rows, slot 150 on a resident page: pages of one slot make positions equal slots."""
    keys = [100, 200, 300, 400, 500, 600, 750, 800, 900, 1000, 1050, 1200, 1300, 1400, 1500, 1600]
    tables = Tables.empty(1, 2000, 2000, 16)
    tables.page_table[0] = torch.arange(2000)
    tables.hot_pages[0] = torch.arange(1, 17)
    tables.resident_page[150] = 99
    hot = HotState.empty(1, 16)
    hot.keys[0] = hot.positions[0] = torch.tensor(keys)
    hot.lru[0] = torch.tensor([3, 1, 5, 0, 7, 2, 4, 6, *range(8, 16)])
    world = World(tables, hot, 1, 1, 2000)
    positions = torch.tensor([[150, 200, 700, -1, 300, 800, 1100, 900]], dtype=torch.int32)
    rows = torch.zeros(1, dtype=torch.int32)
    result = (
        run(world, positions, rows, "cpu", device)
        if device == "reference"
        else run(world, positions, rows, device)
    )
    assert result.hot.lru[0].tolist() == [0, 4, 6, 9, 10, 11, 12, 13, 14, 15, 3, 5, 1, 7, 2, 8]
    assert result.out_rows[0].tolist() == [99, 2, 4, -1, 3, 8, 6, 9]
    assert result.plan.segment(0) == [(700, 4), (1100, 6)]
    assert (result.hot.keys[0, [3, 5]].tolist(), result.hot.positions[0, [3, 5]].tolist()) == (
        [700, 1100],
    ) * 2
    assert result.stats == [4, 6, 1, 0]


@devices
@pytest.mark.parametrize("query_rows", [1, 4])
@pytest.mark.parametrize("hot_rows", [64, 128, 4096])
@pytest.mark.parametrize("top_k", [1, 31, 32, 33, 65])
def test_same_as_reference_cold_and_warm(top_k: int, hot_rows: int, query_rows: int, device: str) -> None:
    if query_rows * top_k > hot_rows:
        pytest.skip("the union must fit the hot region")
    world = make_world(page_size=16, hot_rows=hot_rows, query_rows=query_rows, seed=top_k)
    for requests in ([3], [0, 3, 4], [3, -1, 1], [4, 3, 0]):
        before = world.hot
        positions = select(world, len(requests), top_k, window=2 * top_k * query_rows)
        check_step(world, before, positions, requests, step(world, positions, requests, device))


@devices
@pytest.mark.parametrize("query_rows", [1, 2])
def test_top_2048(query_rows: int, device: str) -> None:
    world = make_world(page_size=64, hot_rows=4096, max_pages=128, max_requests=3, query_rows=query_rows)
    for _ in range(2):
        positions = select(world, 2, 2048, window=6000)
        step(world, positions, [2, 0], device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("top_k", "hot_rows", "query_rows"), [(65, 128, 1), (2048, 4096, 1), (2048, 8192, 4)]
)
def test_batch_64_on_a_gpu(top_k: int, hot_rows: int, query_rows: int) -> None:
    world = make_world(page_size=64, hot_rows=hot_rows, max_pages=300, max_requests=65, query_rows=query_rows)
    for _ in range(4):
        requests = (torch.randperm(65)[:64] - 1).tolist()
        positions = select(world, 64, top_k, window=2 * top_k * query_rows)
        step(world, positions, requests, "cuda")


@devices
def test_order_longer_than_a_block(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "LRU_BLOCK", 32)
    monkeypatch.setattr(resolve, "WORD_BLOCK", 4)
    world = make_world(page_size=16, hot_rows=144, max_pages=64)
    for index in range(4):
        before = world.hot
        if index == 2:
            world.hot.lru[1, 100] = 144
        positions = select(world, 2, 70, window=300)
        result = step(world, positions, [1, 4], device)
        if index != 2:
            check_step(world, before, positions, [1, 4], result)


@devices
def test_full_region_with_four_query_rows(device: str) -> None:
    world = make_world(hot_rows=16, query_rows=4, resident=0.0)
    for _ in range(3):
        before = world.hot
        positions = torch.randperm(world.context)[:16].reshape(4, 4).int()
        result = step(world, positions, [2], device)
        check_step(world, before, positions, [2], result)
        assert len(set(result.out_rows.flatten().tolist())) == 16


@devices
def test_padding_and_resident_batches_touch_no_hot_state(device: str) -> None:
    world = make_world(resident=1.0)
    world.hot.lru[:] = -3
    before = HotState(*(tensor.clone() for tensor in world.hot))
    positions = torch.tensor([[0, 5, 5, -1], [1, 2, 3, 4]], dtype=torch.int32)
    result = step(world, positions, [1, -1], device)
    assert all(torch.equal(one, other) for one, other in zip(before, result.hot, strict=True))
    assert result.out_rows[1].tolist() == [-1] * 4
    assert (result.stats, int(result.plan.count)) == ([0, 0, 2, 0], 0)


@devices
def test_invalid_positions_come_out_as_minus_one(device: str) -> None:
    world = make_world(resident=0.0)
    world.tables.page_table[0, 3] = 0
    world.tables.page_table[0, 4] = -2
    positions = torch.tensor([[-1, -50, 12, 16, 64, 2**31 - 1, -(2**31), 0]], dtype=torch.int32)
    result = step(world, positions, [0], device)
    assert result.out_rows[0, :7].tolist() == [-1] * 7
    assert result.stats == [0, 1, 0, 0]


@devices
def test_request_without_hot_region_is_counted(device: str) -> None:
    world = make_world(resident=0.0)
    world.tables.resident_page[world.tables.page_table[1, 0]] = 40
    world.tables.hot_pages[1] = 0
    result = step(world, torch.tensor([[2, 9, 9, 5]], dtype=torch.int32), [1], device)
    assert result.out_rows.tolist() == [[162, -1, -1, -1]]
    assert (result.stats, int(result.plan.count)) == ([0, 2, 1, 2], 0)


@devices
def test_corrupt_hot_entries_are_read_again(device: str) -> None:
    world = make_world(resident=0.0)
    positions = torch.arange(8, dtype=torch.int32)[None]
    step(world, positions, [1], device)
    world.hot.keys[1, :3] = torch.tensor([-9, 2**31 - 1, world.num_slots])
    world.hot.positions[1, 3:6] = torch.tensor([-5, 64, 2**31 - 1])
    world.hot.keys[1, 6] = world.hot.keys[1, 7] + 1
    result = step(world, positions, [1], device)
    assert result.stats == [1, 8, 0, 0]
    assert len(result.plan.segment(0)) == 7
    assert step(world, positions, [1], device).stats == [8, 8, 0, 0]


@devices
def test_corrupt_order_resets_one_request(device: str) -> None:
    world = make_world(resident=0.0)
    positions = torch.arange(8, dtype=torch.int32).repeat(2, 1)
    step(world, positions, [1, 2], device)
    world.hot.lru[1, 5] = 16
    result = step(world, positions, [1, 2], device)
    assert result.stats[:2] == [8, 16]
    assert result.hot.lru[1].tolist() == [*range(8, 16), *range(8)]
    world.hot.check_integrity()


@devices
@pytest.mark.parametrize("block", [8, 4096])
def test_of_two_rows_with_one_key_the_newest_wins(
    block: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "LRU_BLOCK", block)
    world = make_world(resident=0.0)
    positions = torch.arange(4, dtype=torch.int32)[None]
    step(world, positions, [1], device)
    for row in (9, 12):
        world.hot.keys[1, row], world.hot.positions[1, row] = world.hot.keys[1, 2], 2
    oldest = [4, 9, 5, 12, 13, 14, 15, 10, 11, 2]
    world.hot.lru[1] = torch.tensor([*oldest, *(row for row in range(16) if row not in oldest)])
    result = step(world, torch.tensor([[2, 20, 21, 22]], dtype=torch.int32), [1], device)
    hot_pages = world.tables.hot_pages[1].tolist()
    assert result.out_rows[0].tolist() == [hot_pages[row // 4] * 4 + row % 4 for row in (2, 4, 9, 5)]


@devices
def test_slot_outside_the_host_pool_is_planned_as_a_zero_row(device: str) -> None:
    world = make_world(resident=0.0)
    world.tables.page_table[1, 2] = 2**31 - 1
    for _ in range(2):
        result = step(world, torch.tensor([[8, 3]], dtype=torch.int32), [1], device)
        assert (-1, int(result.out_rows[0, 0])) in result.plan.segment(0)
        assert -1 not in result.out_rows.tolist()[0]
        assert 8 not in result.hot.positions[1]


@devices
def test_a_held_slot_outside_the_host_pool_is_no_hit(device: str) -> None:
    world = make_world(resident=0.0)
    positions = torch.tensor([[8, 3]], dtype=torch.int32)
    step(world, positions, [1], device)
    slot = int(world.hot.keys[1, 0])
    world.num_slots = slot
    assert (-1, world.tables.hot_pages[1, 0] * 4 + 2) in step(world, positions, [1], device).plan.segment(0)


@devices
def test_negative_resident_page_means_not_resident(device: str) -> None:
    world = make_world(resident=0.0)
    world.tables.resident_page[world.tables.page_table[1, 0]] = -4
    assert step(world, torch.tensor([[0, 1]], dtype=torch.int32), [1], device).stats == [0, 2, 0, 0]


@devices
def test_non_contiguous_views(device: str) -> None:
    world = make_world(resident=0.2)
    plain = make_world(resident=0.2)
    positions, rows = select(world, 2, 6), torch.tensor([4, 1], dtype=torch.int32)
    expected = run(plain, positions, rows, "cpu", "reference")
    stack = HotState.empty(5, 32, device, groups=3)
    hot = HotState(*(tensor[1, :, ::2] for tensor in stack))
    hot.reset()
    hot.lru.copy_(torch.arange(16, device=device))
    wide = torch.full((4, 12), -1, dtype=torch.int32, device=device)
    wide[::2, ::2] = positions.to(device)
    out = torch.zeros(6, 4, dtype=torch.int32, device=device)
    table = torch.zeros(16, 5, dtype=torch.int32, device=device).T
    tables = Tables(table, *(tensor.to(device) for tensor in world.tables[1:]))
    tables.page_table.copy_(world.tables.page_table)
    untouched = [tensor[[0, 2]].clone() for tensor in stack]
    odd_rows = rows.repeat_interleave(2).to(device)[::2]
    scratch, plan = Scratch.empty(2, 16, 4, 16, device), CopyPlan.empty(12, 2, device)
    stats = torch.zeros(4, dtype=torch.int64, device=device)
    args = (wide[::2, ::2], odd_rows, tables, hot, scratch, plan, out[:, ::2].T, stats)
    resolve.resolve(*args, page_size=4, num_slots=world.num_slots)
    assert torch.equal(out[:, ::2].T.cpu(), expected.out_rows)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(hot, expected.hot, strict=True))
    assert all(torch.equal(old, new[[0, 2]]) for old, new in zip(untouched, stack, strict=True))


@pytest.mark.skipif(not backend.INTERPRETED, reason="needs Triton with TRITON_INTERPRET=1")
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_sequences(data: st.DataObject) -> None:
    query_rows = data.draw(st.integers(1, 3))
    world = make_world(query_rows=query_rows, resident=data.draw(st.sampled_from([0.0, 0.4])), max_requests=3)
    for _ in range(data.draw(st.integers(1, 5))):
        requests = data.draw(st.lists(st.integers(0, 2), unique=True, min_size=1, max_size=3))
        requests.insert(data.draw(st.integers(0, len(requests))), -1)
        shape = (len(requests) * query_rows, data.draw(st.integers(1, 5)))
        size = shape[0] * shape[1]
        flat = data.draw(st.lists(st.integers(-1, 63), min_size=size, max_size=size))
        positions, before = torch.tensor(flat, dtype=torch.int32).reshape(shape), world.hot
        check_step(world, before, positions, requests, step(world, positions, requests, "cpu"))
