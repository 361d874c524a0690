"""Triton kernel of `resolve`: programs look up parts of a request's entries, the last one replaces its rows.

A position remembers the hot row that it was last loaded into (its *hint*); it is a hit when the key of that
row is the slot wanted now. Hits mark their rows in ``used``, misses set their positions in ``bitmap``: the
rank of a miss among the set bits is its victim and its place in the plan, one for all entries that name it.

What costs time is random access: about a cycle an element for a load that leaves the multiprocessor and for a
store, whatever its width. So the lookup is spread over programs, and the program that arrives last goes on
alone; none ever waits for another. Then come barriers: two or three for a scan, a reduction or a gather.

A barrier lies between a pass that writes global memory and the next one that reads it, and between reading a
tile and clearing it: several threads read an element of a small tile, one clears it. What other programs
wrote is read past the first-level cache (".cg"). Masks never mix a scalar bool with a block: the interpreter
turns it to int64.
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
def _look_up(
    positions,
    page_table,
    resident_page,
    hot_pages,
    keys,
    hints,
    bitmap,
    used,
    slots,
    out_rows,
    batch,
    live,
    served,
    max_pages,
    num_host_pages,
    num_slots,
    positions_stride,
    positions_column,
    table_column,
    resident_stride,
    hot_pages_column,
    keys_column,
    hints_column,
    slots_column,
    out_stride,
    out_column,
    P: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    PART: tl.constexpr,
):
    """Look up one program's part of the entries: mark hits and misses, note the slots they want, write the
    rows that are known. Returns how many entries are not resident (bits 16 on) and resident (below)."""
    entry = tl.program_id(1) * PART + tl.arange(0, PART)
    query = batch * Q + entry // K
    column = (entry % K).to(tl.int64)
    inside = entry < Q * K
    position = tl.load(
        positions + query * positions_stride + column * positions_column, mask=inside, other=-1
    ).to(tl.uint32, bitcast=True)
    # Unsigned, a negative position is out of range too, and divisions are shifts.
    known = inside & (position < tl.where(live, max_pages * P, 0).to(tl.uint32))
    position = tl.where(known, position, 0)
    offset = (position % P).to(tl.int32)
    page = tl.load(page_table + (position // P).to(tl.int64) * table_column, mask=known, other=0)
    hint = tl.load(hints + position.to(tl.int64) * hints_column, mask=known, other=-1).to(tl.int32)
    in_pool = (page > 0) & (page < num_host_pages)
    resident = tl.load(resident_page + page.to(tl.int64) * resident_stride, mask=in_pool, other=0)
    hinted = hint.to(tl.uint32, bitcast=True) < H
    hint = tl.where(hinted, hint, 0)
    key = tl.load(keys + hint.to(tl.int64) * keys_column, mask=hinted, other=-1)
    hot_page = tl.load(hot_pages + (hint // P).to(tl.int64) * hot_pages_column, mask=hinted, other=0)
    # A host page past the pool is cut to the pool's end, so that slots fit 32 bits.
    slot = tl.minimum(tl.maximum(page, 0), (num_slots + P - 1) // P) * P + offset
    wanted = (page > 0) & (resident <= 0)
    asked = wanted & (page > tl.where(served, 0, 0x7FFFFFFF))
    hit = asked & hinted & (key == slot) & (slot < num_slots)
    miss = asked & ~hit
    tl.atomic_or(used + hint // 32, 1 << (hint % 32), mask=hit, sem="relaxed")
    word = (position // 32).to(tl.int32)
    tl.atomic_or(bitmap + word, 1 << (position % 32).to(tl.int32), mask=miss, sem="relaxed")
    # A slot is positive: its sign tells a miss from a hit, 0 is neither.
    found = tl.where(miss, slot, tl.where(hit, -slot, 0))
    tl.store(slots + entry.to(tl.int64) * slots_column, found, mask=inside)
    row = tl.where(resident > 0, resident * P + offset, -1)
    row = tl.where(hit & (hot_page > 0), hot_page * P + hint % P, row)
    tl.store(out_rows + query * out_stride + column * out_column, row, mask=inside)
    counts = tl.sum(tl.where(wanted, 1 << 16, 0) + tl.where(resident > 0, 1, 0), 0)
    return counts.to(tl.int64) & 0xFFFFFFFF


def _resolve(
    positions,
    request_rows,
    region_rows,
    page_table,
    resident_page,
    hot_pages,
    keys,
    lru,
    hints,
    bitmap,
    used,
    slots,
    order,
    tickets,
    arrivals,
    cursor,
    plan_entries,
    plan_count,
    plan_starts,
    plan_counts,
    out_rows,
    stats,
    max_requests,
    max_pages,
    num_regions,
    num_host_pages,
    num_slots,
    num_words,
    positions_stride,
    positions_column,
    requests_stride,
    regions_stride,
    table_stride,
    table_column,
    resident_stride,
    hot_pages_stride,
    hot_pages_column,
    keys_stride,
    keys_column,
    lru_stride,
    lru_column,
    hints_stride,
    hints_column,
    bitmap_stride,
    used_stride,
    slots_stride,
    slots_column,
    order_stride,
    out_stride,
    out_column,
    P: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    ENTRIES: tl.constexpr,
    PART: tl.constexpr,
    RANKS: tl.constexpr,
    FLAGS: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.load(request_rows + batch * requests_stride).to(tl.int64)
    region = tl.load(region_rows + batch * regions_stride).to(tl.int64)
    live = (request >= 0) & (request < max_requests)
    has_region = (region >= 0) & (region < num_regions)
    request = tl.where(live, request, 0)
    region = tl.where(has_region, region, 0)
    page_table += request * table_stride
    hot_pages += region * hot_pages_stride
    keys += region * keys_stride
    lru += region * lru_stride
    hints += region * hints_stride
    bitmap += batch * bitmap_stride
    used += batch * used_stride
    slots += batch * slots_stride
    order += batch * order_stride

    served = has_region & (tl.load(hot_pages) > 0)
    # Only the last program needs the order. All load it now, because no one knows yet who is last.
    rank = tl.arange(0, RANKS)
    hot_row = tl.load(lru + rank.to(tl.int64) * lru_column, mask=rank < H, other=0).to(tl.int32)

    tally = _look_up(
        positions, page_table, resident_page, hot_pages, keys, hints, bitmap, used, slots, out_rows,
        batch, live, served, max_pages, num_host_pages, num_slots, positions_stride, positions_column,
        table_column, resident_stride, hot_pages_column, keys_column, hints_column, slots_column,
        out_stride, out_column, P, Q, K, H, PART
    )  # fmt: skip
    tally += 1 << 40
    tl.debug_barrier()
    tally += tl.atomic_add(arrivals + batch, tally)

    if (tally >> 40) == tl.num_programs(1):
        tl.store(arrivals + batch, 0)
        residents = (tally & 0xFFFF).to(tl.int32)
        lookups = ((tally >> 16) & 0xFFFFFF).to(tl.int32)
        missing = lookups * 0
        hits = lookups * 0
        unserved = tl.where(served, 0, lookups)
        # One element a thread: only the first one waits for the ticket.
        lane = tl.arange(0, LANES)

        if served & (lookups > 0):
            bits = tl.load(bitmap + rank, mask=rank < num_words, other=0, cache_modifier=".cg")
            flag = tl.arange(0, FLAGS)
            flags = tl.load(used + flag, mask=flag * 32 < H, other=0, cache_modifier=".cg")
            entry = tl.arange(0, ENTRIES)
            query = batch * Q + entry // K
            column = (entry % K).to(tl.int64)
            inside = entry < Q * K
            found = tl.load(
                slots + entry.to(tl.int64) * slots_column, mask=inside, other=0, cache_modifier=".cg"
            )
            position = tl.load(
                positions + query * positions_stride + column * positions_column, mask=inside, other=0
            )
            position = tl.where(found != 0, position, 0).to(tl.uint32, bitcast=True)
            word = (position // 32).to(tl.int32)
            bit = 1 << (position % 32).to(tl.int32)
            broken = tl.max(((hot_row.to(tl.uint32, bitcast=True) >= H) & (rank < H)).to(tl.int32), 0)
            if broken > 0:
                # Forget everything: the hits become misses.
                tl.atomic_or(bitmap + word, bit, mask=found < 0, sem="relaxed")
                tl.store(keys + rank.to(tl.int64) * keys_column, -1, mask=rank < H)
                tl.debug_barrier()
                bits = tl.load(bitmap + rank, mask=rank < num_words, other=0, cache_modifier=".cg")
                found = tl.where(found < 0, -found, found)
                hot_row = rank
                flags = flags * 0
            miss = found > 0
            own_bits = tl.load(bitmap + word, mask=miss, other=0, cache_modifier=".cg")
            free = (((tl.gather(flags, hot_row // 32, 0) >> (hot_row % 32)) & 1) == 0) & (rank < H)
            # One scan: misses before a word of the bitmap (high half), free rows before a rank (low half).
            counts = (_popcount(bits) << 16) | free.to(tl.int32)
            before = tl.cumsum(counts, 0) - counts
            total = tl.sum(counts, 0)
            missing = (total >> 16) & 0xFFFF
            stale = total & 0xFFFF
            hits = H - stale
            lookups = hits + missing
            ticket = tl.atomic_add(
                cursor + lane * 0, missing.to(tl.int64) + (1 << 32) + lane * 0, mask=lane == 0, sem="relaxed"
            )
            # A gather in place moves the three values to the layout in which neighbours are stored together.
            moved = tl.gather((free.to(tl.int32) << 30) | ((before & 0x7FFF) << 15) | hot_row, rank, 0)
            index = ((tl.gather(before, word, 0) >> 16) & 0xFFFF) + _popcount(own_bits & (bit - 1))
            free = (moved >> 30) > 0
            older = (moved >> 15) & 0x7FFF
            hot_row = moved & 0x7FFF
            tl.store(order + older, hot_row.to(tl.int16), mask=free & (older < missing))
            tl.store(tickets + batch + lane * 0, ticket, mask=lane == 0)
            tl.debug_barrier()
            victim = tl.load(order + index, mask=miss, other=0, cache_modifier=".cg").to(tl.int32)
            start = (tl.load(tickets + batch, cache_modifier=".cg") & 0x7FFFFFFF).to(tl.int32)
            tl.store(bitmap + rank, 0, mask=rank < num_words)
            tl.store(used + flag, 0, mask=flag * 32 < H)
            place = tl.where(older < missing, stale - missing + older, older - missing)
            place = tl.where(free, place, stale + rank - older)
            tl.store(
                lru + place.to(tl.int64) * lru_column, hot_row.to(tl.int16), mask=(rank < H) & (place >= 0)
            )
            hot_page = tl.load(hot_pages + (victim // P).to(tl.int64) * hot_pages_column, mask=miss, other=0)
            row = tl.where(hot_page > 0, hot_page * P + victim % P, -1)
            readable = found < num_slots
            source = tl.where(readable, found, -1)
            # One 8-byte store an entry: the slot in the low half.
            pair = (row.to(tl.int64) << 32) | (source.to(tl.int64) & 0xFFFFFFFF)
            tl.store(plan_entries + start + index, pair, mask=miss)
            tl.store(out_rows + query * out_stride + column * out_column, row, mask=miss)
            tl.store(keys + victim.to(tl.int64) * keys_column, source, mask=miss)
            tl.store(hints + position.to(tl.int64) * hints_column, victim.to(tl.int16), mask=miss & readable)
        else:
            ticket = tl.atomic_add(
                cursor + lane * 0, lane.to(tl.int64) * 0 + (1 << 32), mask=lane == 0, sem="relaxed"
            )

        which = tl.arange(0, 4)
        added = tl.where(
            which < 2, tl.where(which == 0, hits, lookups), tl.where(which == 2, residents, unserved)
        )
        tl.atomic_add(stats + which, added.to(tl.int64), mask=added != 0, sem="relaxed")
        # Tickets (high half) and entries (low half) share one atomic, so the last request knows the total and
        # leaves the cursor zero: no launch is spent on clearing it.
        begin = (ticket & 0x7FFFFFFF).to(tl.int32)
        last = (lane == 0) & ((ticket >> 32) == tl.num_programs(0) - 1)
        tl.store(plan_starts + batch + lane * 0, begin, mask=lane == 0)
        tl.store(plan_counts + batch + lane * 0, missing + lane * 0, mask=lane == 0)
        tl.store(plan_count + lane * 0, begin + missing, mask=last)
        tl.store(cursor + lane * 0, lane.to(tl.int64) * 0, mask=last)


# Strides that look unknown spread the entries over threads one by one: scattered stores need that layout, and
# to change to it later costs a trip through shared memory for each operand.
resolve_kernel = jit(_resolve, do_not_specialize=("positions_column", "slots_column", "out_column"))
