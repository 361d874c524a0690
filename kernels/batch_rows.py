"""Batch rows: state row and hot region of each row of a batch that is known on the device only."""

from __future__ import annotations

import torch

from hisparse_sgl.kernels.backend import check_tensor, choose, jit, launch, tl

BLOCK = 256


@jit
def _batch_rows_kernel(
    request_rows,
    num_real,
    hot_region,
    out,
    batch,
    max_requests,
    columns,
    requests_stride,
    region_stride,
    out_stride,
    out_column_stride,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = tl.minimum(tl.load(num_real), batch)
    request = tl.load(request_rows + index * requests_stride, mask=index < real, other=-1).to(tl.int64)
    known = (request >= 0) & (request < max_requests)
    request = tl.where(known, request, 0)
    region = tl.load(hot_region + request * region_stride, mask=known, other=-1)
    inside = index < columns
    tl.store(out + index * out_column_stride, tl.where(known, request, -1).to(tl.int32), mask=inside)
    tl.store(out + out_stride + index * out_column_stride, region, mask=inside)


def batch_rows_reference(
    request_rows: torch.Tensor, num_real: torch.Tensor, hot_region: torch.Tensor, out: torch.Tensor
) -> None:
    """The plain form of `batch_rows`."""
    rows = request_rows.long()
    real = torch.arange(rows.numel(), device=rows.device) < num_real
    known = real & (rows >= 0) & (rows < hot_region.numel())
    rows = torch.where(known, rows, 0)
    out.fill_(-1)
    out[0, : rows.numel()] = torch.where(known, rows, -1).int()
    out[1, : rows.numel()] = torch.where(known, hot_region[rows], -1)


def batch_rows(
    request_rows: torch.Tensor,
    num_real: torch.Tensor,
    hot_region: torch.Tensor,
    out: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Write the request and region rows of a batch for `resolve`, in one launch.

    Args:
        request_rows: int32 or int64 [B], state row of each batch row; out of range counts as padding.
        num_real: int32 [1], batch rows in use; those behind are padding.
        hot_region: int32 [R], region of each state row, -1 = none.
        out: int32 [2, at least B]; overwritten: state rows, regions. -1 for padding and behind the batch.
        backend: see `backend.choose`.

    Raises:
        ValueError: a shape, dtype or device does not fit, or ``out`` is too small.
    """
    device = request_rows.device
    check_tensor("request_rows", request_rows, (torch.int32, torch.int64), (None,))
    check_tensor("num_real", num_real, torch.int32, (1,), device)
    check_tensor("hot_region", hot_region, torch.int32, (None,), device)
    check_tensor("out", out, torch.int32, (2, None), device)
    batch, columns = request_rows.numel(), out.shape[1]
    if batch > columns:
        raise ValueError(f"request_rows has {batch} rows, the limit is {columns}: raise max_requests")
    if columns == 0:
        return
    if choose(out, backend) == "reference":
        batch_rows_reference(request_rows, num_real, hot_region, out)
        return
    launch(
        _batch_rows_kernel,
        (-(-columns // BLOCK),),
        device,
        request_rows,
        num_real,
        hot_region,
        out,
        batch,
        hot_region.numel(),
        columns,
        request_rows.stride(0),
        hot_region.stride(0),
        *out.stride(),
        BLOCK=BLOCK,
        num_warps=4,
    )
