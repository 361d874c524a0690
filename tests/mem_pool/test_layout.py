"""Layouts: bytes by part, and refusals that name the field, the value, the limit and the fix."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.mem_pool.layout import CacheGroup, GroupBytes, IndexGroup, KVLayout, StateGroup

GROUPS = (IndexGroup(0, (1, 2)), IndexGroup(3))
ROW = RowFormat.make((656,), 64)


def test_bytes_of_a_dsa_model() -> None:
    layout = KVLayout.single(4, (656,), 64, GROUPS, 132)
    page = layout.host_group.bytes_per_page()
    assert (page.parts, page.padding, page.index_rows) == ((4 * 64 * 656,), 0, 2 * 64 * 132)
    assert layout.host_group.bytes_per_token() == 4 * 656
    assert layout.host_group.index_bytes_per_token() == 2 * 132
    assert layout.host_bytes(10) == 10 * 4 * 64 * 656
    assert layout.device_bytes(3, 10) == 3 * 4 * 64 * 656 + 10 * 2 * 64 * 132


def test_bytes_of_a_page_padded_row_of_four_tokens() -> None:
    row = RowFormat.make((576, 8), 64, align=576)
    c4 = CacheGroup("c4", 2, row, (IndexGroup(0, (1,)),), 132, tokens_per_row=4)
    window = CacheGroup("window", 1, RowFormat.make((576,), 256), (IndexGroup(0),), 0, host_backed=False)
    layout = KVLayout((window, c4), page_size=256)
    page = layout.host_group.bytes_per_page()
    assert layout.host_group is c4 and c4.page_size == 256
    assert page.parts == (2 * 64 * 576, 2 * 64 * 8) and page.padding == 2 * (37_440 - 37_376)
    assert page.rows == 2 * 37_440 and layout.host_bytes(5) == 5 * 2 * 37_440
    assert c4.bytes_per_token() == 2 * 37_440 / 256


def test_bytes_by_group() -> None:
    c4 = CacheGroup("c4", 2, RowFormat.make((576, 8), 64, align=576), (IndexGroup(0, (1,)),), 132, 4)
    c128 = CacheGroup(
        "c128", 3, RowFormat.make((576, 8), 2, align=576), tokens_per_row=128, host_backed=False
    )
    states = (StateGroup("window", 1000, 900), StateGroup("partial windows", 70))
    layout = KVLayout((c4, c128), 256, states)
    assert layout.bytes_by_group() == [
        GroupBytes("c4", "host", "pages", 2 * 37_440 / 256),
        GroupBytes("c4 indexer", "device", "pages", 132 / 4),
        GroupBytes("c128", "device", "pages", 3 * 1728 / 256),
        GroupBytes("window", "request", "state", 0.0, 1000, 900),
        GroupBytes("partial windows", "request", "empty", 0.0, 70, 0),
    ]
    assert layout.needs_state and layout.state_bytes == 1070 and layout.device_groups == (c128,)
    assert layout.device_page_bytes() == 64 * 132 + 3 * 1728
    assert layout.device_bytes(3, 10) == 3 * 2 * 37_440 + 10 * (64 * 132 + 3 * 1728)
    assert not KVLayout((c4, c128), 256, states[1:]).needs_state
    with pytest.raises(ValueError, match="give a layer of c128"):
        c128.group_of(0)


def test_index_groups() -> None:
    layout = KVLayout.single(4, (656,), 64, GROUPS, 132)
    assert [layout.group_of(layer).leader for layer in range(4)] == [0, 0, 0, 3]
    assert layout.host_group.index_layers == (0, 3)
    for layer in (-1, 4):
        with pytest.raises(ValueError, match=r"layer is -?\d, the limit is 0\.\.3"):
            layout.group_of(layer)


def test_equal_layouts_are_equal() -> None:
    assert KVLayout.single(4, (656,), 64, GROUPS, 132) == KVLayout.single(4, [656], 64, list(GROUPS), 132)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVLayout.single(4, (656,), 48, GROUPS, 132), "page_size is 48, the limit is a power of two"),
        (
            lambda: KVLayout.single(4, (656,), 2048, GROUPS, 132),
            r"page_size is 2048, the limit is .*1\.\.1024",
        ),
        (lambda: KVLayout.single(4, (650,), 64, GROUPS, 132), "650"),
        (lambda: KVLayout.single(4, (576, 9), 64, GROUPS, 132), "9"),
        (lambda: KVLayout.single(0, (656,), 64, (), 132), "num_layers is 0, the limit is >= 1"),
        (lambda: KVLayout.single(4, (656,), 64, GROUPS, -1), "index_row_bytes is -1"),
        (lambda: KVLayout.single(5, (656,), 64, GROUPS, 132), r"index_groups lacks layers \[4\]"),
        (lambda: KVLayout.single(3, (656,), 64, GROUPS, 132), r"names layer 3, the limit is 0\.\.2"),
        (lambda: KVLayout.single(2, (656,), 64, (IndexGroup(0, (1, 1)),), 1), "layer 1 twice"),
        (lambda: KVLayout.single(2, (656,), 64, (IndexGroup(1, (0,)),), 1), r"followers \(0,\) of leader 1"),
        (lambda: CacheGroup("kv", 4, ROW, GROUPS, 1, tokens_per_row=3), "tokens_per_row is 3"),
        (lambda: KVLayout((), 64), "exactly 1"),
        (lambda: CacheGroup("kv", 4, ROW), r"index_groups lacks layers \[0, 1, 2, 3\]"),
        (lambda: StateGroup("window", 0), "bytes_per_request is 0, the limit is >= 1"),
        (lambda: StateGroup("window", 8, -1), "boundary_bytes is -1, the limit is >= 0"),
        (
            lambda: KVLayout((CacheGroup("kv", 4, ROW, GROUPS, 1),), 64, (StateGroup("kv", 8),)),
            "one group a name",
        ),
        (lambda: KVLayout((CacheGroup("kv", 4, ROW, GROUPS, 1, host_backed=False),), 64), "exactly 1"),
        (lambda: KVLayout((CacheGroup("kv", 4, ROW, GROUPS, 1),) * 2, 64), "one group a name"),
        (lambda: KVLayout((CacheGroup("kv", 4, ROW, GROUPS, 1),), 32), "page_size is 64 tokens in group kv"),
    ],
)
def test_refusals(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
