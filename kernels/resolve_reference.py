"""Plain form of `resolve`: a dictionary a batch row, no scratch. It also serves the CPU demo."""

from __future__ import annotations

import torch

from hisparse_sgl.kernels.state import CopyPlan, HotState, Tables


def _swap(
    wanted: dict[int, int], keys: list[int], order: list[int], hints: dict[int, int], num_slots: int
) -> tuple[dict[int, int], list[int]]:
    """Give each wanted position (-> slot) a hot row. Returns position -> hot row and the missing positions.

    ``hints`` has the hint of each wanted position. Mutates the lists and ``hints``, one region's hot state.
    """
    hot_rows = len(order)
    if sorted(order) != list(range(hot_rows)):
        order[:] = range(hot_rows)
        keys[:] = [-1] * hot_rows
    row_of = {
        position: hints[position]
        for position, slot in wanted.items()
        if 0 <= hints[position] < hot_rows and keys[hints[position]] == slot < num_slots
    }
    used = set(row_of.values())
    stale = [row for row in order if row not in used]
    hits = [row for row in order if row in used]
    missing = sorted(position for position in wanted if position not in row_of)
    loaded = stale[: len(missing)]
    for position, row in zip(missing, loaded, strict=True):
        row_of[position] = row
        readable = wanted[position] < num_slots
        keys[row] = wanted[position] if readable else -1
        if readable:
            hints[position] = row
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
    plan.entries[: len(entries)] = torch.tensor(entries, dtype=torch.int32).reshape(-1, 2)
    plan.count.fill_(len(entries))
    plan.starts[: len(planned)] = counts.cumsum(0) - counts
    plan.counts[: len(planned)] = counts


def resolve_reference(
    positions: torch.Tensor,
    request_rows: torch.Tensor,
    region_rows: torch.Tensor,
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
    residents = sum(row >= 0 for found in rows for row in found)
    regions = region_rows.tolist()
    asking = [index for index, slot_of in enumerate(wanted) if slot_of]
    asking = [index for index in asking if 0 <= regions[index] < tables.hot_pages.shape[0]]
    pages_of = dict(zip(asking, tables.hot_pages[region_rows[asking].long()].tolist(), strict=True))
    served = [index for index in asking if pages_of[index][0] > 0]
    planned: list[list[tuple[int, int]]] = [[] for _ in entries]
    hits = lookups = 0
    if served:
        held = region_rows[served].long()
        hinted = hot.hints[held[:, None], flat[served].clamp(0, hot.hints.shape[1] - 1)].tolist()
        state = [hot.keys[held].tolist(), hot.lru[held].tolist()]
        for index, found, keys, order in zip(served, hinted, *state, strict=True):
            hint_of = {entry[0]: hint for entry, hint in zip(entries[index], found, strict=True)}
            row_of, missing = _swap(wanted[index], keys, order, hint_of, num_slots)
            hits += len(row_of) - len(missing)
            lookups += len(row_of)
            loaded = torch.tensor(missing, dtype=torch.int64, device=hot.hints.device)
            hot.hints[regions[index], loaded] = torch.tensor(
                [hint_of[pos] for pos in missing], dtype=torch.int16, device=hot.hints.device
            )
            pages = pages_of[index]
            place = {
                pos: pages[row // page_size] * page_size + row % page_size
                if pages[row // page_size] > 0
                else -1
                for pos, row in row_of.items()
            }
            rows[index] = [place.get(pos, row) for pos, _, row in entries[index]]
            for pos in missing:
                slot = wanted[index][pos]
                planned[index].append((slot if slot < num_slots else -1, place[pos]))
        for tensor, values in zip(hot[:2], state, strict=True):
            tensor[held] = torch.tensor(values, dtype=tensor.dtype, device=tensor.device)
    unserved = sum(
        pos in wanted[index]
        for index in set(range(len(entries))).difference(served)
        for pos, _, _ in entries[index]
    )
    _write_plan(plan, planned)
    out_rows.copy_(torch.tensor(rows, dtype=torch.int32).reshape(out_rows.shape))
    stats += torch.tensor([hits, lookups + unserved, residents, unserved], device=stats.device)
