"""Scatter: copy rows from the device pool to the host pool in all layers at once (mirror and spill)."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from hisparse_sgl.kernels.backend import (
    Backend,
    check_tensor,
    choose,
    copy_programs,
    jit,
    launch,
    power_of_two,
    tl,
)
from hisparse_sgl.kernels.gather import check_pool, check_reachable
from hisparse_sgl.kernels.rows import WORD_BYTES, RowFormat, row_view

IDS = (torch.int32, torch.int64)


@jit
def _word_in_page(index, word, P: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Word of a page that holds ``word`` of row ``index``; FIRST, SECOND: 8-byte words of the parts."""
    return tl.where(word < FIRST, index * FIRST + word, P * FIRST + index * SECOND + word - FIRST)


@jit
def _scatter_kernel(
    device,
    host,
    rows,
    slots,
    num_rows,
    num_items,
    device_pages,
    host_pages,
    device_layer_stride,
    device_stride,
    host_layer_stride,
    host_stride,
    rows_stride,
    slots_stride,
    P: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    while item < num_items:
        layer = item // num_rows
        entry = item % num_rows
        row = tl.load(rows + entry * rows_stride).to(tl.int64)
        slot = tl.load(slots + entry * slots_stride).to(tl.int64)
        copied = (row >= 0) & (row < device_pages * P) & (slot >= P) & (slot < host_pages * P)
        row = tl.where(copied, row, 0)
        slot = tl.where(copied, slot, 0)
        source = layer * device_layer_stride + (row // P) * device_stride
        source += _word_in_page(row % P, word, P, FIRST, SECOND)
        target = layer * host_layer_stride + (slot // P) * host_stride
        target += _word_in_page(slot % P, word, P, FIRST, SECOND)
        in_row = word < tl.where(copied, FIRST + SECOND, 0)
        tl.store(host + target, tl.load(device + source, mask=in_row, other=0), mask=in_row)
        item += tl.num_programs(0)


def scatter_reference(
    device: torch.Tensor, host: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, fmt: RowFormat
) -> None:
    """The plain form of `scatter`."""
    rows, slots = rows.long(), slots.long()
    size = fmt.page_size
    copied = (rows >= 0) & (rows < device.shape[1] * size) & (slots >= size) & (slots < host.shape[1] * size)
    rows, slots = rows[copied], slots[copied].to(host.device)
    for part in range(len(fmt.parts)):
        data = row_view(device, fmt, part)[:, rows // size, rows % size].to(host.device)
        row_view(host, fmt, part)[:, slots // size, slots % size] = data


class _Pair(NamedTuple):
    """What all scatters between two pools have in common. Holds neither of them."""

    device: weakref.ref[torch.Tensor]
    host: weakref.ref[torch.Tensor]
    fmt: RowFormat
    wanted: str | None
    backend: Backend
    where: torch.device
    layers: int
    sizes: tuple[int, ...]  # pages of both, strides of both in words
    options: dict[str, Any]

    @classmethod
    def check(cls, device: torch.Tensor, host: torch.Tensor, fmt: RowFormat, wanted: str | None) -> _Pair:
        """Raises ValueError as `scatter` does for its pools."""
        check_tensor("device", device, torch.uint8, (None, None, fmt.page_bytes))
        check_tensor("host", host, torch.uint8, (device.shape[0], None, fmt.page_bytes))
        for name, pool in (("host", host), ("device", device)):
            check_pool(name, pool, fmt)
        backend = choose(device, wanted)
        if backend != "reference":
            check_reachable(host, device)
        first, second = [size // WORD_BYTES for size in (*fmt.parts, 0)[:2]]
        strides = (stride // WORD_BYTES for stride in (*device.stride()[:2], *host.stride()[:2]))
        return cls(
            weakref.ref(device),
            weakref.ref(host),
            fmt,
            wanted,
            backend,
            device.device,
            device.shape[0],
            (device.shape[1], host.shape[1], *strides),
            {
                "P": fmt.page_size,
                "FIRST": first,
                "SECOND": second,
                "BLOCK": power_of_two(first + second),
                "num_warps": 4,
            },
        )

    def is_of(self, device: torch.Tensor, host: torch.Tensor, fmt: RowFormat, wanted: str | None) -> bool:
        return self.device() is device and self.host() is host and self.fmt is fmt and self.wanted == wanted


_last: _Pair | None = None


def _pair_of(device: torch.Tensor, host: torch.Tensor, fmt: RowFormat, wanted: str | None) -> _Pair:
    """A process mirrors between the same two pools in every step: they are checked in the first."""
    global _last
    pair = _last
    if pair is None or not pair.is_of(device, host, fmt, wanted):
        pair = _last = _Pair.check(device, host, fmt, wanted)
    return pair


def scatter(
    device: torch.Tensor,
    host: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    fmt: RowFormat,
    *,
    backend: str | None = None,
) -> None:
    """Copy device row ``rows[i]`` to host slot ``slots[i]`` in every layer, in one launch.

    Args:
        device: uint8 [layers, num_device_pages, page_bytes].
        host: uint8 [layers, num_host_pages, page_bytes]; mutated. Pinned CPU memory, or on the same device.
        rows: int32 or int64 [n] device rows. A negative or too large one is skipped.
        slots: int32 or int64 [n] host slots, all different. One below ``page_size`` (null page) or too
            large is skipped.
        fmt: byte layout of both pools.
        backend: see `backend.choose`.

    The pools are checked again only when they are other tensors than in the last call.

    Raises:
        ValueError: a tensor does not fit the others or ``fmt``, or cannot be reached.
    """
    pair = _pair_of(device, host, fmt, backend)
    check_tensor("rows", rows, IDS, (None,), pair.where)
    num_rows = rows.shape[0]
    check_tensor("slots", slots, IDS, (num_rows,), pair.where)
    num_items = num_rows * pair.layers
    if num_items == 0:
        return
    if pair.backend == "reference":
        scatter_reference(device, host, rows, slots, fmt)
        return
    launch(
        _scatter_kernel,
        (copy_programs(pair.where, num_items),),
        pair.where,
        device.view(torch.int64),
        host.view(torch.int64),
        rows,
        slots,
        num_rows,
        num_items,
        *pair.sizes,
        rows.stride(0),
        slots.stride(0),
        **pair.options,
    )
