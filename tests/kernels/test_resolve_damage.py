"""`resolve` on damaged or impossible state: a miss or -1, never an access out of bounds."""

from __future__ import annotations

import pytest
import torch
from resolve_world import devices, make_world, run, step

from hisparse_sgl.kernels.state import HotState


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
    world.tables.hot_pages[world.regions[1]] = 0
    result = step(world, torch.tensor([[2, 9, 9, 5]], dtype=torch.int32), [1], device)
    assert result.out_rows.tolist() == [[162, -1, -1, -1]]
    assert (result.stats, int(result.plan.count)) == ([0, 3, 1, 3], 0)


@devices
@pytest.mark.parametrize("region", [-1, 6, -7, 2**31 - 1, -(2**31)])
def test_no_region_or_one_out_of_range_serves_only_what_is_resident(region: int, device: str) -> None:
    world = make_world(resident=0.0)
    world.tables.resident_page[world.tables.page_table[1, 0]] = 40
    step(world, torch.arange(8, dtype=torch.int32).repeat(2, 1), [1, 3], device)
    before = HotState(*(tensor.clone() for tensor in world.hot))
    world.regions[1] = region
    positions = torch.tensor([[2, 9, 9, 5], [4, 9, -1, 5]], dtype=torch.int32)
    result = step(world, positions, [1, 3], device)
    assert result.out_rows[0].tolist() == [162, -1, -1, -1]
    assert result.stats == [2, 6, 1, 3]
    assert (result.plan.segment(0), len(result.plan.segment(1))) == ([], 1)
    others = [row for row in range(6) if row != world.regions[3]]
    assert all(torch.equal(old[others], new[others]) for old, new in zip(before, result.hot, strict=True))


@devices
def test_a_padded_row_leaves_a_region_that_it_names_alone(device: str) -> None:
    world = make_world(resident=0.0)
    world.hot.lru[:] = -3
    positions, padding = torch.arange(4, dtype=torch.int32)[None], torch.tensor([-1], dtype=torch.int32)
    world.regions_of = lambda requests: torch.tensor([2], dtype=torch.int32)  # type: ignore[method-assign]
    result = run(world, positions, padding, device)
    assert result.out_rows.tolist() == [[-1] * 4]
    assert result.stats == [0, 0, 0, 0]
    assert all(torch.equal(old, new) for old, new in zip(world.hot, result.hot, strict=True))


@devices
def test_corrupt_hot_entries_are_read_again(device: str) -> None:
    world = make_world(resident=0.0)
    positions = torch.arange(8, dtype=torch.int32)[None]
    step(world, positions, [1], device)
    region = world.regions[1]
    world.hot.keys[region, :3] = torch.tensor([-9, 2**31 - 1, world.num_slots])
    world.hot.hints[region, 3:6] = torch.tensor([-5, 16, 2**15 - 1])
    world.hot.keys[region, 6] = world.hot.keys[region, 7] + 1
    result = step(world, positions, [1], device)
    assert result.stats == [1, 8, 0, 0]
    assert len(result.plan.segment(0)) == 7
    assert step(world, positions, [1], device).stats == [8, 8, 0, 0]


@devices
def test_corrupt_order_resets_one_region(device: str) -> None:
    world = make_world(resident=0.0)
    positions = torch.arange(8, dtype=torch.int32).repeat(2, 1)
    step(world, positions, [1, 2], device)
    world.hot.lru[world.regions[1], 5] = 16
    result = step(world, positions, [1, 2], device)
    assert result.stats[:2] == [8, 16]
    assert result.hot.lru[world.regions[1]].tolist() == [*range(8, 16), *range(8)]
    world.hot.check_integrity()


@devices
def test_a_repeated_row_in_the_order_stays_in_bounds(device: str) -> None:
    world = make_world(resident=0.0)
    step(world, torch.arange(8, dtype=torch.int32)[None], [1], device)
    region = world.regions[1]
    world.hot.lru[region] = torch.tensor([5] * 15 + [14])
    before = HotState(*(tensor.clone() for tensor in world.hot))
    positions, rows = torch.arange(4, 16, dtype=torch.int32)[None], torch.ones(1, dtype=torch.int32)
    result = run(world, positions, rows, device)
    others = [row for row in range(6) if row != region]
    assert all(torch.equal(old[others], new[others]) for old, new in zip(before, result.hot, strict=True))
    assert {row // 4 for row in result.out_rows[0].tolist()} <= set(world.tables.hot_pages[region].tolist())
    assert result.hot.lru[region].min() >= 0 and result.hot.lru[region].max() < 16


@devices
def test_of_two_rows_with_one_key_the_hinted_one_is_used(device: str) -> None:
    world = make_world(resident=0.0)
    positions = torch.arange(4, dtype=torch.int32)[None]
    step(world, positions, [1], device)
    region = world.regions[1]
    world.hot.keys[region, [9, 12]] = int(world.hot.keys[region, 2])
    pages = world.tables.hot_pages[region].tolist()
    for row in (2, 9):
        world.hot.hints[region, 2] = row
        result = step(world, positions, [1], device)
        assert (int(result.out_rows[0, 2]), result.stats) == (pages[row // 4] * 4 + row % 4, [4, 4, 0, 0])


@devices
def test_slot_outside_the_host_pool_is_planned_as_a_zero_row(device: str) -> None:
    world = make_world(resident=0.0)
    world.tables.page_table[1, 2] = 2**31 - 1
    for _ in range(2):
        result = step(world, torch.tensor([[8, 3]], dtype=torch.int32), [1], device)
        assert (-1, int(result.out_rows[0, 0])) in result.plan.segment(0)
        assert -1 not in result.out_rows.tolist()[0]
        assert int(result.hot.hints[world.regions[1], 8]) == -1


@devices
def test_a_held_slot_outside_the_host_pool_is_no_hit(device: str) -> None:
    world = make_world(resident=0.0)
    positions = torch.tensor([[8, 3]], dtype=torch.int32)
    step(world, positions, [1], device)
    region = world.regions[1]
    world.num_slots = int(world.hot.keys[region, 0])
    assert (-1, world.tables.hot_pages[region, 0] * 4 + 2) in step(
        world, positions, [1], device
    ).plan.segment(0)


@devices
def test_negative_resident_page_means_not_resident(device: str) -> None:
    world = make_world(resident=0.0)
    world.tables.resident_page[world.tables.page_table[1, 0]] = -4
    assert step(world, torch.tensor([[0, 1]], dtype=torch.int32), [1], device).stats == [0, 2, 0, 0]
