"""Resolve: top-k positions to device rows, with the hot region's LRU and the copy plan."""

from __future__ import annotations

import torch

from hisparse_sgl.kernels.backend import check_tensor, choose, launch, power_of_two
from hisparse_sgl.kernels.resolve_kernel import resolve_kernel
from hisparse_sgl.kernels.resolve_reference import resolve_reference
from hisparse_sgl.kernels.state import CopyPlan, HotState, Scratch, Tables

MAX_HOT_ROWS = 32768
LRU_BLOCK = 4096
WORD_BLOCK = 2048
STATS = ("hot_hits", "hot_lookups", "resident_rows", "unserved")


def _check(
    positions: torch.Tensor,
    request_rows: torch.Tensor,
    tables: Tables,
    hot: HotState,
    scratch: Scratch,
    plan: CopyPlan,
    out_rows: torch.Tensor,
    stats: torch.Tensor,
    page_size: int,
    query_rows: int,
) -> None:
    """Raise ValueError, naming the tensor, when the arguments of `resolve` do not fit together."""
    device, batch = positions.device, request_rows.numel()
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size={page_size} must be a power of two; use 64")
    check_tensor("request_rows", request_rows, torch.int32, (None,), device)
    check_tensor("positions", positions, torch.int32, (batch * query_rows, None), device)
    check_tensor("out_rows", out_rows, torch.int32, tuple(positions.shape), device)
    check_tensor("stats", stats, torch.int64, (len(STATS),), device)
    requests, hot_rows = hot.keys.shape[0], hot.keys.shape[-1]
    check_tensor("tables.page_table", tables.page_table, torch.int32, (requests, None), device)
    check_tensor("tables.resident_page", tables.resident_page, torch.int32, (None,), device)
    for name, dtype in (("keys", torch.int32), ("lru", torch.int16), ("positions", torch.int32)):
        check_tensor(f"hot.{name}", getattr(hot, name), dtype, (requests, hot_rows), device)
    if hot_rows % page_size or not 0 < hot_rows <= MAX_HOT_ROWS:
        raise ValueError(
            f"device_buffer_size={hot_rows} hot rows a request must be a multiple of page_size={page_size}, "
            f"at most {MAX_HOT_ROWS}; round it"
        )
    check_tensor("tables.hot_pages", tables.hot_pages, torch.int32, (requests, hot_rows // page_size), device)
    selected = query_rows * positions.shape[1]
    if selected > hot_rows:
        raise ValueError(
            f"query_rows * top_k = {query_rows} * {positions.shape[1]} = {selected} exceeds the "
            f"device_buffer_size={hot_rows} hot rows a request; raise it or lower the draft length"
        )
    _check_room(scratch, plan, device, batch, selected, tables.page_table.shape[1] * page_size, hot_rows)


def _check_room(
    scratch: Scratch,
    plan: CopyPlan,
    device: torch.device,
    batch: int,
    selected: int,
    context: int,
    hot_rows: int,
) -> None:
    """Raise ValueError when ``plan`` or ``scratch`` is too small for the batch."""
    for name in ("slots", "rows", "count", "starts", "counts"):
        check_tensor(f"plan.{name}", getattr(plan, name), torch.int32, (None,), device)
    for name in ("stamps", "bitmap", "prefix"):
        check_tensor(f"scratch.{name}", getattr(scratch, name), torch.int32, (None, None), device)
    check_tensor("scratch.order", scratch.order, torch.int16, (None, None), device)
    check_tensor("scratch.cursor", scratch.cursor, torch.int64, (1,), device)
    contiguous = (plan.slots, plan.rows, plan.count, plan.starts, plan.counts, *scratch)
    if not all(tensor.is_contiguous() for tensor in contiguous):
        raise ValueError(
            "plan and scratch must be contiguous; build them with CopyPlan.empty and Scratch.empty"
        )
    rooms = (
        ("plan.slots", plan.slots.numel(), batch * selected),
        ("plan.rows", plan.rows.numel(), batch * selected),
        ("plan.count", plan.count.numel(), 1),
        ("plan.starts", plan.starts.numel(), batch),
        ("plan.counts", plan.counts.numel(), batch),
        ("scratch.stamps rows", scratch.stamps.shape[0], batch),
        ("scratch.stamps columns", scratch.stamps.shape[1], context),
        ("scratch.bitmap rows", scratch.bitmap.shape[0], batch),
        ("scratch.bitmap columns", scratch.bitmap.shape[1], -(-context // 32)),
        ("scratch.prefix rows", scratch.prefix.shape[0], batch),
        ("scratch.prefix columns", scratch.prefix.shape[1], -(-context // 32)),
        ("scratch.order rows", scratch.order.shape[0], batch),
        ("scratch.order columns", scratch.order.shape[1], hot_rows),
    )
    for name, room, need in rooms:
        if room < need:
            raise ValueError(
                f"{name}={room} must be at least {need}; build plan and scratch for the largest batch"
            )


def resolve(
    positions: torch.Tensor,
    request_rows: torch.Tensor,
    tables: Tables,
    hot: HotState,
    scratch: Scratch,
    plan: CopyPlan,
    out_rows: torch.Tensor,
    stats: torch.Tensor,
    *,
    page_size: int,
    num_slots: int,
    query_rows: int = 1,
    backend: str | None = None,
) -> None:
    """Turn the indexer's positions into device rows and plan the copies of the rows that are missing.

    A row on a resident page is used where it is. The others are looked up in the request's hot region, by the
    position each hot row remembers, checked against its key. All query rows of a request form one union: each
    missing slot is loaded once, into the least recently used rows that no query row of this step uses. The
    new order is stale | loaded | hits, each in the old order. A repeated position gets one row.

    Args:
        positions: int32 [B * query_rows, K], -1 pads. A position without a host page counts as a pad.
        request_rows: int32 [B] state rows, all different; -1 = padding, whose rows come out as -1.
        tables: not mutated.
        hot: state [R, H] of this index group; mutated. An entry out of range is dropped; an order that names
            a row out of range resets the request. A repeated row in the order is not looked for.
        scratch: zero before and after; one launch at a time may use it.
        plan: overwritten. A slot at or above ``num_slots`` is planned as -1 (a zero row) and not remembered.
        out_rows: int32 [B * query_rows, K]; overwritten: device row or -1.
        stats: int64 [4]; += hot hits, hot lookups (selected rows, each once, that are not resident), resident
            rows, unserved (lookups of a request without a hot region; their rows come out as -1).
        page_size: rows a page, a power of two.
        num_slots: slots of the host pool.
        query_rows: query rows a request.
        backend: see `backend.choose`.

    Raises:
        ValueError: a tensor does not fit the others, or the step could need more rows than a hot region has.
    """
    _check(positions, request_rows, tables, hot, scratch, plan, out_rows, stats, page_size, query_rows)
    if positions.numel() == 0:
        for tensor in (plan.count, plan.starts[: request_rows.numel()], plan.counts[: request_rows.numel()]):
            tensor.zero_()
        return
    if choose(positions, backend) == "reference":
        resolve_reference(
            positions,
            request_rows,
            tables,
            hot,
            plan,
            out_rows,
            stats,
            page_size=page_size,
            num_slots=num_slots,
        )
        return
    top_k, hot_rows = positions.shape[1], hot.keys.shape[1]
    entries, ranks = power_of_two(query_rows * top_k), min(power_of_two(hot_rows), LRU_BLOCK)
    launch(
        resolve_kernel,
        (request_rows.numel(),),
        positions.device,
        positions,
        request_rows,
        *tables,
        *hot,
        *scratch,
        plan.slots,
        plan.rows,
        plan.count,
        plan.starts,
        plan.counts,
        out_rows,
        stats,
        *tables.page_table.shape,
        tables.resident_page.numel(),
        num_slots,
        *positions.stride(),
        *request_rows.stride(),
        *tables.page_table.stride(),
        *tables.resident_page.stride(),
        *tables.hot_pages.stride(),
        *hot.keys.stride(),
        *hot.lru.stride(),
        *hot.positions.stride(),
        *(tensor.stride(0) for tensor in scratch[:4]),
        *out_rows.stride(),
        P=page_size,
        Q=query_rows,
        K=top_k,
        H=hot_rows,
        HIT=1 << 30,
        ENTRIES=entries,
        RANKS=ranks,
        WORDS=min(WORD_BLOCK, power_of_two(scratch.bitmap.shape[1])),
        num_warps=32 if entries > 4096 else 16 if max(entries, ranks) > 1024 else 4,
    )
