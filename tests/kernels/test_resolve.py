"""`resolve`: kernel against reference, bit for bit, and what every step must hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resolve_world import CPU, CUDA, World, check_step, devices, make_world, run, select, step

from hisparse_sgl.kernels import backend, resolve
from hisparse_sgl.kernels.state import CopyPlan, HotState, Scratch, Tables


@pytest.mark.parametrize("device", [pytest.param("reference"), CPU, CUDA])
def test_worked_example(device: str) -> None:
    """top_k 8, 16 hot rows, slot 150 on a resident page: pages of one slot make positions equal slots."""
    keys = [100, 200, 300, 400, 500, 600, 750, 800, 900, 1000, 1050, 1200, 1300, 1400, 1500, 1600]
    tables = Tables.empty(1, 2000, 2000, 1, 16)
    tables.page_table[0] = torch.arange(2000)
    tables.hot_pages[0] = torch.arange(1, 17)
    tables.resident_page[150] = 99
    hot = HotState.empty(1, 16, 2000)
    hot.keys[0] = torch.tensor(keys)
    hot.hints[0, keys] = torch.arange(16, dtype=torch.int16)
    hot.lru[0] = torch.tensor([3, 1, 5, 0, 7, 2, 4, 6, *range(8, 16)])
    world = World(tables, hot, [0], 1, 1, 2000)
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
    assert result.hot.keys[0, [3, 5]].tolist() == [700, 1100]
    assert result.hot.hints[0, [700, 1100]].tolist() == [3, 5]
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
@pytest.mark.parametrize("parts", [1, 4])
def test_programs_share_a_lookup(parts: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_parts", lambda *args: parts)
    world = make_world(page_size=16, hot_rows=144, query_rows=2)
    for index in range(4):
        before = world.hot
        if index == 2:
            world.hot.lru[world.regions[1], 100] = 144
        positions = select(world, 2, 70, window=300)
        result = step(world, positions, [1, 4], device)
        if index != 2:
            check_step(world, before, positions, [1, 4], result)


@devices
def test_the_largest_context_and_hot_region(device: str) -> None:
    hot_rows, context = resolve.MAX_HOT_ROWS, resolve.MAX_CONTEXT
    world = make_world(page_size=64, hot_rows=hot_rows, max_pages=context // 64, max_requests=1)
    for _ in range(3):
        before = world.hot
        positions = select(world, 1, 300, window=500)
        positions[0, :9] = torch.randint(0, context, (9,))
        check_step(world, before, positions, [0], step(world, positions, [0], device))


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
    assert (result.stats, int(result.plan.count)) == ([0, 0, 3, 0], 0)


@devices
def test_misses_take_the_oldest_rows_in_position_order(device: str) -> None:
    world = make_world(resident=0.0)
    region = world.regions[1]
    world.hot.lru[region] = torch.arange(15, -1, -1)
    result = step(world, torch.tensor([[9, 3, 6, 3]], dtype=torch.int32), [1], device)
    assert result.hot.hints[region, [3, 6, 9]].tolist() == [15, 14, 13]
    assert result.stats == [0, 3, 0, 0]


@devices
def test_a_region_that_changes_hands_holds_nothing(device: str) -> None:
    """The new owner of a region meets the old hints, but no key."""
    world = make_world(resident=0.0)
    positions = torch.arange(8, dtype=torch.int32)[None]
    step(world, positions, [1], device)
    world.hot.reset(torch.tensor([world.regions[1]]))
    world.regions[1], world.regions[3] = world.regions[3], world.regions[1]
    assert step(world, positions, [3], device).stats == [0, 8, 0, 0]


@devices
def test_non_contiguous_views(device: str) -> None:
    world = make_world(resident=0.2)
    plain = make_world(resident=0.2)
    positions, rows = select(world, 2, 6), torch.tensor([4, 1], dtype=torch.int32)
    expected = run(plain, positions, rows, "cpu", "reference")
    stack = HotState.empty(6, 32, 128, device, groups=3)
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
    odd_rows = [ids.repeat_interleave(2).to(device)[::2] for ids in (rows, world.regions_of(rows))]
    scratch, plan = Scratch.empty(2, 64, 16, device), CopyPlan.empty(12, 2, device)
    stats = torch.zeros(4, dtype=torch.int64, device=device)
    args = (wide[::2, ::2], *odd_rows, tables, hot, scratch, plan, out[:, ::2].T, stats)
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
