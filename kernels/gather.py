"""Gather: copy the planned rows from the host pool to the device pool, one layer a call."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch

from hisparse_sgl.kernels.arrange import LONG_PLAN
from hisparse_sgl.kernels.backend import (
    can_overlap,
    check_tensor,
    choose,
    copy_programs,
    jit,
    launch,
    power_of_two,
    tl,
)
from hisparse_sgl.kernels.rows import WORD_BYTES, RowFormat, row_view
from hisparse_sgl.kernels.state import CopyPlan

# Programs a multiprocessor: short plans want many rows in flight, long ones then make the GPU's address
# translation thrash (measured on an H200).
PROGRAMS = 8
FEW_PROGRAMS = 2
# Beside other kernels: a multiprocessor on which even one warp copies is lost to a large matrix product, so
# there are few programs, each with several rows in flight (measured, docs/kernels.md).
BESIDE_PROGRAMS = 16
BESIDE_ROWS = 8


@jit
def _copy_part(
    host,
    device,
    source,
    target,
    readable,
    writable,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy ``WORDS`` 8-byte words from each ``source`` to its ``target``, all [ROWS]; zeros for a row that
    cannot be read."""
    word = tl.arange(0, BLOCK)[None, :]
    in_row = word < tl.where(readable & writable, WORDS, 0)[:, None]
    data = tl.load(host + source[:, None] + word, mask=in_row, other=0)
    tl.store(device + target[:, None] + word, data, mask=word < tl.where(writable, WORDS, 0)[:, None])


