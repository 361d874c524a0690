"""Invalidate: forget hot rows whose slot was rewritten in place (re-prefill, rejected drafts)."""

from __future__ import annotations

import torch

from hisparse_sgl.kernels.backend import check_tensor, choose, jit, launch, power_of_two, tl

BLOCK = 2048


@jit
def _invalidate_kernel(
    keys,
    region_rows,
    slots,
    num_regions,
    keys_group_stride,
    keys_stride,
    keys_row_stride,
    regions_stride,
    slots_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    region = tl.load(region_rows + entry * regions_stride).to(tl.int64)
    slot = tl.load(slots + entry * slots_stride)
    wanted = (region >= 0) & (region < num_regions) & (slot >= 0)
    limit = tl.where(wanted, H, 0)
    region = tl.where(wanted, region, 0)
    keys += group * keys_group_stride + region * keys_stride
    for start in range(0, H, BLOCK):
        row = (start + tl.arange(0, BLOCK)).to(tl.int64)
        key = tl.load(keys + row * keys_row_stride, mask=row < limit, other=-1)
        gone = (row < limit) & (key == slot)
        tl.store(keys + row * keys_row_stride, -1, mask=gone)


def invalidate_reference(keys: torch.Tensor, region_rows: torch.Tensor, slots: torch.Tensor) -> None:
    """The plain form of `invalidate`."""
    valid = (region_rows >= 0) & (region_rows < keys.shape[1]) & (slots >= 0)
    for region in region_rows[valid].unique().tolist():
        gone = torch.isin(keys[:, region], slots[valid & (region_rows == region)])
        keys[:, region].masked_fill_(gone, -1)


def invalidate(
    keys: torch.Tensor,
    region_rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Empty every hot row of region ``region_rows[i]`` that holds ``slots[i]``, in all groups, in one
    launch.

    Args:
        keys: int32 [G, S, H]; found entries become -1, so that hints at them miss. The LRU order stays.
        region_rows: int32 [n], -1 or out of range: ignored.
        slots: int32 [n], negative: ignored.
        backend: see `backend.choose`.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    check_tensor("keys", keys, torch.int32, (None, None, None))
    check_tensor("region_rows", region_rows, torch.int32, (None,), keys.device)
    check_tensor("slots", slots, torch.int32, (region_rows.numel(),), keys.device)
    if region_rows.numel() == 0 or keys.numel() == 0:
        return
    if choose(keys, backend) == "reference":
        invalidate_reference(keys, region_rows, slots)
        return
    launch(
        _invalidate_kernel,
        (region_rows.numel(), keys.shape[0]),
        keys.device,
        keys,
        region_rows,
        slots,
        keys.shape[1],
        *keys.stride(),
        region_rows.stride(0),
        slots.stride(0),
        H=keys.shape[2],
        BLOCK=min(BLOCK, power_of_two(keys.shape[2])),
        num_warps=4,
    )
