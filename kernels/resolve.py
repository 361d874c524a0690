"""Resolve: top-k positions to device rows, with the hot region's LRU and the copy plan. One launch an index group."""

from __future__ import annotations

import torch

from hisparse_sgl.kernels.backend import check_tensor, choose
from hisparse_sgl.kernels.state import CopyPlan, HotState, Scratch, Tables

MAX_HOT_ROWS = 32768
STATS = ("hot_hits", "hot_lookups", "resident_rows", "unserved")


def _hot_order(hot: HotState, request: int) -> list[int]:
    """The request's hot rows, oldest first. An order that names a row out of range resets the request's state."""
    order = hot.lru[request].tolist()
    if min(order) < 0 or max(order) >= len(order):
        hot.reset(request)
        order = list(range(len(order)))
    return order


def _swap_reference(
    wanted: dict[int, int], hot: HotState, request: int, num_slots: int
) -> tuple[dict[int, int], list[int], int]:
    """Give each wanted position (-> slot) a hot row. Returns position -> hot row, the missing positions, the hits."""
    order = _hot_order(hot, request)
    keys = hot.keys[request].tolist()
    remembered = hot.positions[request].tolist()
    row_of: dict[int, int] = {}
    for row in order:
        slot = wanted.get(remembered[row], -1)
        if 0 <= slot < num_slots and keys[row] == slot:
            row_of[remembered[row]] = row
    used = set(row_of.values())
    stale = [row for row in order if row not in used]
    hits = [row for row in order if row in used]
    missing = [position for position in wanted if position not in row_of]
    loaded = stale[: len(missing)]
    for position, row in zip(missing, loaded, strict=True):
        row_of[position] = row
        known = wanted[position] < num_slots
        keys[row] = wanted[position] if known else -1
        remembered[row] = position if known else -1
    for tensor, values in zip(hot, (keys, stale[len(missing) :] + loaded + hits, remembered), strict=True):
        tensor[request] = torch.tensor(values, dtype=tensor.dtype)
    return row_of, missing, len(hits)


