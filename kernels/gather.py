"""Gather: copy the planned rows from the host pool to the device pool, one layer a call."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch

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
LONG_PLAN = 8192


@jit
def word_in_page(index, word, P: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Word of a page that holds ``word`` of row ``index``; FIRST, SECOND: 8-byte words of the parts."""
    return tl.where(word < FIRST, index * FIRST + word, P * FIRST + index * SECOND + word - FIRST)


@jit
def _gather_kernel(
    host,
    device,
    entries,
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
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    entry = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.load(entries + tl.minimum(entry, capacity - 1))
    stop = tl.minimum(tl.load(count), capacity)
    programs = tl.num_programs(0)
    programs = tl.where(stop > long_plan, tl.minimum(programs, few), programs)
    stop = tl.where(entry < programs, stop, 0)
    word = tl.arange(0, BLOCK)
    while entry < stop:
        slot = (pair << 32) >> 32
        row = pair >> 32
        entry += programs
        # The next entry is read while this row is on its way.
        pair = tl.load(entries + tl.minimum(entry, capacity - 1))
        readable = (slot >= 0) & (slot < host_pages * P)
        writable = (row >= 0) & (row < device_pages * P)
        slot = tl.where(readable, slot, 0)
        row = tl.where(writable, row, 0)
        source = word_in_page(slot % P, word, P, FIRST, SECOND)
        target = word_in_page(row % P, word, P, FIRST, SECOND)
        data = tl.load(
            host + (slot // P) * host_stride + source,
            mask=word < tl.where(readable & writable, FIRST + SECOND, 0),
            other=0,
        )
        tl.store(
            device + (row // P) * device_stride + target,
            data,
            mask=word < tl.where(writable, FIRST + SECOND, 0),
        )


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
    host: torch.Tensor, device: torch.Tensor, plan: CopyPlan, fmt: RowFormat, *, backend: str | None = None
) -> None:
    """Copy the rows of ``plan`` from ``host`` to ``device``. The same call with another layer's tensors
    replays it.

    Args:
        host: uint8 [num_host_pages, page_bytes]; pinned CPU memory, or on the device of ``device``.
        device: uint8 [num_device_pages, page_bytes]; mutated. Padding bytes are not touched.
        plan: what `resolve` wrote. A slot outside the host pool gives a zero row; a destination out of range
            is skipped.
        fmt: byte layout of both pools.
        backend: see `backend.choose`.

    Raises:
        ValueError: a tensor does not fit ``fmt`` or cannot be reached.
    """
    for name, pool in (("host", host), ("device", device)):
        check_tensor(name, pool, torch.uint8, (None, fmt.page_bytes))
        check_pool(name, pool, fmt)
    check_tensor("plan.count", plan.count, torch.int32, (None,), device.device)
    check_tensor("plan.entries", plan.entries, torch.int32, (None, 2), device.device)
    if not plan.entries.is_contiguous():
        raise ValueError("plan.entries must be contiguous; build it with CopyPlan.empty")
    if plan.entries.numel() == 0:
        return
    if choose(device, backend) == "reference":
        gather_reference(host, device, plan, fmt)
        return
    check_reachable(host, device)
    words = [size // WORD_BYTES for size in fmt.parts] + [0]
    overlap = can_overlap(device.device)
    launch(
        _gather_kernel,
        (copy_programs(device.device, plan.entries.shape[0], PROGRAMS),),
        device.device,
        host.view(torch.int64),
        device.view(torch.int64),
        plan.entries.view(torch.int64),
        plan.count,
        plan.entries.shape[0],
        host.shape[0],
        device.shape[0],
        host.stride(0) // WORD_BYTES,
        device.stride(0) // WORD_BYTES,
        LONG_PLAN,
        copy_programs(device.device, plan.entries.shape[0], FEW_PROGRAMS),
        P=fmt.page_size,
        FIRST=words[0],
        SECOND=words[1],
        BLOCK=power_of_two(words[0] + words[1]),
        OVERLAP=overlap,
        num_warps=1,
        **({"launch_pdl": True} if overlap else {}),
    )
