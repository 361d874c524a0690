"""`invalidate`: rewritten slots leave the hot state of their region, in every group."""

from __future__ import annotations

import pytest
import torch

from hisparse_sgl.kernels import backend
from hisparse_sgl.kernels.invalidate import invalidate
from hisparse_sgl.kernels.state import HotState

INTERPRETER = pytest.param(
    "interpreter", marks=pytest.mark.skipif(not backend.INTERPRETED, reason="needs TRITON_INTERPRET=1")
)
TRITON = pytest.param(
    "triton",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
implementations = pytest.mark.parametrize("wanted", ["reference", INTERPRETER, TRITON])


@implementations
@pytest.mark.parametrize("hot_rows", [5, 64, 4096])
def test_named_slots_leave_and_all_else_stays(hot_rows: int, wanted: str) -> None:
    torch.manual_seed(hot_rows)
    groups, regions = 3, 4
    keys = torch.stack([torch.randperm(2 * hot_rows)[:hot_rows] for _ in range(groups * regions)])
    keys = keys.reshape(groups, regions, hot_rows).int()
    pairs = [
        (1, int(keys[0, 1, 0])),
        (1, int(keys[2, 1, -1])),
        (3, int(keys[1, 3, 2])),
        (1, int(keys[0, 1, 0])),
    ]
    pairs += [(-1, int(keys[0, 0, 0])), (0, -1), (4, 3), (2, 2 * hot_rows)]
    gone = torch.zeros_like(keys, dtype=torch.bool)
    for region, slot in pairs[:4]:
        gone[:, region] |= keys[:, region] == slot
    expected = torch.where(gone, -1, keys)
    device = "cuda" if wanted == "triton" else "cpu"
    result = keys.to(device)
    rows = torch.tensor(pairs, dtype=torch.int32, device=device)
    invalidate(result, rows[:, 0], rows[:, 1], backend=wanted)
    assert gone.sum() >= 3
    assert torch.equal(result.cpu(), expected)


@implementations
def test_views_with_strides_and_empty_calls(wanted: str) -> None:
    device = "cuda" if wanted == "triton" else "cpu"
    stack = HotState.empty(3, 8, 16, device, groups=4)
    stack.keys[:] = 5
    keys = stack.keys[::2, :, ::2]
    some = torch.tensor([2, 5], dtype=torch.int32, device=device)
    invalidate(keys, some[:0], some[:0], backend=wanted)
    assert int((stack.keys == -1).sum()) == 0
    invalidate(keys, some[:1], some[1:], backend=wanted)
    assert bool((keys[:, 2] == -1).all())
    assert int((stack.keys == -1).sum()) == 2 * 4


def test_bad_arguments_are_named() -> None:
    keys, rows = torch.zeros(1, 2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"keys\.shape"):
        invalidate(keys[0], rows, rows)
    with pytest.raises(ValueError, match=r"keys\.dtype"):
        invalidate(keys.long(), rows, rows)
    with pytest.raises(ValueError, match=r"slots\.shape"):
        invalidate(keys, rows, rows[:1])
