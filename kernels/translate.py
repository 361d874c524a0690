"""Translate: slots or positions to device rows through the residency table."""

from __future__ import annotations

import torch

from hisparse_sgl.kernels.backend import check_tensor, choose, jit, launch, tl

BLOCK = 256


@jit
def _translate_kernel(
    slots,
    out,
    resident_page,
    page_table,
    request_rows,
    total,
    columns,
    num_host_pages,
    max_requests,
    max_pages,
    resident_stride,
    table_stride,
    table_column_stride,
    requests_stride,
    P: tl.constexpr,
    BY_POSITION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    slot = tl.load(slots + index, mask=inside, other=-1).to(tl.int64)
    found = slot >= 0
    page = tl.where(found, slot // P, 0)
    offset = tl.where(found, slot % P, 0)
    if BY_POSITION:
        request = tl.load(request_rows + (index // columns) * requests_stride, mask=inside, other=-1)
        request = request.to(tl.int64)
        found &= (request >= 0) & (request < max_requests) & (page < max_pages)
        where = tl.where(found, request * table_stride + page * table_column_stride, 0)
        page = tl.load(page_table + where, mask=found, other=0).to(tl.int64)
        found &= page > 0
    known = found & (page < num_host_pages)
    device_page = tl.load(
        resident_page + tl.where(known, page, 0) * resident_stride, mask=known & (page > 0), other=0
    ).to(tl.int64)
    found = known & ((device_page > 0) | (page == 0))
    tl.store(out + index, tl.where(found, device_page * P + offset, -1).to(tl.int32), mask=inside)


def translate_reference(
    slots: torch.Tensor,
    resident_page: torch.Tensor,
    page_size: int,
    page_table: torch.Tensor | None = None,
    request_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The plain form of `translate`."""
    slots = slots.long()
    found = slots >= 0
    pages = torch.where(found, slots // page_size, 0)
    if page_table is not None and request_rows is not None:
        requests = request_rows.long()[:, None]
        found = found & (requests >= 0) & (requests < page_table.shape[0]) & (pages < page_table.shape[1])
        pages = page_table[torch.where(found, requests, 0), torch.where(found, pages, 0)].long()
        found &= pages > 0
    found = found & (pages < resident_page.numel())
    device_pages = torch.where(pages > 0, resident_page[torch.where(found, pages, 0)].long(), 0)
    found &= (device_pages > 0) | (pages == 0)
    return torch.where(found, device_pages * page_size + slots % page_size, -1).int()


def translate(
    slots: torch.Tensor,
    resident_page: torch.Tensor,
    page_size: int,
    *,
    page_table: torch.Tensor | None = None,
    request_rows: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Device row of each slot, -1 where it has none. Mutates nothing.

    Args:
        slots: int32 or int64, any shape: slots; with ``page_table`` positions [B, n]. Negative or out of
            range gives -1. Slots of page 0 (null) map to device page 0.
        resident_page: int32 [num_host_pages].
        page_size: rows a page.
        page_table: int32 [R, max_pages], makes the input positions; a page entry 0 gives -1.
        request_rows: int32 [B], state row of each batch row, -1 = padding; goes with ``page_table``.
        backend: see `backend.choose`.

    Returns:
        int32 rows of the shape of ``slots``, a new tensor.

    Raises:
        ValueError: a shape, dtype or device does not fit, or only one of the two optional tensors is given.
    """
    if (page_table is None) != (request_rows is None):
        raise ValueError("page_table and request_rows must be given together; pass both or neither")
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size={page_size} must be a power of two; use 64")
    shape = tuple(slots.shape) if page_table is None else (None, None)
    check_tensor("slots", slots, (torch.int32, torch.int64), shape)
    check_tensor("resident_page", resident_page, torch.int32, (None,), slots.device)
    if page_table is not None and request_rows is not None:
        check_tensor("page_table", page_table, torch.int32, (None, None), slots.device)
        check_tensor("request_rows", request_rows, torch.int32, (slots.shape[0],), slots.device)
    if slots.numel() == 0:
        return torch.empty_like(slots, dtype=torch.int32)
    if choose(slots, backend) == "reference":
        return translate_reference(slots, resident_page, page_size, page_table, request_rows)
    flat = slots.contiguous()
    out = torch.empty(slots.shape, dtype=torch.int32, device=slots.device)
    table = resident_page[None] if page_table is None else page_table
    requests = resident_page if request_rows is None else request_rows
    launch(
        _translate_kernel,
        (-(-slots.numel() // BLOCK),),
        slots.device,
        flat,
        out,
        resident_page,
        table,
        requests,
        slots.numel(),
        slots.shape[-1] if slots.ndim else 1,
        resident_page.numel(),
        *table.shape,
        resident_page.stride(0),
        *table.stride(),
        requests.stride(0),
        P=page_size,
        BY_POSITION=page_table is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
