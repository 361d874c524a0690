"""Plain form of `resolve`: a dictionary a request, no scratch. It also serves the CPU demo."""

from __future__ import annotations

import torch

from hisparse_sgl.kernels.state import CopyPlan, HotState, Tables


def _sound_order(order: list[int], keys: list[int], remembered: list[int]) -> None:
    """Empty all rows, in identity order, when the order names a row out of range. Mutates the lists."""
    hot_rows = len(order)
    if min(order) < 0 or max(order) >= hot_rows:
        order[:] = range(hot_rows)
        keys[:] = remembered[:] = [-1] * hot_rows


def _swap(
    wanted: dict[int, int], keys: list[int], order: list[int], remembered: list[int], num_slots: int
) -> tuple[dict[int, int], list[int]]:
    """Give each wanted position (-> slot) a hot row. Returns position -> hot row and the missing positions.

    Mutates the three lists, one request's hot state.
    """
    _sound_order(order, keys, remembered)
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
        readable = wanted[position] < num_slots
        keys[row] = wanted[position] if readable else -1
        remembered[row] = position if readable else -1
    order[:] = stale[len(missing) :] + loaded + hits
    return row_of, missing


def _translate_batch(
    positions: torch.Tensor, request_rows: torch.Tensor, tables: Tables, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and resident device rows of positions [B, q * K], both int64, -1 where there is none."""
    page_table, resident_page, _ = tables
    requests = request_rows.long()[:, None]
    pages = positions // page_size
    offsets = positions % page_size
    found = (requests >= 0) & (requests < page_table.shape[0])
    found = found & (positions >= 0) & (pages < page_table.shape[1])
    host_pages = page_table[torch.where(found, requests, 0), torch.where(found, pages, 0)].long()
    found &= host_pages > 0
    slots = torch.where(found, host_pages * page_size + offsets, -1)
    known = found & (host_pages < resident_page.numel())
    device_pages = resident_page[torch.where(known, host_pages, 0)].long()
    return slots, torch.where(known & (device_pages > 0), device_pages * page_size + offsets, -1)


def _write_plan(plan: CopyPlan, planned: list[list[tuple[int, int]]]) -> None:
    """Lay the (slot, row) pairs of each batch row one after another."""
    entries = [entry for segment in planned for entry in segment]
    counts = torch.tensor([len(segment) for segment in planned], dtype=torch.int32)
    pairs = torch.tensor(entries, dtype=torch.int32).reshape(-1, 2)
    plan.slots[: len(entries)] = pairs[:, 0]
    plan.rows[: len(entries)] = pairs[:, 1]
    plan.count.fill_(len(entries))
    plan.starts[: len(planned)] = counts.cumsum(0) - counts
    plan.counts[: len(planned)] = counts


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
    """The plain form of `resolve`, with the arguments of the same names."""
    flat = positions.reshape(request_rows.numel(), -1).long()
    slots, resident = _translate_batch(flat, request_rows, tables, page_size)
    rows = resident.tolist()
    entries = [
        list(zip(*lists, strict=True)) for lists in zip(flat.tolist(), slots.tolist(), rows, strict=True)
    ]
    wanted = [{pos: slot for pos, slot, row in found if slot >= 0 and row < 0} for found in entries]
    lookups = sum(len(slot_of) for slot_of in wanted)
    residents = sum(len({pos for pos, _, row in found if row >= 0}) for found in entries)
    asking = [index for index, slot_of in enumerate(wanted) if slot_of]
    regions = dict(zip(asking, tables.hot_pages[request_rows[asking].long()].tolist(), strict=True))
    served = [index for index in asking if regions[index][0] > 0]
    planned: list[list[tuple[int, int]]] = [[] for _ in entries]
    hits = 0
    if served:
        requests = request_rows[served].long()
        state = [tensor[requests].tolist() for tensor in hot]
        for index, keys, order, remembered in zip(served, *state, strict=True):
            row_of, missing = _swap(wanted[index], keys, order, remembered, num_slots)
            hits += len(row_of) - len(missing)
            pages = regions[index]
            place = {
                pos: pages[row // page_size] * page_size + row % page_size
                if pages[row // page_size] > 0
                else -1
                for pos, row in row_of.items()
            }
            rows[index] = [place.get(pos, row) for pos, _, row in entries[index]]
            for pos in sorted(missing):
                slot = wanted[index][pos]
                planned[index].append((slot if slot < num_slots else -1, place[pos]))
        for tensor, values in zip(hot, state, strict=True):
            tensor[requests] = torch.tensor(values, dtype=tensor.dtype, device=tensor.device)
    unserved = sum(len(wanted[index]) for index in asking if regions[index][0] <= 0)
    _write_plan(plan, planned)
    out_rows.copy_(torch.tensor(rows, dtype=torch.int32).reshape(out_rows.shape))
    stats += torch.tensor([hits, lookups, residents, unserved], device=stats.device)
