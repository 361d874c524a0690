"""Copy runs of pages between the host pool and the device pool, all layers, in few calls of the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from hisparse_sgl.mem_pool import cuda_runtime
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.host_pool import HostPool

Method = Literal["batch", "strided", "plain"]
DEFAULT_STREAM = 0


class Run(NamedTuple):
    """`num_pages` pages that are neighbours on both sides."""

    host_page: int
    device_page: int
    num_pages: int


class PageCopies:
    """Copies on the current stream.

    Args:
        host, device: read at each copy, so that closing them ends all use of their memory.
        method: "batch", one call for all runs (cudaMemcpyBatchAsync of CUDA 12.8); "strided", a call a run
            (cudaMemcpy2DAsync over the layers, of less than 2 GiB each in one registration); "plain", torch
            copies, a call a run and layer. None takes the first that works here.

    Raises:
        ValueError: `method` does not work here.
    """

    def __init__(self, host: HostPool, device: DevicePool, method: Method | None = None) -> None:
        self.host = host
        self.device = device
        self.runtime = cuda_runtime.load() if device.buffer.is_cuda else None
        usable = self.usable(host, device)
        if method is not None and method not in usable:
            raise ValueError(f"method is {method!r}, the limit is one of {usable}: use None")
        self.method = method or usable[0]

    @staticmethod
    def usable(host: HostPool, device: DevicePool) -> list[Method]:
        """The methods that work for these pools."""
        methods: list[Method] = []
        runtime = cuda_runtime.load() if device.buffer.is_cuda else None
        if runtime is not None and host.pinned:
            widest = max(host.buffer.stride(0), device.buffer.stride(0))
            if runtime.has_batch:
                methods.append("batch")
            if len(host.bounds) == 2 and widest <= cuda_runtime.MAX_PITCH:
                methods.append("strided")
        return [*methods, "plain"]

    def copy(self, runs: Sequence[Run], to_host: bool) -> None:
        """Copy the pages of `runs`, device to host or host to device."""
        if not runs:
            return
        if self.method == "plain":
            self._plain(runs, to_host)
            return
        stream = torch.cuda.current_stream(self.device.buffer.device).cuda_stream
        if self.method == "strided":
            self._strided(runs, to_host, stream)
        elif stream == DEFAULT_STREAM:
            self._plain(runs, to_host)  # cudaMemcpyBatchAsync refuses this stream
        else:
            self._batch(runs, to_host, stream)

    def _strided(self, runs: Sequence[Run], to_host: bool, stream: int) -> None:
        assert self.runtime is not None
        host, device = self.host.buffer, self.device.buffer
        layers, _, page_bytes = host.shape
        for run in runs:
            ours = (host.data_ptr() + run.host_page * page_bytes, host.stride(0))
            theirs = (device.data_ptr() + run.device_page * page_bytes, device.stride(0))
            target, source = (ours, theirs) if to_host else (theirs, ours)
            self.runtime.copy_2d(*target, *source, run.num_pages * page_bytes, layers, to_host, stream)

    def _batch(self, runs: Sequence[Run], to_host: bool, stream: int) -> None:
        assert self.runtime is not None
        host, device = self.host.buffer, self.device.buffer
        ours, theirs, sizes = pieces(runs, host, device, self.host.bounds)
        ours, theirs = ours + host.data_ptr(), theirs + device.data_ptr()
        target, source = (ours, theirs) if to_host else (theirs, ours)
        self.runtime.copy_batch(target, source, sizes, stream)

    def _plain(self, runs: Sequence[Run], to_host: bool) -> None:
        host, device = self.host.buffer.view(-1), self.device.buffer.view(-1)
        table = pieces(runs, self.host.buffer, self.device.buffer, self.host.bounds)
        for ours, theirs, size in zip(*(column.tolist() for column in table), strict=True):
            on_host, on_device = host[ours : ours + size], device[theirs : theirs + size]
            target, source = (on_host, on_device) if to_host else (on_device, on_host)
            target.copy_(source, non_blocking=True)


def pieces(
    runs: Sequence[Run], host: torch.Tensor, device: torch.Tensor, bounds: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Byte offsets in `host` and in `device`, and sizes, of the contiguous pieces of `runs`, all int64 [n].

    A run is one piece a layer, cut at those `bounds` of the host pool that lie inside it.
    """
    layers, _, page_bytes = host.shape
    table = np.array(runs, dtype=np.int64).reshape(-1, 3) * page_bytes
    layer = np.arange(layers, dtype=np.int64)[:, None]
    ours = (layer * host.stride(0) + table[:, 0]).ravel()
    theirs = (layer * device.stride(0) + table[:, 1]).ravel()
    sizes = np.tile(table[:, 2], layers)
    cuts = np.asarray(bounds[1:-1], dtype=np.int64)
    while True:
        # Where the first bound behind the start of a piece lies before its end.
        after = np.searchsorted(cuts, ours, side="right")
        bound = np.append(cuts, np.iinfo(np.int64).max)[after]
        cut = bound < ours + sizes
        if not cut.any():
            return ours, theirs, sizes
        head = bound[cut] - ours[cut]
        ours = np.concatenate([ours, bound[cut]])
        theirs = np.concatenate([theirs, theirs[cut] + head])
        rest = sizes[cut] - head
        sizes = sizes.copy()
        sizes[cut] = head
        sizes = np.concatenate([sizes, rest])
