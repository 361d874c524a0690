"""Arrange: the entries of a long copy plan by host address, in buckets.

A GPU keeps few address translations of host memory. The rows of many requests as `resolve` plans them lie all
over the pool and miss them; taken one stretch of the pool after the other they share them. One launch counts
the entries of each bucket, the next gives each entry its place. Inside a bucket the order is not specified.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import replace

import torch

from hisparse_sgl.kernels.backend import can_overlap, check_tensor, choose, jit, launch, tl
from hisparse_sgl.kernels.state import CopyPlan

# Entries from which a plan is long: a shorter one is copied as it is.
LONG_PLAN = 2048
# Batches that can plan fewer entries than this are not worth the two launches.
LARGE_BATCH = 32768
BLOCK = 1024


@jit
def _bucket_of(pair, bucket_slots, BUCKETS: tl.constexpr):
    slot = ((pair << 32) >> 32).to(tl.int32)
    return tl.minimum(tl.maximum(slot, 0) // bucket_slots, BUCKETS - 1)


@jit
def _count_kernel(
    entries,
    count,
    bins,
    capacity,
    bucket_slots,
    long_plan,
    BUCKETS: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    stop = tl.minimum(tl.load(count), capacity)
    if stop > long_plan:
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = index < stop
        pair = tl.load(entries + index, mask=inside, other=0)
        own = _bucket_of(pair, bucket_slots, BUCKETS)
        tl.atomic_add(bins + own * SPREAD, 1, mask=inside, sem="relaxed")


@jit
def _place_kernel(
    entries,
    ordered,
    count,
    bins,
    arrivals,
    capacity,
    bucket_slots,
    long_plan,
    BUCKETS: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    stop = tl.minimum(tl.load(count), capacity)
    if stop > long_plan:
        bucket = tl.arange(0, BUCKETS)
        counts = tl.load(bins + bucket * SPREAD)
        before = tl.cumsum(counts, 0) - counts
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = index < stop
        pair = tl.load(entries + index, mask=inside, other=0)
        own = _bucket_of(pair, bucket_slots, BUCKETS)
        taken = bins + BUCKETS * SPREAD
        place = tl.atomic_add(taken + own * SPREAD, 1, mask=inside, sem="relaxed")
        tl.store(ordered + tl.gather(before, own, 0) + place, pair, mask=inside)
        tl.debug_barrier()
        # The last program leaves the bins zero: no launch is spent on clearing them.
        if tl.atomic_add(arrivals, 1) == tl.num_programs(0) - 1:
            tl.store(bins + bucket * SPREAD, tl.zeros_like(bucket))
            tl.store(taken + bucket * SPREAD, tl.zeros_like(bucket))
            tl.store(arrivals, 0)


def arrange(plan: CopyPlan, *, most: int, num_slots: int, backend: str | None = None) -> CopyPlan:
    """Order a plan that `resolve` has just written, if that can pay, for `gather` and its replays.

    Args:
        plan: with an ``order``, which is overwritten when the plan has more than ``LONG_PLAN`` entries. The
            rest of the plan stays.
        most: entries that the batch could plan, B * query_rows * top_k. Below ``LARGE_BATCH`` nothing is
            launched.
        num_slots: slots of the host pool.
        backend: see `backend.choose`. The reference orders nothing: its copies do not depend on it.

    Returns:
        The plan to copy by: this one, or without its order.

    Raises:
        ValueError: a tensor does not fit, or the plan is smaller than ``most``.
    """
    order, capacity, device = plan.order, plan.entries.shape[0], plan.entries.device
    if order is None or most < LARGE_BATCH or choose(plan.entries, backend) == "reference":
        return plan if order is None else replace(plan, order=None)
    if not 0 < most <= capacity or num_slots < 1:
        raise ValueError(f"most={most} must be 1..{capacity}, num_slots={num_slots} at least 1; correct them")
    check_tensor("plan.order.entries", order.entries, torch.int32, (capacity, 2), device)
    buckets, spread = order.bins.shape[1:]
    overlap = can_overlap(device)
    options = {"BUCKETS": buckets, "SPREAD": spread, "BLOCK": BLOCK, "OVERLAP": overlap, "num_warps": 8}
    if overlap:
        options["launch_pdl"] = True
    grid = (-(-most // BLOCK),)
    sizes = capacity, -(-num_slots // buckets), LONG_PLAN
    entries = plan.entries.view(torch.int64)
    launch(_count_kernel, grid, device, entries, plan.count, order.bins, *sizes, **options)
    placed = entries, order.entries.view(torch.int64), plan.count, order.bins, order.arrivals
    launch(_place_kernel, grid, device, *placed, *sizes, **options)
    return plan
