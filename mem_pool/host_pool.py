"""The only full copy of the cache: host memory for every slot of every layer, pinned for the GPU."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import psutil
import torch

from hisparse_sgl.mem_pool.host_memory import CHUNK_BYTES, HostMemory, OnProgress
from hisparse_sgl.mem_pool.layout import KVLayout
from hisparse_sgl.mem_pool.marks import Events, Mark

MAX_SHARE_OF_AVAILABLE = 0.95


class HostPool:
    """`buffer` uint8 [layers, num_pages, page_bytes] of the layout's host-backed group, zero at the start.

    Args:
        num_pages: host pages, the null page 0 included.
        pinned: register the memory with CUDA; None does so if CUDA is available.
        chunk_bytes: most bytes of one registration.
        on_progress: called after each registration with a `host_memory.Progress`.

    Raises:
        ValueError: the pool is larger than 95 % of the available RAM, pinned without CUDA, or a chunk is too
            small to be whole pages.
        RuntimeError: CUDA refused to register the memory, which is given back then.

    `close()` gives the memory back; without it the memory stays pinned for the life of the process.
    """

    is_writer = True

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        pinned: bool | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._describe(layout, num_pages, pinned)
        check_available(self.num_bytes, num_pages)
        self._open(self.num_bytes, chunk_bytes, on_progress)

    def _describe(self, layout: KVLayout, num_pages: int, pinned: bool | None) -> None:
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        if self.pinned and not torch.cuda.is_available():
            raise ValueError("pinned is True, the limit is False without a CUDA device: use pinned=None")
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}, the limit is >= 2: page 0 is null, add memory")
        self.events = Events()
        self.layout = layout
        self.num_pages = num_pages
        self.num_bytes = layout.host_bytes(num_pages)

    def _open(
        self, num_bytes: int, chunk_bytes: int, on_progress: OnProgress | None, fd: int | None = None
    ) -> None:
        group = self.layout.host_group
        self.memory = HostMemory(
            num_bytes,
            group.row.page_bytes,
            pinned=self.pinned,
            chunk_bytes=chunk_bytes,
            on_progress=on_progress,
            fd=fd,
        )
        flat = self.memory.flat[: self.num_bytes]
        self._buffer: torch.Tensor | None = flat.view(group.num_layers, self.num_pages, group.row.page_bytes)

    @property
    def buffer(self) -> torch.Tensor:
        """uint8 [layers, num_pages, page_bytes]. ValueError after `close()`."""
        if self._buffer is None:
            raise ValueError("buffer was read, the limit is before close(): make a new HostPool")
        return self._buffer

    @property
    def bounds(self) -> list[int]:
        """Bytes of `buffer` at which registrations begin, and the end of the last: no copy may cross one."""
        return self.memory.bounds

    def record(self, stream: torch.cuda.Stream | None) -> Mark | None:
        """Mark the copies to the host that `stream` was given so far; None when they are over already."""
        return self.events.record(stream)

    def release(self, mark: Any) -> None:
        """A mark of `record` is over, and nobody asks it again."""
        self.events.release(mark)

    def close(self) -> None:
        """Unpins and unmaps the memory, after all copies. Safe to call again and with a dead CUDA context.

        If CUDA cannot unregister the memory, it stays mapped until the process ends and a warning says so. If
        a caller still holds a view of `buffer`, the memory is unmapped when that view dies.
        """
        self._buffer = None
        self.memory.close()

    def __enter__(self) -> HostPool:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def check_available(num_bytes: int, num_pages: int) -> None:
    """Raise ValueError if a pool of `num_bytes` in `num_pages` leaves the machine too little memory."""
    available = psutil.virtual_memory().available
    limit = int(available * MAX_SHARE_OF_AVAILABLE)
    if num_bytes > limit:
        raise ValueError(
            f"num_pages is {num_pages} ({num_bytes / 2**30:.2f} GiB), the limit is "
            f"{limit // (num_bytes // num_pages)} ({limit / 2**30:.2f} GiB, {MAX_SHARE_OF_AVAILABLE:.0%} of "
            f"the {available / 2**30:.2f} GiB available): ask for fewer pages or free memory"
        )
