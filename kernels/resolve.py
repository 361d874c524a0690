"""Resolve: top-k positions to device rows, with the hot region's LRU and the copy plan."""

from __future__ import annotations

import torch

from hisparse_sgl.kernels.backend import can_overlap, check_tensor, choose, idle_share, launch, power_of_two
from hisparse_sgl.kernels.resolve_kernel import resolve_kernel
from hisparse_sgl.kernels.resolve_reference import resolve_reference
from hisparse_sgl.kernels.state import CopyPlan, HotState, Scratch, Tables

MAX_HOT_ROWS = 32768
MAX_CONTEXT = 1 << 20
MAX_SLOTS = 2**31 - 2**16
# A program takes this many entries at least: below, arriving costs more than the lookup.
MIN_PART = 128
MAX_PARTS = 8
STATS = ("hot_hits", "hot_lookups", "resident_rows", "unserved")


def _check(
    positions: torch.Tensor,
    request_rows: torch.Tensor,
    region_rows: torch.Tensor,
    tables: Tables,
    hot: HotState,
    scratch: Scratch,
    plan: CopyPlan,
    out_rows: torch.Tensor,
    stats: torch.Tensor,
    page_size: int,
    num_slots: int,
    query_rows: int,
) -> None:
    """Raise ValueError, naming the tensor, when the arguments of `resolve` do not fit together."""
    device, batch = positions.device, request_rows.numel()
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size={page_size} must be a power of two; use 64")
    check_tensor("request_rows", request_rows, torch.int32, (None,), device)
    check_tensor("region_rows", region_rows, torch.int32, (batch,), device)
    check_tensor("positions", positions, torch.int32, (batch * query_rows, None), device)
    check_tensor("out_rows", out_rows, torch.int32, tuple(positions.shape), device)
    check_tensor("stats", stats, torch.int64, (len(STATS),), device)
    regions, hot_rows = hot.keys.shape[0], hot.keys.shape[-1]
    check_tensor("tables.page_table", tables.page_table, torch.int32, (None, None), device)
    check_tensor("tables.resident_page", tables.resident_page, torch.int32, (None,), device)
    check_tensor("hot.keys", hot.keys, torch.int32, (regions, hot_rows), device)
    check_tensor("hot.lru", hot.lru, torch.int16, (regions, hot_rows), device)
    if regions < 1:
        raise ValueError("hot.keys has 0 regions, the limit is at least 1; make room for one")
    if hot_rows % page_size or not 0 < hot_rows <= MAX_HOT_ROWS:
        raise ValueError(
            f"device_buffer_size={hot_rows} hot rows a region must be a multiple of page_size={page_size}, "
            f"at most {MAX_HOT_ROWS}; round it"
        )
    check_tensor("tables.hot_pages", tables.hot_pages, torch.int32, (regions, hot_rows // page_size), device)
    context = tables.page_table.shape[1] * page_size
    if context > MAX_CONTEXT:
        raise ValueError(
            f"max_pages * page_size = {tables.page_table.shape[1]} * {page_size} = {context} positions "
            f"must be at most {MAX_CONTEXT}; shorten the page table"
        )
    check_tensor("hot.hints", hot.hints, torch.int16, (regions, context), device)
    if not 1 <= num_slots <= MAX_SLOTS:
        raise ValueError(f"num_slots={num_slots} must be 1..{MAX_SLOTS}; make the host pool smaller")
    selected = query_rows * positions.shape[1]
    if selected > hot_rows:
        raise ValueError(
            f"query_rows * top_k = {query_rows} * {positions.shape[1]} = {selected} exceeds the "
            f"device_buffer_size={hot_rows} hot rows a region; raise it or lower the draft length"
        )
    _check_room(scratch, plan, device, batch, selected, context, hot_rows)


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
    check_tensor("plan.entries", plan.entries, torch.int32, (None, 2), device)
    for name in ("count", "starts", "counts"):
        check_tensor(f"plan.{name}", getattr(plan, name), torch.int32, (None,), device)
    for name in ("bitmap", "used", "slots"):
        check_tensor(f"scratch.{name}", getattr(scratch, name), torch.int32, (None, None), device)
    check_tensor("scratch.order", scratch.order, torch.int16, (None, None), device)
    for name in ("tickets", "arrivals"):
        check_tensor(f"scratch.{name}", getattr(scratch, name), torch.int64, (None,), device)
    check_tensor("scratch.cursor", scratch.cursor, torch.int64, (1,), device)
    contiguous = (plan.entries, plan.count, plan.starts, plan.counts, *scratch)
    if not all(tensor.is_contiguous() for tensor in contiguous):
        raise ValueError(
            "plan and scratch must be contiguous; build them with CopyPlan.empty and Scratch.empty"
        )
    rooms = (
        ("plan.entries", plan.entries.shape[0], batch * selected),
        ("plan.count", plan.count.numel(), 1),
        ("plan.starts", plan.starts.numel(), batch),
        ("plan.counts", plan.counts.numel(), batch),
        ("scratch.bitmap rows", scratch.bitmap.shape[0], batch),
        ("scratch.bitmap columns", scratch.bitmap.shape[1], -(-context // 32)),
        ("scratch.used rows", scratch.used.shape[0], batch),
        ("scratch.used columns", scratch.used.shape[1], -(-hot_rows // 32)),
        ("scratch.slots rows", scratch.slots.shape[0], batch),
        ("scratch.slots columns", scratch.slots.shape[1], hot_rows),
        ("scratch.tickets", scratch.tickets.numel(), batch),
        ("scratch.arrivals", scratch.arrivals.numel(), batch),
        ("scratch.order rows", scratch.order.shape[0], batch),
        ("scratch.order columns", scratch.order.shape[1], hot_rows),
    )
    for name, room, need in rooms:
        if room < need:
            raise ValueError(
                f"{name}={room} must be at least {need}; build plan and scratch for the largest batch"
            )


def _parts(device: torch.device, batch: int, entries: int) -> int:
    """Programs that share the lookup of one request: a power of two."""
    wanted = max(1, min(MAX_PARTS, idle_share(device, batch), entries // MIN_PART))
    return 1 << (wanted.bit_length() - 1)


def resolve(
    positions: torch.Tensor,
    request_rows: torch.Tensor,
    region_rows: torch.Tensor,
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
    hot row that the position hints at, checked against its key. All query rows of a request form one union:
    each missing position is loaded once. In position order they take the least recently used rows, oldest
    first, that no query row of this step uses. The new order is stale | loaded | hits, each in the old order.

    Args:
        positions: int32 [B * query_rows, K], -1 pads. A position without a host page counts as a pad.
        request_rows: int32 [B] rows of the page table; -1 or out of range = padding: its rows are -1.
        region_rows: int32 [B] hot regions, all different; -1 or out of range = none: what is not resident is
            not served then, its rows come out as -1.
        tables: not mutated.
        hot: state of this index group; mutated. A hint or key out of range is a miss; an order that names a
            row out of range resets the region. A repeated row in the order is not looked for: it can give
            two positions one row, never one outside the region.
        scratch: zero before and after; one launch at a time may use it.
        plan: overwritten. A slot at or above ``num_slots`` is planned as -1 (a zero row) and not remembered.
        out_rows: int32 [B * query_rows, K]; overwritten: device row or -1.
        stats: int64 [4]; += hot hits, hot lookups (selected rows, each once, that are not resident), resident
            rows (each entry), unserved (entries not resident of a batch row without a hot region; they count
            as lookups too and their rows come out as -1).
        page_size: rows a page, a power of two. A page table spans at most 1,048,576 positions.
        num_slots: slots of the host pool.
        query_rows: query rows a request.
        backend: see `backend.choose`.

    Raises:
        ValueError: a tensor does not fit the others, or the step could need more rows than a hot region has.
    """
    _check(
        positions,
        request_rows,
        region_rows,
        tables,
        hot,
        scratch,
        plan,
        out_rows,
        stats,
        page_size,
        num_slots,
        query_rows,
    )
    if positions.numel() == 0:
        for tensor in (plan.count, plan.starts[: request_rows.numel()], plan.counts[: request_rows.numel()]):
            tensor.zero_()
        return
    if choose(positions, backend) == "reference":
        resolve_reference(
            positions,
            request_rows,
            region_rows,
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
    entries = power_of_two(query_rows * top_k)
    ranks = power_of_two(max(hot_rows, scratch.bitmap.shape[1]))
    parts = _parts(positions.device, request_rows.numel(), entries)
    warps = 32 if max(entries, ranks) > 4096 else 16 if max(entries, ranks) > 1024 else 4
    overlap = can_overlap(positions.device)
    launch(
        resolve_kernel,
        (request_rows.numel(), parts),
        positions.device,
        positions,
        request_rows,
        region_rows,
        *tables,
        *hot,
        *scratch,
        plan.entries.view(torch.int64),
        plan.count,
        plan.starts,
        plan.counts,
        out_rows,
        stats,
        *tables.page_table.shape,
        hot.keys.shape[0],
        tables.resident_page.numel(),
        num_slots,
        -(-tables.page_table.shape[1] * page_size // 32),
        *positions.stride(),
        *request_rows.stride(),
        *region_rows.stride(),
        *tables.page_table.stride(),
        *tables.resident_page.stride(),
        *tables.hot_pages.stride(),
        *hot.keys.stride(),
        *hot.lru.stride(),
        *hot.hints.stride(),
        scratch.bitmap.stride(0),
        scratch.used.stride(0),
        *scratch.slots.stride(),
        scratch.order.stride(0),
        *out_rows.stride(),
        P=page_size,
        Q=query_rows,
        K=top_k,
        H=hot_rows,
        ENTRIES=entries,
        RANKS=ranks,
        PART=entries // parts,
        LANES=32 * warps,
        FLAGS=power_of_two(-(-hot_rows // 32)),
        OVERLAP=overlap,
        num_warps=warps,
        **({"launch_pdl": True} if overlap else {}),
    )
