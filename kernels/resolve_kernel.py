"""Triton kernel of `resolve`: one program a request.

A *stamp* table indexed by position tells which positions are selected: first it holds the first entry that
names the position, then the hot row that serves it. A barrier lies between a pass that writes global memory
and the next one that reads it. Masks never mix a scalar bool with a block: the interpreter turns it to int64.
"""

# A type checker cannot follow Triton: constant branches bind names, ranges are objects.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

from hisparse_sgl.kernels.backend import jit, tl


@jit
def _popcount(bits):
    bits = bits.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@jit
def _claim(cursor, plan_count, plan_starts, plan_counts, batch, count):
    """Take ``count`` entries of the plan. Tickets (high half) and entries (low half) share one atomic, so the
    last program knows the total and leaves the cursor zero: no launch is spent on clearing it."""
    old = tl.atomic_add(cursor, count.to(tl.int64) + (1 << 32), sem="relaxed")
    start = (old & 0xFFFFFFFF).to(tl.int32)
    tl.store(plan_starts + batch, start)
    tl.store(plan_counts + batch, count)
    if (old >> 32) == tl.num_programs(0) - 1:
        tl.store(plan_count, start + count)
        tl.store(cursor, 0)
    return start


@jit
def _load_hot(
    lru,
    keys,
    remembered,
    page_table,
    rank,
    limit,
    max_pages,
    num_slots,
    lru_column,
    keys_column,
    remembered_column,
    table_column,
    P: tl.constexpr,
    H: tl.constexpr,
):
    """Hot rows by LRU rank: row, position, does its key still belong to that position, is the row corrupt."""
    row = tl.load(lru + rank.to(tl.int64) * lru_column, mask=rank < limit, other=0).to(tl.int32)
    corrupt = (row < 0) | (row >= H)
    sound = (rank < limit) & ~corrupt
    row = tl.where(corrupt, 0, row)
    position = tl.load(remembered + row.to(tl.int64) * remembered_column, mask=sound, other=-1)
    key = tl.load(keys + row.to(tl.int64) * keys_column, mask=sound, other=-1).to(tl.int64)
    sound &= (position >= 0) & (position // P < max_pages) & (key < num_slots)
    position = tl.where(sound, position, 0)
    page = tl.load(page_table + (position // P).to(tl.int64) * table_column, mask=sound, other=0).to(tl.int64)
    sound &= (page > 0) & (page * P + position % P == key)
    return row, position, sound, corrupt


@jit
def resolve_kernel(
    positions,
    request_rows,
    page_table,
    resident_page,
    hot_pages,
    keys,
    lru,
    remembered,
    stamps,
    bitmap,
    prefix,
    order,
    cursor,
    plan_slots,
    plan_rows,
    plan_count,
    plan_starts,
    plan_counts,
    out_rows,
    stats,
    max_requests,
    max_pages,
    num_host_pages,
    num_slots,
    positions_stride,
    positions_column,
    requests_stride,
    table_stride,
    table_column,
    resident_stride,
    hot_pages_stride,
    hot_pages_column,
    keys_stride,
    keys_column,
    lru_stride,
    lru_column,
    remembered_stride,
    remembered_column,
    stamps_stride,
    bitmap_stride,
    prefix_stride,
    order_stride,
    out_stride,
    out_column,
    P: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    HIT: tl.constexpr,
    ENTRIES: tl.constexpr,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    request = tl.load(request_rows + batch * requests_stride).to(tl.int64)
    live = (request >= 0) & (request < max_requests)
    request = tl.where(live, request, 0)
    page_table += request * table_stride
    hot_pages += request * hot_pages_stride
    keys += request * keys_stride
    lru += request * lru_stride
    remembered += request * remembered_stride
    stamps += batch * stamps_stride
    bitmap += batch * bitmap_stride
    prefix += batch * prefix_stride

    entry = tl.arange(0, ENTRIES)
    query = batch * Q + entry // K
    column = (entry % K).to(tl.int64)
    inside = entry < Q * K
    position = tl.load(
        positions + query * positions_stride + column * positions_column, mask=inside, other=-1
    )
    known = (entry < tl.where(live, Q * K, 0)) & (position >= 0) & (position // P < max_pages)
    position = tl.where(known, position, 0)
    page = tl.load(page_table + (position // P).to(tl.int64) * table_column, mask=known, other=0).to(tl.int64)
    if RANKS >= H:
        hot_row, hot_position, sound, corrupt = _load_hot(
            lru, keys, remembered, page_table, tl.arange(0, RANKS), tl.where(live, H, 0), max_pages,
            num_slots, lru_column, keys_column, remembered_column, table_column, P, H
        )  # fmt: skip
    known &= page > 0
    slot = page * P + position % P
    on_device = tl.load(resident_page + page * resident_stride, mask=known & (page < num_host_pages), other=0)
    wanted = known & (on_device <= 0)
    row = tl.where(known & (on_device > 0), on_device * P + position % P, -1)

    # The lowest entry wins: it carries the largest stamp. The low bit says that a hot row is wanted.
    first = (ENTRIES - entry) * 2 + wanted.to(tl.int32)
    before = tl.atomic_max(stamps + position, first, mask=known, sem="relaxed")
    fresh = known & (before == 0)
    tally = tl.sum(tl.where(fresh, tl.where(wanted, 1 << 32, 1), 0).to(tl.int64), 0)
    lookups = (tally >> 32).to(tl.int32)
    residents = (tally & 0xFFFFFFFF).to(tl.int32)
    served = tl.load(hot_pages) > 0
    missing = lookups * 0
    hits = lookups * 0
    tl.debug_barrier()

    if served & (lookups > 0):
        if RANKS < H:
            broken = lookups * 0
            for begin in tl.static_range(0, H, RANKS):
                rank = begin + tl.arange(0, RANKS)
                hot_row = tl.load(lru + rank.to(tl.int64) * lru_column, mask=rank < H, other=0).to(tl.int32)
                broken = tl.maximum(broken, tl.max(((hot_row < 0) | (hot_row >= H)).to(tl.int32), 0))
        else:
            broken = tl.max(corrupt.to(tl.int32), 0)
            hot_row = tl.where(broken > 0, tl.arange(0, RANKS), hot_row)
            sound &= tl.arange(0, RANKS) < tl.where(broken > 0, 0, H)
        if broken > 0:
            tl.debug_barrier()
            for reset_begin in tl.static_range(0, H, RANKS):
                reset_row = (reset_begin + tl.arange(0, RANKS)).to(tl.int64)
                tl.store(lru + reset_row * lru_column, reset_row.to(tl.int16), mask=reset_row < H)
                tl.store(keys + reset_row * keys_column, -1, mask=reset_row < H)
                tl.store(remembered + reset_row * remembered_column, -1, mask=reset_row < H)
            tl.debug_barrier()

        for begin in tl.static_range(0, H, RANKS):
            rank = begin + tl.arange(0, RANKS)
            if RANKS < H:
                hot_row, hot_position, sound, corrupt = _load_hot(
                    lru, keys, remembered, page_table, rank, H, max_pages, num_slots,
                    lru_column, keys_column, remembered_column, table_column, P, H
                )  # fmt: skip
            stamp = tl.load(stamps + hot_position, mask=sound, other=0, cache_modifier=".cg")
            # Two rows with one key: the newest holds the largest stamp.
            hit = sound & ((stamp >= HIT) | ((stamp & 1) == 1))
            tl.atomic_max(stamps + hot_position, HIT | (rank << 15) | hot_row, mask=hit, sem="relaxed")
        tl.debug_barrier()

        stamp = tl.load(stamps + position, mask=wanted, other=0, cache_modifier=".cg")
        miss = wanted & (stamp == first)
        counted = tl.cumsum(miss.to(tl.int32), 0)
        missing = tl.sum(miss.to(tl.int32), 0)
        hits = lookups - missing
        stale = H - hits
        tl.atomic_or(bitmap + position // 32, 1 << (position % 32), mask=miss, sem="relaxed")
        top = tl.max(tl.where(miss, position // 32, -1), 0)
        # A single block has read all of the old order, so the new one can be written in place.
        if RANKS < H:
            target = order + batch * order_stride
            target_column = 1
        else:
            target = lru
            target_column = lru_column
        passed = lookups * 0
        for begin in tl.static_range(0, H, RANKS):
            rank = begin + tl.arange(0, RANKS)
            if RANKS < H:
                hot_row, hot_position, sound, corrupt = _load_hot(
                    lru, keys, remembered, page_table, rank, H, max_pages, num_slots,
                    lru_column, keys_column, remembered_column, table_column, P, H
                )  # fmt: skip
            stamp = tl.load(stamps + hot_position, mask=sound, other=0, cache_modifier=".cg")
            free = (rank < H) & ~(sound & (stamp == (HIT | (rank << 15) | hot_row)))
            older = passed + tl.cumsum(free.to(tl.int32), 0) - free.to(tl.int32)
            place = tl.where(older < missing, stale - missing + older, older - missing)
            place = tl.where(free, place, stale + rank - older)
            tl.store(target + place.to(tl.int64) * target_column, hot_row.to(tl.int16), mask=rank < H)
            passed += tl.sum(free.to(tl.int32), 0)
        tl.debug_barrier()

        chosen = (stale - missing + counted - 1).to(tl.int64)
        victim = tl.load(target + chosen * target_column, mask=miss, other=0).to(tl.int32)
        readable = slot < num_slots
        source = tl.where(readable, slot, -1).to(tl.int32)
        tl.store(keys + victim.to(tl.int64) * keys_column, source, mask=miss)
        tl.store(
            remembered + victim.to(tl.int64) * remembered_column, tl.where(readable, position, -1), mask=miss
        )
        tl.store(stamps + position, HIT | victim, mask=miss)
        if RANKS < H:
            for begin in tl.static_range(0, H, RANKS):
                rank = (begin + tl.arange(0, RANKS)).to(tl.int64)
                tl.store(lru + rank * lru_column, tl.load(target + rank, mask=rank < H), mask=rank < H)
        start = _claim(cursor, plan_count, plan_starts, plan_counts, batch, missing)
        begun = lookups * 0
        below = lookups * 0
        while begun <= top:
            word = begun + tl.arange(0, WORDS)
            count = _popcount(tl.load(bitmap + word, mask=word <= top, other=0, cache_modifier=".cg"))
            tl.store(prefix + word, below + tl.cumsum(count, 0) - count, mask=word <= top)
            below += tl.sum(count, 0)
            begun += WORDS
        tl.debug_barrier()

        place = tl.load(stamps + position, mask=wanted, other=0, cache_modifier=".cg") & 0x7FFF
        hot_page = tl.load(hot_pages + (place // P).to(tl.int64) * hot_pages_column, mask=wanted, other=0)
        row = tl.where(wanted & (hot_page > 0), hot_page * P + place % P, row)
        lower = tl.load(bitmap + position // 32, mask=miss, other=0, cache_modifier=".cg") & ~(
            -1 << (position % 32)
        )
        index = start + tl.load(prefix + position // 32, mask=miss, other=0) + _popcount(lower)
        tl.store(plan_slots + index, source, mask=miss)
        tl.store(plan_rows + index, row, mask=miss)
        tl.debug_barrier()
        tl.store(bitmap + position // 32, 0, mask=miss)
    else:
        _claim(cursor, plan_count, plan_starts, plan_counts, batch, missing)

    tl.store(out_rows + query * out_stride + column * out_column, row, mask=inside)
    tl.store(stamps + position, 0, mask=known)
    which = tl.arange(0, 4)
    unserved = tl.where(served, 0, lookups)
    added = tl.where(
        which < 2, tl.where(which == 0, hits, lookups), tl.where(which == 2, residents, unserved)
    )
    tl.atomic_add(stats + which, added.to(tl.int64), mask=added != 0, sem="relaxed")
