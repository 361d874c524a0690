"""A bad call raises ``ValueError`` with the field, the value, the limit and the fix, and changes nothing."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.requests import Admission

Call = Callable[[HiSparsePool], object]
INT32 = torch.int32
ROW_BYTES, INDEX_BYTES = 16, 8


def snapshot(value: Any, seen: dict[int, int] | None = None) -> object:
    """Every field and every byte that can be reached, by content: equal for equal states."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, str | bytes | bytearray | int | float | Enum):
        return str(value) if isinstance(value, Enum | bytearray) else value
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, list) and set(map(type, value)) == {int}:
        return tuple(value)
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.contiguous().view(torch.uint8).numpy().tobytes())
    if isinstance(value, partial):
        return ("partial", value.func.__name__, snapshot(value.args, seen))
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    if isinstance(value, dict):
        return [(snapshot(key, seen), snapshot(item, seen)) for key, item in value.items()]
    if isinstance(value, set):
        return sorted(value)
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    fields = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}
    if fields:
        return (type(value).__name__, [(name, snapshot(item, seen)) for name, item in sorted(fields.items())])
    return [snapshot(item, seen) for item in value] if hasattr(value, "__iter__") else type(value).__name__


def zeros(count: int, width: int = ROW_BYTES) -> torch.Tensor:
    return torch.zeros(count, width, dtype=torch.uint8)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT32)


def forward(pool: HiSparsePool, rid: str, n: int) -> None:
    slots = pool.extend(rid, n)
    assert isinstance(slots, torch.Tensor)
    pool.begin_step([rid])
    for layer in range(2):
        pool.write(layer, slots, zeros(n))
    pool.write_index(0, slots, zeros(n, INDEX_BYTES))
    pool.step_done()


@pytest.fixture
def pool() -> Iterator[HiSparsePool]:
    """In the middle of a step: "r" has 13 tokens, 8 published; "hot" has a hot region; "gone" ended."""
    layout = KVLayout.single(2, (ROW_BYTES,), 4, (IndexGroup(0, (1,)),), INDEX_BYTES)
    config = HiSparseConfig(
        top_k=2, context_len=24, host_pages=20, device_pages=13, max_requests=4, kv_events=True
    )
    with HiSparsePool(layout, config) as pool:
        pool.admit("gone", [5] * 6)
        forward(pool, "gone", 6)
        pool.finish("gone")
        pool.admit("hot", list(range(50, 70)))
        forward(pool, "hot", 20)
        pool.admit("r", list(range(10)))
        forward(pool, "r", 10)
        pool.coordinator.collect()
        assert isinstance(pool.admit("late", list(range(100, 106))), Admission)
        assert pool.coordinator.requests["hot"].hot_pages
        pool.append_tokens("r", [10, 11, 12])
        slots = pool.extend("r", 3)
        assert isinstance(slots, torch.Tensor)
        pool.begin_step(["r", "hot"])
        for layer in range(pool.layout.host_group.num_layers):
            pool.write(layer, slots, zeros(3))
        yield pool


@pytest.fixture
def idle(pool: HiSparsePool) -> HiSparsePool:
    """The same pool between two steps: 12 tokens of "r" are published."""
    pool.step_done()
    pool.coordinator.collect()
    return pool


def check_refused(pool: HiSparsePool, call: Call, words: tuple[str, ...]) -> None:
    pool.check_integrity()
    before = snapshot(pool)
    with pytest.raises(ValueError) as raised:
        call(pool)
    assert snapshot(pool) == before
    pool.check_integrity()
    assert [word for word in words if word not in str(raised.value)] == []


