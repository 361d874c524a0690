"""DevicePool: shapes, views that share memory, poison."""

from __future__ import annotations

import pytest
import torch

from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.layout import CacheGroup, IndexGroup, KVLayout

LAYOUT = KVLayout.single(3, (1152,), 16, (IndexGroup(0, (1,)), IndexGroup(2)), 132)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="puts the pool on a CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_shapes(device: str) -> None:
    pool = DevicePool(LAYOUT, 4, 7, device)
    assert pool.buffer.shape == (3, 4, 16 * 1152) and pool.index_rows.shape == (2, 7 * 16, 132)
    assert pool.buffer.numel() + pool.index_rows.numel() == LAYOUT.device_bytes(4, 7)
    assert pool.buffer.dtype == pool.index_rows.dtype == torch.uint8
    assert not pool.buffer.any() and not pool.index_rows.any()


def test_rows_is_a_view_by_device_row() -> None:
    pool = DevicePool(LAYOUT, 4, 7, "cpu")
    rows = pool.rows(1, torch.bfloat16)
    assert rows.shape == (4 * 16, 576) and rows.dtype == torch.bfloat16
    rows[2 * 16 + 5] = 1.5
    page = pool.layer(1)[2].view(16, 1152)
    assert torch.equal(page[5].view(torch.bfloat16), torch.full((576,), 1.5, dtype=torch.bfloat16))
    assert not page[:5].any() and not page[6:].any() and not pool.layer(0).any() and not pool.layer(2).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_poisoned_pages_are_nan(device: str, dtype: torch.dtype) -> None:
    pool = DevicePool(LAYOUT, 4, 7, device)
    pool.poison_pages([1, 3])
    for layer in range(3):
        nan = pool.rows(layer, dtype).float().isnan().view(4, -1)
        assert nan.all(dim=1).tolist() == [False, True, False, True]
        assert not nan[0].any() and not nan[2].any()


def test_poison_at_the_start_spares_the_null_pages() -> None:
    pool = DevicePool(LAYOUT, 4, 7, "cpu", poison=True)
    assert not pool.buffer[:, 0].any() and (pool.buffer[:, 1:] == 0xFF).all()
    assert not pool.index_rows[:, :16].any() and (pool.index_rows[:, 16:] == 0xFF).all()


@pytest.mark.parametrize("pages", [[0], [1, 4], [-1]])
def test_poison_outside_changes_nothing(pages: list[int]) -> None:
    pool = DevicePool(LAYOUT, 4, 7, "cpu")
    with pytest.raises(ValueError, match="pages has"):
        pool.poison_pages(pages)
    assert not pool.buffer.any()


def test_rows_refuses_what_is_not_adjacent() -> None:
    padded = RowFormat.make((576, 8), 16, align=576)
    layout = KVLayout((CacheGroup("c4", 1, padded, (IndexGroup(0),), 132),), 16)
    with pytest.raises(ValueError, match="one part"):
        DevicePool(layout, 2, 2, "cpu").rows(0, torch.uint8)
    padded = RowFormat.make((656,), 16, align=1024)
    layout = KVLayout((CacheGroup("kv", 1, padded, (IndexGroup(0),), 132),), 16)
    with pytest.raises(ValueError, match="padding"):
        DevicePool(layout, 2, 2, "cpu").rows(0, torch.uint8)


def test_sizes_and_close() -> None:
    for sizes, name in (((1, 2), "num_pages"), ((2, 1), "num_host_pages")):
        with pytest.raises(ValueError, match=f"{name} is 1"):
            DevicePool(LAYOUT, *sizes, "cpu")
    pool = DevicePool(LAYOUT, 2, 2, "cpu")
    pool.close()
    pool.close()
    for read in (lambda: pool.buffer, lambda: pool.index_rows, lambda: pool.layer(0)):
        with pytest.raises(ValueError, match="close"):
            read()


def test_no_indexer_rows() -> None:
    layout = KVLayout.single(1, (64,), 4, (IndexGroup(0),), 0)
    assert DevicePool(layout, 2, 2, "cpu", poison=True).index_rows.shape == (1, 8, 0)