@jit
def _gather_kernel(
    host,
    device,
    entries,
    ordered,
    count,
    capacity,
    host_pages,
    device_pages,
    host_stride,
    device_stride,
    long_plan,
    few,
    P: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ORDERED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    entry = tl.program_id(0) * ROWS
    lane = tl.arange(0, ROWS)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.load(entries + tl.minimum(entry + lane, capacity - 1))
    stop = tl.minimum(tl.load(count), capacity)
    is_long = stop > long_plan
    if ORDERED:
        # Not loaded instead of the one above: that would wait for the count.
        pair = tl.where(is_long, tl.load(ordered + tl.minimum(entry + lane, capacity - 1)), pair)
        entries = tl.where(is_long, ordered, entries)
    programs = tl.num_programs(0)
    programs = tl.where(is_long, tl.minimum(programs, few), programs)
    stop = tl.where(tl.program_id(0) < programs, stop, 0)
    while entry < stop:
        slot = (pair << 32) >> 32
        row = pair >> 32
        planned = entry + lane < stop
        entry += programs * ROWS
        # The next entries are read while these rows are on their way.
        pair = tl.load(entries + tl.minimum(entry + lane, capacity - 1))
        readable = (slot >= 0) & (slot < host_pages * P)
        writable = planned & (row >= 0) & (row < device_pages * P)
        slot = tl.where(readable, slot, 0)
        row = tl.where(writable, row, 0)
        source = (slot // P) * host_stride
        target = (row // P) * device_stride
        index = slot % P
        device_index = row % P
        _copy_part(
            host, device, source + index * FIRST, target + device_index * FIRST,
            readable, writable, FIRST, FIRST_BLOCK
        )  # fmt: skip
        if SECOND:
            _copy_part(
                host, device, source + P * FIRST + index * SECOND, target + P * FIRST + device_index * SECOND,
                readable, writable, SECOND, SECOND_BLOCK
            )  # fmt: skip


def gather_reference(host: torch.Tensor, device: torch.Tensor, plan: CopyPlan, fmt: RowFormat) -> None:
    """The plain form of `gather`."""
    slots, rows = plan.entries[: int(plan.count)].long().unbind(1)
    writable = (rows >= 0) & (rows < device.shape[0] * fmt.page_size)
    slots, rows = slots[writable], rows[writable]
    readable = (slots >= 0) & (slots < host.shape[0] * fmt.page_size)
    source = torch.where(readable, slots, 0).to(host.device)
    for part in range(len(fmt.parts)):
        data = row_view(host, fmt, part)[source // fmt.page_size, source % fmt.page_size].to(device.device)
        data[~readable] = 0
        row_view(device, fmt, part)[rows // fmt.page_size, rows % fmt.page_size] = data


def check_pool(name: str, pool: torch.Tensor, fmt: RowFormat) -> None:
    """Raise ValueError unless ``pool``, uint8 [..., num_pages, page_bytes], can be read in 8-byte words."""
    if pool.dtype != torch.uint8 or pool.shape[-1] != fmt.page_bytes:
        raise ValueError(
            f"{name} is {pool.dtype} {tuple(pool.shape)}, its last dimension must be {fmt.page_bytes} bytes "
            "(page_bytes) of uint8; build it from the same RowFormat"
        )
    *strides, last = pool.stride()
    if last != 1 or any(number % WORD_BYTES for number in (pool.data_ptr(), *strides)):
        raise ValueError(
            f"{name} has strides {pool.stride()}; its pages must be contiguous and {WORD_BYTES}-byte aligned"
        )


def check_reachable(host: torch.Tensor, device: torch.Tensor) -> None:
    """Raise ValueError unless a kernel on ``device``'s device can address ``host``."""
    if host.device != device.device and not (host.device.type == "cpu" and host.is_pinned()):
        raise ValueError(f"host.device={host.device} must be {device.device} or pinned memory; pin it")


def gather(
    host: torch.Tensor,
    device: torch.Tensor,
    plan: CopyPlan,
    fmt: RowFormat,
    *,
    beside: bool = False,
    backend: str | None = None,
) -> None:
    """Copy the rows of ``plan`` from ``host`` to ``device``. The same call with another layer's tensors
    replays it.

    Args:
        host: uint8 [num_host_pages, page_bytes]; pinned CPU memory, or on the device of ``device``.
        device: uint8 [num_device_pages, page_bytes]; mutated. Padding bytes are not touched.
        plan: what `resolve` wrote; one with an order as `arrange` gave it. A slot outside the host pool gives
            a zero row; a destination out of range is skipped.
        fmt: byte layout of both pools.
        beside: other kernels run at the same time: copy with few multiprocessors, which takes about a
            quarter longer and leaves the others free.
        backend: see `backend.choose`.

    Raises:
        ValueError: a tensor does not fit ``fmt`` or cannot be reached.
    """
    for name, pool in (("host", host), ("device", device)):
        check_tensor(name, pool, torch.uint8, (None, fmt.page_bytes))
        check_pool(name, pool, fmt)
    check_tensor("plan.count", plan.count, torch.int32, (None,), device.device)
    check_tensor("plan.entries", plan.entries, torch.int32, (None, 2), device.device)
    ordered = plan.entries if plan.order is None else plan.order.entries
    check_tensor("plan.order.entries", ordered, torch.int32, tuple(plan.entries.shape), device.device)
    if not plan.entries.is_contiguous() or not ordered.is_contiguous():
        raise ValueError("plan.entries must be contiguous; build it with CopyPlan.empty")
    if plan.entries.numel() == 0:
        return
    if choose(device, backend) == "reference":
        gather_reference(host, device, plan, fmt)
        return
    check_reachable(host, device)
    first, second = [size // WORD_BYTES for size in (*fmt.parts, 0)[:2]]
    overlap = can_overlap(device.device)
    capacity = plan.entries.shape[0]
    most = copy_programs(device.device, capacity, PROGRAMS)
    launch(
        _gather_kernel,
        (min(most, BESIDE_PROGRAMS) if beside else most,),
        device.device,
        host.view(torch.int64),
        device.view(torch.int64),
        plan.entries.view(torch.int64),
        ordered.view(torch.int64),
        plan.count,
        capacity,
        host.shape[0],
        device.shape[0],
        host.stride(0) // WORD_BYTES,
        device.stride(0) // WORD_BYTES,
        LONG_PLAN,
        copy_programs(device.device, capacity, FEW_PROGRAMS),
        P=fmt.page_size,
        FIRST=first,
        SECOND=second,
        FIRST_BLOCK=power_of_two(first),
        SECOND_BLOCK=power_of_two(second),
        ROWS=BESIDE_ROWS if beside else 1,
        ORDERED=plan.order is not None,
        OVERLAP=overlap,
        num_warps=BESIDE_ROWS if beside else 1,
        **({"launch_pdl": True} if overlap else {}),
    )
