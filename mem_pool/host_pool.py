"""The only full copy of the cache: host memory for every slot of every layer, pinned for the GPU."""

from __future__ import annotations

import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import psutil
import torch

from hisparse_sgl.mem_pool.layout import KVLayout

logger = logging.getLogger(__name__)

MAX_SHARE_OF_AVAILABLE = 0.95
PREFAULT_THREADS = 16

# An mmap object unmaps when it dies; memory that the driver could not let go of must outlive the pool.
_left_to_kernel: list[mmap.mmap] = []


class HostPool:
    """`buffer` uint8 [layers, num_pages, page_bytes] of the layout's host-backed group, zero at the start.

    Args:
        num_pages: host pages, the null page 0 included.
        pinned: register the memory with CUDA; None does so if CUDA is available.

    Raises:
        ValueError: the pool is larger than 95 % of the available RAM, or pinned without CUDA.
        RuntimeError: CUDA refused to register the memory, which is given back then.

    `close()` gives the memory back; without it the memory stays pinned for the life of the process.
    """

    def __init__(self, layout: KVLayout, num_pages: int, pinned: bool | None = None) -> None:
        self._mapping: mmap.mmap | None = None
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        if self.pinned and not torch.cuda.is_available():
            raise ValueError("pinned is True, the limit is False without a CUDA device: use pinned=None")
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}, the limit is >= 2: page 0 is null, add memory")
        self.num_pages = num_pages
        self.num_bytes = layout.host_bytes(num_pages)
        _check_available(self.num_bytes, num_pages)
        group = layout.host_group
        self._mapping = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Unlike torch.frombuffer, the array locks the mapping: a view that outlives close() stays valid.
        flat = np.frombuffer(self._mapping, dtype=np.uint8)
        self._buffer = torch.from_numpy(flat).view(group.num_layers, num_pages, group.row.page_bytes)
        del flat
        error = _register(self._mapping, self._buffer) if self.pinned else None
        if error:
            self.pinned = False
            self.close()
            raise RuntimeError(
                f"{self.num_bytes} bytes could not be pinned, {error}: raise the ulimit on locked "
                "memory or ask for fewer pages"
            )

    @property
    def buffer(self) -> torch.Tensor:
        """uint8 [layers, num_pages, page_bytes]. ValueError after `close()`."""
        if self._mapping is None:
            raise ValueError("buffer was read, the limit is before close(): make a new HostPool")
        return self._buffer

    def close(self) -> None:
        """Unpins and unmaps the memory, after all copies. Safe to call again and with a dead CUDA context.

        If CUDA cannot unregister the memory, it stays mapped until the process ends and a warning says so. If
        a caller still holds a view of `buffer`, the memory is unmapped when that view dies.
        """
        if self._mapping is None:
            return
        mapping, self._mapping = self._mapping, None
        address = self._buffer.data_ptr()
        del self._buffer
        error = _unregister(address) if self.pinned else None
        if error:
            _left_to_kernel.append(mapping)
            logger.warning("%d bytes of host memory stay pinned until exit: %s", self.num_bytes, error)
            return
        try:
            mapping.close()
        except BufferError:
            logger.warning("%d bytes of host memory stay mapped: a view of them is alive", self.num_bytes)

    def __enter__(self) -> HostPool:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_available(num_bytes: int, num_pages: int) -> None:
    available = psutil.virtual_memory().available
    limit = int(available * MAX_SHARE_OF_AVAILABLE)
    if num_bytes > limit:
        raise ValueError(
            f"num_pages is {num_pages} ({num_bytes / 2**30:.2f} GiB), the limit is "
            f"{limit // (num_bytes // num_pages)} ({limit / 2**30:.2f} GiB, {MAX_SHARE_OF_AVAILABLE:.0%} of "
            f"the {available / 2**30:.2f} GiB available): ask for fewer pages or free memory"
        )


def _register(mapping: mmap.mmap, buffer: torch.Tensor) -> str | None:
    """Pins the memory of `buffer`, which fills `mapping`. Why CUDA refused, or None when it is pinned."""
    # Huge pages and faulting them in from many threads make registration several times faster: the driver
    # would fault small pages one by one.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    threads = min(PREFAULT_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(torch.Tensor.zero_, buffer.view(-1).chunk(threads)))
    try:
        cudart: Any = torch.cuda.cudart()
        code = cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    except RuntimeError as error:
        return str(error)
    return f"cudaHostRegister returned {code}" if int(code) != 0 else None


def _unregister(address: int) -> str | None:
    """Why the memory at `address` is still registered, or None when it is not."""
    try:
        torch.cuda.synchronize()
        cudart: Any = torch.cuda.cudart()
        code = cudart.cudaHostUnregister(address)
    except RuntimeError as error:
        return str(error)
    return f"cudaHostUnregister returned {code}" if int(code) != 0 else None
