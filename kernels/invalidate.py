"""Invalidate: forget hot rows whose slot was rewritten in place (re-prefill, rejected drafts)."""

from __future__ import annotations

import torch

from hisparse_sgl.kernels.backend import check_tensor, choose, jit, launch, power_of_two, tl

BLOCK = 2048


@jit
def _invalidate_kernel(
    keys,
    request_rows,
    slots,
    max_requests,
    keys_group_stride,
    keys_stride,
    keys_row_stride,
    requests_stride,
    slots_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    request = tl.load(request_rows + entry * requests_stride).to(tl.int64)
    slot = tl.load(slots + entry * slots_stride)
    wanted = (request >= 0) & (request < max_requests) & (slot >= 0)
    limit = tl.where(wanted, H, 0)
    request = tl.where(wanted, request, 0)
    keys += group * keys_group_stride + request * keys_stride
    for start in range(0, H, BLOCK):
        row = (start + tl.arange(0, BLOCK)).to(tl.int64)
        key = tl.load(keys + row * keys_row_stride, mask=row < limit, other=-1)
        gone = (row < limit) & (key == slot)
        tl.store(keys + row * keys_row_stride, -1, mask=gone)


def invalidate_reference(keys: torch.Tensor, request_rows: torch.Tensor, slots: torch.Tensor) -> None:
    """The plain form of `invalidate`."""
    valid = (request_rows >= 0) & (request_rows < keys.shape[1]) & (slots >= 0)
    for request in request_rows[valid].unique().tolist():
        gone = torch.isin(keys[:, request], slots[valid & (request_rows == request)])
        keys[:, request].masked_fill_(gone, -1)


def invalidate(
    keys: torch.Tensor,
    request_rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Empty every hot row of request ``request_rows[i]`` that holds ``slots[i]``, in all groups, in one
    launch.

    Args:
        keys: int32 [G, R, H]; found entries become -1, so that hints at them miss. The LRU order stays.
        request_rows: int32 [n], -1 or out of range: ignored.
        slots: int32 [n], negative: ignored.
        backend: see `backend.choose`.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    check_tensor("keys", keys, torch.int32, (None, None, None))
    check_tensor("request_rows", request_rows, torch.int32, (None,), keys.device)
    check_tensor("slots", slots, torch.int32, (request_rows.numel(),), keys.device)
    if request_rows.numel() == 0 or keys.numel() == 0:
        return
    if choose(keys, backend) == "reference":
        invalidate_reference(keys, request_rows, slots)
        return
    launch(
        _invalidate_kernel,
        (request_rows.numel(), keys.shape[0]),
        keys.device,
        keys,
        request_rows,
        slots,
        keys.shape[1],
        *keys.stride(),
        request_rows.stride(0),
        slots.stride(0),
        H=keys.shape[2],
        BLOCK=min(BLOCK, power_of_two(keys.shape[2])),
        num_warps=4,
    )