def test_the_snapshot_sees_every_kind_of_change(pool: HiSparsePool) -> None:
    slot = pool.page_table(["r"])[0, 2:3] * 4
    before = snapshot(pool)
    assert snapshot(pool) == before
    changes: list[Call] = [
        lambda pool: pool.write(1, slot, zeros(1) + 1),
        lambda pool: pool.write_index(0, ints(9), zeros(1, INDEX_BYTES) + 1),
        lambda pool: pool.swap_in(0, torch.tensor([[3], [4]], dtype=INT32)),
        lambda pool: pool.append_tokens("r", [1]),
        lambda pool: pool.rewind("r", 12),
        lambda pool: pool.step_done(),
        lambda pool: pool.extend("r", 1),
        lambda pool: pool.abort("late"),
    ]
    for change in changes:
        change(pool)
        after = snapshot(pool)
        assert after != before
        before = after


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.admit("q", list(range(25))), ("token_ids holds 25", "context_len 24", "shorten")),
        (lambda p: p.admit("q", []), ("token_ids is empty", "at least 1", "pass the prompt")),
        (lambda p: p.admit("r", [1]), ("rid 'r' is running", "finish", "use another id")),
        (lambda p: p.extend("r", 12), ("n is 12", "the limit is 11", "raise context_len")),
        (lambda p: p.extend("r", 0), ("n is 0", "the limit is at least 1")),
        (lambda p: p.extend("r", -1), ("n is -1", "the limit is at least 1")),
        (lambda p: p.extend("r", 1.0), ("n is 1.0", "whole number", "convert")),
        (lambda p: p.append_tokens("r", [1] * 12), ("to 25 tokens", "context_len 24", "finish")),
        (lambda p: p.admit("q", [1], 1.5), ("extra_key=1.5", "float", "use str")),
    ],
)
def test_sizes_of_a_request(idle: HiSparsePool, call: Call, words: tuple[str, ...]) -> None:
    check_refused(idle, call, words)


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2.0],
        [1.0],
        [2**31],
        [-(2**31) - 1],
        [[1]],
        "text",
        b"bytes",
        np.ones(3),
        np.ones((2, 2), dtype=np.int64),
        np.array([2**31]),
        array("d", [1.0]),
        torch.ones(3),
        torch.ones(2, 2, dtype=torch.int64),
    ],
)
def test_token_ids_that_are_no_int32(idle: HiSparsePool, token_ids: Any) -> None:
    check_refused(idle, lambda p: p.admit("q", token_ids), ("token",))
    check_refused(idle, lambda p: p.append_tokens("r", token_ids), ("token",))


@pytest.mark.parametrize(
    "token_ids", [(1, 2, 3), np.array([1, 2, 3]), array("q", [1, 2, 3]), torch.tensor([1, 2, 3])]
)
def test_token_ids_of_every_container_name_the_same_prefix(pool: HiSparsePool, token_ids: Any) -> None:
    pool.append_tokens("r", token_ids)
    hasher = pool.coordinator.request("r").hasher
    assert hasher.num_tokens == 16
    assert hasher.page_tokens(3) == [12, 1, 2, 3]


@pytest.mark.parametrize("rid", ["never", "gone"])
@pytest.mark.parametrize(
    "call",
    [
        lambda p, rid: p.extend(rid, 1),
        lambda p, rid: p.append_tokens(rid, [1]),
        lambda p, rid: p.rewind(rid, 1),
        lambda p, rid: p.page_table(["r", rid]),
        lambda p, rid: p.retract(rid),
        lambda p, rid: p.finish(rid),
        lambda p, rid: p.abort(rid),
    ],
)
def test_a_request_that_is_not_running(
    idle: HiSparsePool, rid: str, call: Callable[[HiSparsePool, str], object]
) -> None:
    check_refused(idle, lambda p: call(p, rid), (f"rid {rid!r} is not running", "Admit it first"))


@pytest.mark.parametrize("end", ["finish", "abort", "retract"])
def test_an_id_can_be_used_again_after_its_request_ended(pool: HiSparsePool, end: str) -> None:
    pool.step_done()
    getattr(pool, end)("r")
    check_refused(pool, lambda p: getattr(p, end)("r"), ("rid 'r' is not running",))
    assert pool.admit("r", list(range(10))) == Admission(cached_tokens=8, resident_tokens=8)
    pool.check_integrity()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.begin_step(["r", "r"]), ("rids ['r', 'r']", "twice", "name each once")),
        (lambda p: p.begin_step(["r", "never"]), ("rid 'never' is not running", "Admit it first")),
        (lambda p: p.begin_step(["r"], 0), ("query_rows is 0", "between 1 and", "raise")),
        (lambda p: p.begin_step(["r"], 2), ("query_rows is 2", "the pool's 1", "raise")),
        (lambda p: p.begin_step(["r"], 1.0), ("query_rows is 1.0", "whole number", "convert")),
    ],
)
def test_batches(idle: HiSparsePool, call: Call, words: tuple[str, ...]) -> None:
    check_refused(idle, call, words)
    idle.begin_step(["r"])