def _translate_batch(
    positions: torch.Tensor, request_rows: torch.Tensor, tables: Tables, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots (-1: none) and resident device rows (-1: none), int64 [B, q * K]."""
    page_table, resident_page, _ = tables
    requests = request_rows.long()[:, None]
    pages = positions // page_size
    offsets = positions % page_size
    found = (
        (requests >= 0) & (requests < page_table.shape[0]) & (positions >= 0) & (pages < page_table.shape[1])
    )
    host_pages = page_table[torch.where(found, requests, 0), torch.where(found, pages, 0)].long()
    found &= host_pages > 0
    slots = torch.where(found, host_pages * page_size + offsets, -1)
    known = found & (host_pages < resident_page.numel())
    device_pages = resident_page[torch.where(known, host_pages, 0)].long()
    return slots, torch.where(known & (device_pages > 0), device_pages * page_size + offsets, -1)


def resolve_reference(
    positions: torch.Tensor,
    request_rows: torch.Tensor,
    tables: Tables,
    hot: HotState,
    plan: CopyPlan,
    out_rows: torch.Tensor,
    stats: torch.Tensor,
    *,
    page_size: int,
    num_slots: int,
) -> None:
    """The plain form of `resolve`, a dictionary a request. It needs no scratch."""
    batch = request_rows.numel()
    flat = positions.reshape(batch, -1).long()
    slots, rows = _translate_batch(flat, request_rows, tables, page_size)
    out = rows.tolist()
    totals = [0, 0, 0, 0]
    planned: list[tuple[int, int]] = []
    starts, counts = [], []
    for index, (entries, entry_slots, entry_rows, request) in enumerate(
        zip(flat.tolist(), slots.tolist(), rows.tolist(), request_rows.tolist(), strict=True)
    ):
        starts.append(len(planned))
        found = list(zip(entries, entry_slots, entry_rows, strict=True))
        wanted = {position: slot for position, slot, row in found if slot >= 0 and row < 0}
        totals[1] += len(wanted)
        totals[2] += len({position for position, _, row in found if row >= 0})
        if wanted:
            region = tables.hot_pages[request].tolist()
            if region[0] > 0:
                row_of, missing, hits = _swap_reference(wanted, hot, request, num_slots)
                totals[0] += hits
                place = {
                    position: region[row // page_size] * page_size + row % page_size
                    if region[row // page_size] > 0
                    else -1
                    for position, row in row_of.items()
                }
                out[index] = [place.get(position, row) for position, _, row in found]
                planned += [
                    (wanted[position] if wanted[position] < num_slots else -1, place[position])
                    for position in sorted(missing)
                ]
            else:
                totals[3] += len(wanted)
        counts.append(len(planned) - starts[-1])
    out_rows.copy_(torch.tensor(out, dtype=torch.int32).reshape(out_rows.shape))
    for tensor, values in (
        (plan.slots, [slot for slot, _ in planned]),
        (plan.rows, [row for _, row in planned]),
        (plan.count, [len(planned)]),
        (plan.starts, starts),
        (plan.counts, counts),
    ):
        tensor[: len(values)] = torch.tensor(values, dtype=torch.int32)
    stats += torch.tensor(totals, device=stats.device)


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
            f"hot rows a request {hot_rows} must be a multiple of page_size={page_size}, at most {MAX_HOT_ROWS}; "
            "change device_buffer_size"
        )
    check_tensor("tables.hot_pages", tables.hot_pages, torch.int32, (requests, hot_rows // page_size), device)
    selected = query_rows * positions.shape[1]
    if selected > hot_rows:
        raise ValueError(
            f"query_rows * top_k = {query_rows} * {positions.shape[1]} = {selected} exceeds the {hot_rows} hot rows "
            "a request; raise device_buffer_size or lower the draft length"
        )
    for name in CopyPlan._fields:
        check_tensor(f"plan.{name}", getattr(plan, name), torch.int32, (None,), device)
    if min(plan.slots.numel(), plan.rows.numel()) < batch * selected:
        raise ValueError(
            f"plan capacity {min(plan.slots.numel(), plan.rows.numel())} is below batch * query_rows * top_k = "
            f"{batch * selected}; build it with CopyPlan.empty({batch * selected}, ...)"
        )
    context = tables.page_table.shape[1] * page_size
    rooms = (
        ("plan.starts", plan.starts.numel(), batch),
        ("plan.counts", plan.counts.numel(), batch),
        ("scratch.stamps rows", scratch.stamps.shape[0], batch),
        ("scratch.stamps columns", scratch.stamps.shape[1], context),
        ("scratch.bitmap columns", scratch.bitmap.shape[1] * 32, context),
        ("scratch.order columns", scratch.order.shape[1], hot_rows),
    )
    for name, room, need in rooms:
        if room < need:
            raise ValueError(f"{name} hold {room}, this batch needs {need}; build them for the largest batch")


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
    missing slot is loaded once, into the least recently used rows that no query row of this step uses. The new
    order is stale | loaded | hits, each in the old order. A repeated position gets one row.

    Args:
        positions: int32 [B * query_rows, K], -1 pads. A position without a host page counts as a pad.
        request_rows: int32 [B] state rows, all different; -1 = padding, whose rows come out as -1.
        tables: not mutated.
        hot: state [R, H] of this index group; mutated. An entry out of range is dropped; an order that names a row
            out of range resets the request.
        scratch: zero before and after; one launch at a time may use it.
        plan: overwritten. A slot at or above ``num_slots`` is planned as -1 (a zero row) and not remembered.
        out_rows: int32 [B * query_rows, K]; overwritten: device row or -1.
        stats: int64 [4]; += hot hits, hot lookups (selected rows, each once, that are not resident), resident rows,
            unserved (not resident and the request has no hot region; the row comes out as -1).
        page_size: rows a page, a power of two.
        num_slots: slots of the host pool.
        query_rows: query rows a request.
        backend: see `backend.choose`.

    Raises:
        ValueError: a tensor does not fit the others, or the step could need more rows than a hot region has.
    """
    _check(positions, request_rows, tables, hot, scratch, plan, out_rows, stats, page_size, query_rows)
    if positions.numel() == 0:
        plan.count.zero_()
        return
    choose(positions, backend)
    resolve_reference(
        positions, request_rows, tables, hot, plan, out_rows, stats, page_size=page_size, num_slots=num_slots
    )
