"""`resolve` refuses what does not fit together, by name; `state` finds damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hisparse_sgl.kernels.resolve import resolve
from hisparse_sgl.kernels.state import CopyPlan, HotState, Scratch, Tables


def arguments() -> dict[str, Any]:
    return {
        "positions": torch.zeros(2, 4, dtype=torch.int32),
        "request_rows": torch.tensor([0, 1], dtype=torch.int32),
        "region_rows": torch.tensor([2, -1], dtype=torch.int32),
        "tables": Tables.empty(5, 8, 20, 3, 4),
        "hot": HotState.empty(3, 16, 32),
        "scratch": Scratch.empty(2, 32, 16),
        "plan": CopyPlan.empty(8, 2),
        "out_rows": torch.zeros(2, 4, dtype=torch.int32),
        "stats": torch.zeros(4, dtype=torch.int64),
        "page_size": 4,
        "num_slots": 80,
    }


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"page_size": 6}, "page_size=6"),
        ({"page_size": 32}, "device_buffer_size=16"),
        ({"positions": torch.zeros(3, 4, dtype=torch.int32)}, r"positions\.shape"),
        ({"positions": torch.zeros(2, 4)}, r"positions\.dtype"),
        ({"request_rows": torch.zeros(2, dtype=torch.int64)}, r"request_rows\.dtype"),
        ({"region_rows": torch.zeros(2, dtype=torch.int64)}, r"region_rows\.dtype"),
        ({"region_rows": torch.zeros(3, dtype=torch.int32)}, r"region_rows\.shape"),
        ({"out_rows": torch.zeros(2, 5, dtype=torch.int32)}, r"out_rows\.shape"),
        ({"stats": torch.zeros(3, dtype=torch.int64)}, r"stats\.shape"),
        ({"tables": Tables.empty(5, 8, 20, 2, 4)}, r"tables\.hot_pages\.shape"),
        ({"tables": Tables.empty(5, 8, 20, 3, 5)}, r"tables\.hot_pages\.shape"),
        ({"hot": HotState.empty(3, 18, 32)}, "device_buffer_size=18"),
        ({"hot": HotState.empty(0, 16, 32)}, r"hot\.keys has 0 regions"),
        ({"hot": HotState.empty(3, 16, 28)}, r"hot\.hints\.shape"),
        ({"num_slots": -1}, "num_slots=-1"),
        ({"num_slots": 2**31 - 1}, "num_slots=2147483647"),
        ({"tables": Tables.empty(3, 2**18 + 1, 20, 3, 4)}, "max_pages \\* page_size = 262145 \\* 4"),
        ({"plan": CopyPlan.empty(7, 2)}, "plan.entries=7"),
        ({"plan": CopyPlan.empty(8, 1)}, "plan.starts=1"),
        ({"scratch": Scratch.empty(1, 32, 16)}, "scratch.bitmap rows=1"),
        ({"scratch": Scratch.empty(2, 32, 8)}, "scratch.slots columns=8"),
        ({"scratch": Scratch.empty(2, 32, 32)._replace(
            order=torch.zeros(2, 64, dtype=torch.int16)[:, ::2])}, "must be contiguous"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_nothing_changes(changes: dict[str, Any], field: str) -> None:
    args = arguments() | changes
    before = [tensor.clone() for tensor in args["hot"]]
    with pytest.raises(ValueError, match=field):
        resolve(**args)
    assert all(torch.equal(old, new) for old, new in zip(before, args["hot"], strict=True))


def test_more_rows_than_the_region_has_are_refused() -> None:
    wide = torch.zeros(2, 17, dtype=torch.int32)
    with pytest.raises(ValueError, match="device_buffer_size=16"):
        resolve(
            **(arguments() | {"positions": wide, "out_rows": wide.clone(), "plan": CopyPlan.empty(34, 2)})
        )
    tall = torch.zeros(10, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"query_rows \* top_k = 5 \* 4 = 20"):
        resolve(**(arguments() | {"positions": tall, "out_rows": tall.clone(), "query_rows": 5}))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_empty_batch_returns_an_empty_plan(shape: tuple[int, int]) -> None:
    args = arguments() | {"positions": torch.zeros(shape, dtype=torch.int32)}
    args |= {"out_rows": args["positions"].clone()}
    args |= {name: args[name][: shape[0]] for name in ("request_rows", "region_rows")}
    args["plan"].count.fill_(9)
    args["plan"].counts.fill_(9)
    resolve(**args)
    args["plan"].check_integrity(shape[0])


def damage_lru(hot: HotState) -> None:
    hot.lru[1, 0] = 3


def damage_hint(hot: HotState) -> None:
    hot.hints[1, 0] = 16


def damage_repeat(hot: HotState) -> None:
    hot.keys[2, :2] = 9


@pytest.mark.parametrize(
    ("damage", "words"),
    [(damage_lru, "permutations"), (damage_hint, r"hints span -1\.\.16"), (damage_repeat, r"slots \[9\]")],
)
def test_hot_state_damage_is_found(damage: Callable[[HotState], None], words: str) -> None:
    hot = HotState.empty(3, 16, 32)
    hot.check_integrity()
    damage(hot)
    with pytest.raises(RuntimeError, match=words):
        hot.check_integrity()
    hot.reset(torch.tensor([2, 1]))
    hot.hints.fill_(-1)
    hot.check_integrity()


def test_table_plan_and_scratch_damage_is_found() -> None:
    tables, plan, scratch = Tables.empty(5, 8, 20, 3, 4), CopyPlan.empty(8, 2), Scratch.empty(2, 32, 16)
    for structure, tensor, value, words in (
        (tables, tables.page_table[0, :1], 20, r"0\.\.20"),
        (tables, tables.resident_page[2:4], 5, r"device pages \[5\]"),
        (tables, tables.hot_pages[1, :2], 5, r"hot regions \[1\]"),
        (scratch, scratch.arrivals[1:], 1, "1 entries of scratch.arrivals"),
        (scratch, scratch.cursor, 1, "scratch.cursor"),
    ):
        structure.check_integrity()
        tensor.fill_(value)
        with pytest.raises(RuntimeError, match=words):
            structure.check_integrity()
        tensor.zero_()
    plan.check_integrity(2)
    plan.count.fill_(1)
    with pytest.raises(RuntimeError, match="count is 1"):
        plan.check_integrity(2)
