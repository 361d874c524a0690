"""A mapping of host memory, pinned for the GPU chunk by chunk, and given back in every state."""

from __future__ import annotations

import logging
import math
import mmap
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from hisparse_sgl.mem_pool import cuda_runtime
from hisparse_sgl.mem_pool.prefault import advise_huge_pages, populate

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 30
"""Bytes of one registration: small enough that faulting in the next hides behind it, and far below the limit
of a driver (LMCache's issue 5177 met one of 512 GiB)."""
GIB = 1 << 30

# An mmap object unmaps when it dies; memory that the driver could not let go of must outlive the pool.
_left_to_kernel: list[mmap.mmap] = []


class Progress(NamedTuple):
    """What is faulted in and pinned, of how much, and the seconds it took."""

    done_bytes: int
    total_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.done_bytes / GIB / max(self.seconds, 1e-9)
        return (
            f"{self.done_bytes / GIB:.1f} of {self.total_bytes / GIB:.1f} GiB in {self.seconds:.1f} s, "
            f"{rate:.1f} GiB/s"
        )


OnProgress = Callable[[Progress], None]


def chunk_bounds(num_bytes: int, page_bytes: int, chunk_bytes: int) -> list[int]:
    """Where registrations begin, and the end of the last: [0, ..., num_bytes].

    The memory is a row of pages of `page_bytes`, layer after layer. Every bound is a multiple of a page, so
    no page lies in two registrations (a batched copy of it would fail), and of the OS's page, so no two
    registrations share one (CUDA refuses that).

    Raises:
        ValueError: a chunk is smaller than that.
    """
    unit = math.lcm(page_bytes, mmap.PAGESIZE)
    step = chunk_bytes // unit * unit
    if step == 0:
        raise ValueError(
            f"chunk_bytes is {chunk_bytes}, the limit is >= {unit}, the least that is whole pages of the "
            f"pool ({page_bytes} bytes) and of the OS ({mmap.PAGESIZE}): raise it"
        )
    return [*range(0, num_bytes, step), num_bytes]


class HostMemory:
    """`num_bytes` of zeros, or of the file `fd`; `flat` uint8 [num_bytes].

    Args:
        page_bytes: see `chunk_bounds`; no copy inside a page crosses two registrations.
        pinned: fault it all in and register it with CUDA, in chunks of at most `chunk_bytes`.
        on_progress: called after each chunk; a line is logged as well.
        fd: shared memory to map in place of private memory, `num_bytes` or more long.

    Raises:
        RuntimeError, OSError: CUDA refused to register the memory, or there is none. What was done before,
            also by an `on_progress` that raised, is undone.
    """

    def __init__(
        self,
        num_bytes: int,
        page_bytes: int,
        *,
        pinned: bool,
        chunk_bytes: int = CHUNK_BYTES,
        on_progress: OnProgress | None = None,
        fd: int | None = None,
    ) -> None:
        self.num_bytes = num_bytes
        self.bounds = chunk_bounds(num_bytes, page_bytes, chunk_bytes) if pinned else [0, num_bytes]
        self.registered: list[int] = []  # addresses, in order
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd is None else mmap.MAP_SHARED
        mapping = mmap.mmap(-1 if fd is None else fd, num_bytes, flags=flags)
        self._mapping: mmap.mmap | None = mapping
        # Unlike torch.frombuffer, the array locks the mapping: a view that outlives close() stays valid.
        self._flat = torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))
        if not pinned:
            return
        try:
            self._pin(mapping, fd is not None, on_progress)
        except BaseException:
            self.close()
            raise

    @property
    def flat(self) -> torch.Tensor:
        """uint8 [num_bytes]. ValueError after `close()`."""
        if self._mapping is None:
            raise ValueError("flat was read, the limit is before close(): map memory again")
        return self._flat

    def close(self) -> None:
        """Unregister the chunks, last first, and unmap. Safe to call again and with a dead CUDA context.

        If CUDA cannot unregister a chunk, the memory stays mapped until the process ends. If a view of
        `flat` is alive, the memory is unmapped when that view dies. A warning says so.
        """
        if self._mapping is None:
            return
        mapping, self._mapping = self._mapping, None
        del self._flat
        began = time.perf_counter()
        pinned = bool(self.registered)
        error = _unregister(self.registered) if pinned else None
        if error:
            _left_to_kernel.append(mapping)
            logger.warning("%d bytes of host memory stay pinned until exit: %s", self.num_bytes, error)
            return
        try:
            mapping.close()
        except BufferError:
            logger.warning("%d bytes of host memory stay mapped: a view of them is alive", self.num_bytes)
        if pinned:
            seconds = time.perf_counter() - began
            logger.info("host memory: %.1f GiB given back in %.1f s", self.num_bytes / GIB, seconds)

    def _pin(self, mapping: mmap.mmap, shared: bool, on_progress: OnProgress | None) -> None:
        reason = advise_huge_pages(mapping, shared)
        if reason:
            logger.warning("host memory in small pages, slower to pin and to read: %s", reason)
        if not shared:
            # A fork would copy every pinned page, or let the driver write where this process does not read.
            mapping.madvise(mmap.MADV_DONTFORK)
        address, chunks = self._flat.data_ptr(), deque(pairwise(self.bounds))
        began = time.perf_counter()
        # The driver pins on one thread: meanwhile the next chunk is faulted in.
        with ThreadPoolExecutor(1) as executor:
            ready = executor.submit(populate, mapping, address, *chunks[0], shared)
            while chunks:
                ready.result()
                start, end = chunks.popleft()
                if chunks:
                    ready = executor.submit(populate, mapping, address, *chunks[0], shared)
                error = _register(address + start, end - start)
                if error:
                    raise RuntimeError(
                        f"{self.num_bytes} bytes could not be pinned, {error}: raise the ulimit on locked "
                        "memory or ask for fewer pages"
                    )
                self.registered.append(address + start)
                progress = Progress(end, self.num_bytes, time.perf_counter() - began)
                logger.info("host memory pinned: %s", progress)
                if on_progress:
                    on_progress(progress)


def _register(address: int, num_bytes: int) -> str | None:
    """Why CUDA refused, or None when the memory is pinned."""
    try:
        cudart: Any = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(address, num_bytes, 0))
    except RuntimeError as error:
        return str(error)
    if code:
        cuda_runtime.clear_error()
    return f"cudaHostRegister returned {code}" if code else None


def _unregister(addresses: list[int]) -> str | None:
    """Why memory is still registered, or None when none is. Takes away from `addresses` what is not."""
    try:
        torch.cuda.synchronize()
        cudart: Any = torch.cuda.cudart()
        while addresses:
            code = int(cudart.cudaHostUnregister(addresses[-1]))
            if code:
                cuda_runtime.clear_error()
                return f"cudaHostUnregister returned {code}"
            addresses.pop()
    except RuntimeError as error:
        return str(error)
    return None
