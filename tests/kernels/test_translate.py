"""`translate`: slots and positions to device rows."""

from __future__ import annotations

import pytest
import torch

from hisparse_sgl.kernels import backend
from hisparse_sgl.kernels.translate import translate

INTERPRETER = pytest.param(
    "interpreter", marks=pytest.mark.skipif(not backend.INTERPRETED, reason="needs TRITON_INTERPRET=1")
)
TRITON = pytest.param(
    "triton",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
implementations = pytest.mark.parametrize("wanted", ["reference", INTERPRETER, TRITON])
RESIDENT = [0, 7, 0, -2, 3]


def int32(values: list, wanted: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda" if wanted == "triton" else "cpu")


@implementations
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots(dtype: torch.dtype, wanted: str) -> None:
    table = int32(RESIDENT, wanted)
    slots = int32([[4, 7, 16, 19], [0, 3, 8, 12], [-1, 20, 2**31 - 1, -(2**31)]], wanted).to(dtype)
    rows = translate(slots, table, 4, backend=wanted)
    assert rows.dtype == torch.int32
    assert rows.tolist() == [[28, 31, 12, 15], [0, 3, -1, -1], [-1, -1, -1, -1]]
    assert translate(slots[0, 1], table, 4, backend=wanted).item() == 31
    assert translate(slots[:, ::2], table, 4, backend=wanted).tolist() == [[28, 12], [0, -1], [-1, -1]]
    assert translate(slots[:0], table, 4, backend=wanted).shape == (0, 4)


@implementations
def test_int64_slots_past_32_bits(wanted: str) -> None:
    slots = int32([4], wanted).long() + torch.tensor([0, 2**32, 2**40], device=int32([], wanted).device)
    assert translate(slots, int32(RESIDENT, wanted), 4, backend=wanted).tolist() == [28, -1, -1]


@implementations
def test_positions(wanted: str) -> None:
    table = int32(RESIDENT, wanted)
    pages = int32([[1, 2, 4, 0], [0, 4, 99, -1]], wanted)
    requests = int32([1, -1, 0, 2], wanted)
    positions = int32([[5, 0, 9, 13, 16, -1], [1] * 6, [1, 5, 10, 12, 99, 3], [1] * 6], wanted)
    rows = translate(positions, table, 4, page_table=pages, request_rows=requests, backend=wanted)
    assert rows.tolist() == [[13, -1, -1, -1, -1, -1], [-1] * 6, [29, -1, 14, -1, -1, 31], [-1] * 6]
    turned = pages.T.contiguous().T
    again = translate(positions, table, 4, page_table=turned, request_rows=requests, backend=wanted)
    assert torch.equal(again, rows)


@implementations
def test_random_slots_against_a_loop(wanted: str) -> None:
    torch.manual_seed(0)
    resident = torch.where(torch.rand(50) < 0.5, torch.randperm(50) + 1, 0)
    resident[0] = 0
    slots = torch.randint(-10, 900, (700,))
    known = [int(resident[slot // 16]) if 0 <= slot < 800 else 0 for slot in slots.tolist()]
    expected = [
        page * 16 + slot % 16 if page or 0 <= slot < 16 else -1
        for page, slot in zip(known, slots.tolist(), strict=True)
    ]
    table = int32(resident.tolist(), wanted)
    assert translate(int32(slots.tolist(), wanted), table, 16, backend=wanted).tolist() == expected


def test_bad_arguments_are_named() -> None:
    table, slots = int32(RESIDENT, "reference"), int32([[1, 2]], "reference")
    with pytest.raises(ValueError, match="page_table and request_rows"):
        translate(slots, table, 4, page_table=slots)
    with pytest.raises(ValueError, match="page_size=3"):
        translate(slots, table, 3)
    with pytest.raises(ValueError, match=r"slots\.dtype"):
        translate(slots.short(), table, 4)
    with pytest.raises(ValueError, match=r"request_rows\.shape"):
        translate(slots, table, 4, page_table=slots, request_rows=table)
