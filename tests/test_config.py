"""Settings that cannot work are refused where they are made, by name, value, limit and fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hisparse_sgl.config import MAX_HOT_ROWS, HiSparseConfig, Sizes
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout
from hisparse_sgl.pool import HiSparsePool

GOOD = HiSparseConfig(top_k=2, context_len=24, host_pages=10, device_pages=8)


def make_layout(page_size: int = 4, row_parts: tuple[int, ...] = (16,)) -> KVLayout:
    return KVLayout.single(2, row_parts, page_size, (IndexGroup(0, (1,)),), 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (field, bad)
            for field in ("top_k", "context_len", "query_rows", "max_requests")
            for bad in (0, 2.0)
        ),
        *((field, bad) for field in ("host_pages", "device_pages") for bad in (1, "8")),
        *(
            (field, 0)
            for field in ("max_hot_requests", "device_buffer_size", "max_spill_pages", "admission_window")
        ),
        ("top_k", True),
        ("eviction_policy", "fifo"),
        ("kernels", "cuda"),
        *((field, "yes") for field in ("eager_host_mirror", "kv_events", "poison")),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_its_limit(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is {value!r}, it must be .+: \w+"):
        replace(GOOD, **{field: value})


@pytest.mark.parametrize(
    ("changes", "page_size", "words"),
    [
        ({}, 6, ["page_size is 6", "power of two", "use"]),
        (
            {"device_buffer_size": 4, "top_k": 5},
            4,
            ["device_buffer_size is 4", "1 x 5 = 5", "set it to at least 5"],
        ),
        (
            {"device_buffer_size": 4, "query_rows": 3},
            4,
            ["device_buffer_size is 4", "3 x 2 = 6", "at least 6"],
        ),
        ({"device_buffer_size": 6}, 4, ["device_buffer_size is 6", "multiple of page_size 4", "use 8"]),
        (
            {"device_buffer_size": MAX_HOT_ROWS + 4},
            4,
            ["device_buffer_size is 32772", "the limit is 32768", "lower device_buffer_size"],
        ),
        ({"top_k": MAX_HOT_ROWS}, 4, ["device_buffer_size is 65536", "the limit is 32768", "top_k"]),
        ({"device_pages": 5}, 4, ["device_pages is 5", "the limit is 6", "Raise device_pages"]),
        (
            {"context_len": 2**20 + 1},
            4,
            ["context_len is 1048577", "the limit is 1048576", "lower context_len"],
        ),
        ({"host_pages": 6}, 4, ["host_pages is 6", "the limit is 7", "Raise host_pages", "context_len 24"]),
    ],
)
def test_sizes_that_do_not_fit_each_other(changes: dict[str, int], page_size: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        Sizes.of(replace(GOOD, **changes), page_size)
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"device_pages": 6},
        {"host_pages": 7},
        {"device_buffer_size": MAX_HOT_ROWS, "device_pages": 2 * MAX_HOT_ROWS // 4 + 4},
        {"device_buffer_size": 4, "query_rows": 2},
    ],
)
def test_a_value_at_its_limit_is_taken(changes: dict[str, int]) -> None:
    Sizes.of(replace(GOOD, **changes), 4)


def test_the_smallest_pool_serves_one_request_up_to_the_context_limit() -> None:
    with HiSparsePool(make_layout(), replace(GOOD, device_pages=6, host_pages=7)) as pool:
        pool.admit("r", [7])
        for _ in range(24):
            slots = pool.extend("r", 1)
            assert isinstance(slots, torch.Tensor)
            pool.begin_step(["r"])
            pool.step_done()
            pool.check_integrity()


def test_sizes_of_the_defaults() -> None:
    sizes = Sizes.of(HiSparseConfig(top_k=2048, context_len=131072, host_pages=4096, device_pages=2000), 64)
    assert sizes == Sizes(
        page_size=64,
        page_rows=64,
        hot_rows=4096,
        hot_pages=64,
        hot_regions=31,
        context_pages=2048,
        transition_watermark=200,
        spill_budget=2048,
    )


@pytest.mark.parametrize(("most", "regions"), [(None, 5), (1, 1), (4, 4), (100, 5)])
def test_the_number_of_hot_regions(most: int | None, regions: int) -> None:
    """No more than requests, than regions fit on the device, and than are allowed."""
    sizes = {"context_len": 16, "host_pages": 9, "max_hot_requests": most}
    few_pages = HiSparseConfig(top_k=4, device_pages=12, max_requests=6, **sizes)
    few_requests = HiSparseConfig(top_k=4, device_pages=99, max_requests=5, **sizes)
    assert [Sizes.of(config, 4).hot_regions for config in (few_pages, few_requests)] == [regions] * 2


@pytest.mark.parametrize("page_size", [0, 3, 6, 2048])
def test_a_page_size_that_is_no_power_of_two(page_size: int) -> None:
    with pytest.raises(ValueError, match=rf"page_size is {page_size}, the limit is a power of two .+: use"):
        make_layout(page_size)


@pytest.mark.parametrize("parts", [(15,), (16, 7), (8,), (0,)])
def test_rows_that_are_not_aligned(parts: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"parts\[[01]\]=\d+ must be a positive multiple of (16|8); pad the row"
    ):
        make_layout(row_parts=parts)


@pytest.mark.parametrize("host_pages", [2**30, 2**40, 2**52])
def test_a_host_pool_above_95_percent_of_ram(host_pages: int) -> None:
    with pytest.raises(
        ValueError, match=rf"num_pages is {host_pages} .+, the limit is .+95%.+: ask for fewer"
    ):
        HiSparsePool(make_layout(1024), replace(GOOD, host_pages=host_pages))


def test_a_backend_that_cannot_run_here_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"backend='triton' .+ needs"):
        HiSparsePool(make_layout(), replace(GOOD, kernels="triton"), device="cpu")


def test_a_refused_pool_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(HostPool, "close", lambda self: closed.append("host"))
    monkeypatch.setattr(DevicePool, "close", lambda self: closed.append("device"))
    with pytest.raises(ValueError, match="backend"):
        HiSparsePool(make_layout(), replace(GOOD, kernels="triton"), device="cpu")
    assert closed == ["device", "host"]