def test_a_step_inside_a_step(pool: HiSparsePool) -> None:
    check_refused(pool, lambda p: p.begin_step(["late"]), ("begin_step was called", "call step_done"))
    check_refused(pool, lambda p: p.admit("q", [1]), ("admit was called", "call step_done"))
    check_refused(pool, lambda p: p.extend("r", 1), ("extend was called", "call step_done"))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (2, ("layer is 2", "the limit is 0..1", "give a layer")),
        (-1, ("layer is -1", "the limit is 0..1", "give a layer")),
        (0.0, ("layer is 0.0", "whole number", "convert")),
    ],
)
def test_layers_out_of_range(pool: HiSparsePool, layer: Any, words: tuple[str, ...]) -> None:
    check_refused(pool, lambda p: p.write(layer, p.page_table(["r"])[0, :1] * 4, zeros(1)), words)
    check_refused(pool, lambda p: p.rows(layer), words)


@pytest.mark.parametrize("layer", [1, 2, -1])
def test_layers_that_run_no_indexer(pool: HiSparsePool, layer: int) -> None:
    words = (f"layer is {layer}", "the limit", "use the leader of its group", "[0]")
    check_refused(pool, lambda p: p.index_rows(layer), words)
    check_refused(pool, lambda p: p.write_index(layer, ints(8), zeros(1, INDEX_BYTES)), words)
    check_refused(pool, lambda p: p.swap_in(layer, torch.zeros(2, 1, dtype=INT32)), words)


@pytest.mark.parametrize(
    "rows",
    [zeros(1, 8), zeros(2), zeros(16, 1), zeros(0), torch.zeros(16), torch.zeros(1, 16), torch.tensor(1.0)],
)
def test_rows_of_another_width(pool: HiSparsePool, rows: torch.Tensor) -> None:
    words = (f"rows has shape {tuple(rows.shape)}", "the limit is 1 rows of 16 bytes", "pass one whole row")
    check_refused(pool, lambda p: p.write(0, p.page_table(["r"])[0, :1] * 4, rows), words)


def test_rows_of_any_dtype_with_the_right_bytes(pool: HiSparsePool) -> None:
    slot = pool.page_table(["r"])[0, 3:4] * 4
    pool.write(0, slot, torch.full((1, 8), 1.0, dtype=torch.bfloat16))
    row = int(pool.translate(slot)[0])
    assert pool.rows(0)[row].view(torch.bfloat16).tolist() == [1.0] * 8


@pytest.mark.parametrize(
    "token_ids", [None, 7, {1: 2}, {1, 2}, iter([1, 2])], ids=lambda value: type(value).__name__
)
def test_tokens_of_a_wrong_type(idle: HiSparsePool, token_ids: Any) -> None:
    words = ("token_ids is", "the limit is a list", "convert")
    check_refused(idle, lambda p: p.admit("q", token_ids), words)
    check_refused(idle, lambda p: p.append_tokens("r", token_ids), words)


@pytest.mark.parametrize("rid", [7, None, ["r"]])
def test_a_request_id_that_is_no_string(idle: HiSparsePool, rid: Any) -> None:
    check_refused(idle, lambda p: p.admit(rid, [1]), ("rid is", "the limit is a string", "use str(rid)"))


def test_rows_of_one_column_with_any_stride(pool: HiSparsePool) -> None:
    column = torch.as_strided(torch.arange(1), (1, 1), (1, 0))
    pool.write_index(0, pool.page_table(["r"])[0, 3:4] * 4, column)


def test_index_rows_of_another_width(pool: HiSparsePool) -> None:
    words = ("rows has shape (1, 16)", "the limit is 1 rows of 8 bytes", "pass one whole row")
    check_refused(pool, lambda p: p.write_index(0, ints(8), zeros(1)), words)


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (ints(-1), ("slots has [-1]", "the limit is 0..79", "pass slots")),
        (ints(80), ("slots has [80]", "the limit is 0..79", "pass slots")),
        (torch.zeros(1), ("slots.dtype=torch.float32", "must be", "convert")),
        (torch.zeros(1, 1, dtype=INT32), ("slots.shape=(1, 1)", "must be", "reshape")),
    ],
)
def test_slots_that_cannot_be(pool: HiSparsePool, slots: torch.Tensor, words: tuple[str, ...]) -> None:
    check_refused(pool, lambda p: p.write(0, slots, zeros(slots.numel())), words)
    check_refused(pool, lambda p: p.write_index(0, slots, zeros(slots.numel(), INDEX_BYTES)), words)


