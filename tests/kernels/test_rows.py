"""Byte layout of rows in pages."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hisparse_sgl.kernels.rows import RowFormat, row_view


def test_page_padded_two_part_layout() -> None:
    fmt = RowFormat.make((576, 8), 64, align=576)
    assert (fmt.row_bytes, fmt.page_bytes) == (584, 37440)
    assert fmt.part_start(1) == 64 * 576
    assert fmt.offset(64 * 3 + 5) == 3 * 37440 + 5 * 576
    assert fmt.offset(64 * 3 + 5, 1) == 3 * 37440 + 64 * 576 + 5 * 8


def test_one_part_row_lies_at_row_times_row_bytes() -> None:
    fmt = RowFormat.make((656,), 64)
    assert all(fmt.offset(row) == row * 656 for row in (0, 1, 63, 64, 1000, 2**31))


def test_row_view_is_a_view_at_the_offsets() -> None:
    fmt = RowFormat.make((32, 8), 4, align=64)
    buffer = torch.arange(3 * fmt.page_bytes).to(torch.uint8).reshape(3, fmt.page_bytes)
    for part in (0, 1):
        view = row_view(buffer, fmt, part)
        for row in range(12):
            start = fmt.offset(row, part)
            assert torch.equal(view[row // 4, row % 4], buffer.flatten()[start : start + fmt.parts[part]])
    row_view(buffer, fmt)[2, 3] = 7
    assert buffer.flatten()[fmt.offset(11)] == 7


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (((), 64, 64), "parts="),
        (((16, 8, 8), 64, 4096), "parts="),
        (((24,), 64, 1536), r"parts\[0\]=24"),
        (((16, 12), 64, 2048), r"parts\[1\]=12"),
        (((16,), 48, 768), "page_size=48"),
        (((16,), 64, 1000), "page_bytes=1000"),
        (((16,), 64, 1028), "page_bytes=1028"),
    ],
)
def test_bad_formats_are_named(arguments: tuple, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RowFormat(*arguments)


def test_bad_align_is_named() -> None:
    with pytest.raises(ValueError, match="align=0"):
        RowFormat.make((16,), 64, align=0)


def test_imports_without_torch() -> None:
    code = "import sys; import hisparse_sgl.kernels.rows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
