"""`batch_rows`: state rows and regions of a batch, with padding, on the device."""

from __future__ import annotations

import pytest
import torch

from hisparse_sgl.kernels import backend
from hisparse_sgl.kernels.batch_rows import batch_rows

INTERPRETER = pytest.param(
    "interpreter", marks=pytest.mark.skipif(not backend.INTERPRETED, reason="needs TRITON_INTERPRET=1")
)
TRITON = pytest.param(
    "triton",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
implementations = pytest.mark.parametrize("wanted", ["reference", INTERPRETER, TRITON])


def run(rows: torch.Tensor, num_real: int, hot_region: torch.Tensor, columns: int, wanted: str) -> list[int]:
    """The two lines of the answer, one after the other."""
    device = "cuda" if wanted == "triton" else "cpu"
    out = torch.full((2, columns), 77, dtype=torch.int32, device=device)
    real = torch.tensor([num_real], dtype=torch.int32, device=device)
    batch_rows(rows.to(device), real, hot_region.to(device), out, backend=wanted)
    return out.flatten().tolist()


@implementations
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_real", "kept"), [(3, 3), (0, 0), (4, 4), (9, 4), (-1, 0)])
def test_rows_behind_the_real_ones_are_padding(
    num_real: int, kept: int, dtype: torch.dtype, wanted: str
) -> None:
    rows, hot_region = torch.tensor([4, 0, 3, 1], dtype=dtype), torch.tensor([7, -1, 5, 2, -1]).int()
    pads = [-1] * (6 - kept)
    expected = [*[4, 0, 3, 1][:kept], *pads, *[-1, 7, 2, -1][:kept], *pads]
    assert run(rows, num_real, hot_region, 6, wanted) == expected


@implementations
def test_rows_out_of_range_are_padding(wanted: str) -> None:
    rows = torch.tensor([-1, 2, 5, -(2**31), 2**31 - 1, 2**40, 1])
    hot_region = torch.tensor([7, 6, 5, 4, 3], dtype=torch.int32)
    assert run(rows, 7, hot_region, 7, wanted) == [-1, 2, -1, -1, -1, -1, 1, -1, 5, -1, -1, -1, -1, 6]


@implementations
def test_more_rows_than_one_program_takes_and_strides(wanted: str) -> None:
    torch.manual_seed(0)
    rows, hot_region = torch.randperm(1200)[::2], torch.randint(-1, 90, (2400,), dtype=torch.int32)[::2]
    answer = run(rows, 599, hot_region, 700, wanted)
    assert answer[:700] == [*rows[:599].tolist(), *[-1] * 101]
    assert answer[700:] == [*hot_region[rows[:599]].tolist(), *[-1] * 101]


def test_bad_arguments_are_named() -> None:
    rows, real, out = torch.zeros(3), torch.zeros(1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    for args, words in (
        ((rows, real, real, out), r"request_rows\.dtype"),
        ((rows.int(), real[:0], real, out), r"num_real\.shape"),
        ((rows.int(), real, real.long(), out), r"hot_region\.dtype"),
        ((rows.int(), real, real, out[0]), r"out\.shape"),
        ((rows.int(), real, real, out), "request_rows has 3 rows, the limit is 2"),
    ):
        with pytest.raises(ValueError, match=words):
            batch_rows(*args)