def test_slots_that_are_not_resident(pool: HiSparsePool) -> None:
    free = next(page for page in range(1, 20) if not pool.coordinator.leases.is_resident(page)) * 4
    words = (f"slots has [{free}]", "the limit is slots on resident pages", "after begin_step")
    check_refused(pool, lambda p: p.write(0, ints(free), zeros(1)), words)


def test_a_step_with_an_unwritten_layer(idle: HiSparsePool) -> None:
    slots = idle.extend("r", 1)
    assert isinstance(slots, torch.Tensor)
    idle.begin_step(["r"])
    idle.write(0, slots, zeros(1))
    check_refused(idle, lambda p: p.step_done(), ("step_done", "layers [1] unwritten", "write every layer"))
    idle.write(1, slots, zeros(1))
    idle.step_done()


def test_slots_before_begin_step_are_not_resident(pool: HiSparsePool) -> None:
    pool.step_done()
    slots = pool.extend("late", 4)
    assert isinstance(slots, torch.Tensor)
    check_refused(pool, lambda p: p.write(0, slots, zeros(4)), ("resident", "after begin_step"))
    pool.begin_step(["late"])
    pool.write(0, slots, zeros(4))


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (torch.zeros(2, 3, dtype=INT32), ("positions has shape (2, 3)", "[2, 1..2]", "at most top_k")),
        (torch.zeros(1, 1, dtype=INT32), ("positions has shape (1, 1)", "[2, 1..2]", "batch")),
        (torch.zeros(3, 1, dtype=INT32), ("positions has shape (3, 1)", "[2, 1..2]", "batch")),
        (torch.zeros(2, 0, dtype=INT32), ("positions has shape (2, 0)", "[2, 1..2]")),
        (torch.zeros(2, dtype=INT32), ("positions has shape (2,)", "[2, 1..2]")),
        (torch.zeros(2, 1, 1, dtype=INT32), ("positions has shape (2, 1, 1)", "[2, 1..2]")),
        (torch.zeros(2, 1), ("positions.dtype=torch.float32", "torch.int32", "convert")),
        (torch.zeros(2, 1, dtype=torch.int64), ("positions.dtype=torch.int64", "torch.int32", "convert")),
    ],
)
def test_positions(pool: HiSparsePool, positions: torch.Tensor, words: tuple[str, ...]) -> None:
    check_refused(pool, lambda p: p.swap_in(0, positions), words)


def test_positions_that_a_request_does_not_have_are_padding(pool: HiSparsePool) -> None:
    rows = pool.swap_in(0, torch.tensor([[23, -1], [2**31 - 1, -5]], dtype=INT32))
    assert rows.tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("num_tokens", "words"),
    [
        (7, ("num_tokens is 7", "between 8 (published) and 13")),
        (0, ("num_tokens is 0", "between 8")),
        (14, ("num_tokens is 14", "and 13")),
        (9.0, ("num_tokens is 9.0", "whole number", "convert")),
    ],
)
def test_rewinds_outside_their_limits(pool: HiSparsePool, num_tokens: Any, words: tuple[str, ...]) -> None:
    check_refused(pool, lambda p: p.rewind("r", num_tokens), words)


def public_methods() -> list[str]:
    names = [name for name, _ in inspect.getmembers(HiSparsePool, inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name != "close"]


def test_the_list_of_methods_is_not_empty() -> None:
    assert {"admit", "swap_in", "step_done", "metrics", "flush"} <= set(public_methods())


@pytest.mark.parametrize("name", public_methods())
def test_every_method_after_close(pool: HiSparsePool, name: str) -> None:
    method = getattr(pool, name)
    needed = [
        p for p in inspect.signature(method).parameters.values() if p.default is inspect.Parameter.empty
    ]
    pool.close()
    with pytest.raises(ValueError, match="the pool is closed: make a new HiSparsePool"):
        method(*[None] * len(needed))


def test_close_is_safe_to_call_again(pool: HiSparsePool) -> None:
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        _ = pool.counters
