"""One host pool for several processes of a machine: tensor-parallel ranks hold identical MLA rows.

The memory has no name. It lives in a memfd, which the kernel frees when the last process that maps it ends,
however it ends. Behind the buffer lies one OS page of counters.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hisparse_sgl.mem_pool.host_memory import CHUNK_BYTES, OnProgress
from hisparse_sgl.mem_pool.host_pool import HostPool, check_available
from hisparse_sgl.mem_pool.layout import KVLayout

NUM_EVENTS = 16
WAIT_SECONDS = 60.0
POLL_SECONDS = 50e-6
RECORDED, COMPLETED = 0, 1  # counters behind the buffer, int64


@dataclass(frozen=True)
class SharedHandle:
    """What another process needs to map the pool; send it in any way that pickles."""

    pid: int
    fd: int
    inode: int
    layout: KVLayout
    num_pages: int
    device: int | None
    events: tuple[bytes, ...]


@dataclass(frozen=True)
class SharedMark:
    """The writer's copies up to one `record`. Readers and writer number their records alike."""

    pool: SharedHostPool
    number: int

    def query(self) -> bool:
        return self.pool.query(self.number)

    def synchronize(self) -> None:
        self.pool.synchronize(self.number)


class SharedHostPool(HostPool):
    """A host pool that one process makes and alone writes, and others map and read.

    ``SharedHostPool.create`` makes it; its ``handle`` goes to the others, which call
    ``SharedHostPool.attach``. The writer calls ``record`` behind its copies, which counts 1, 2, 3, and so on;
    readers wait for such a number, on their stream or on the CPU. Every process pins the memory for itself
    and closes its own pool, in any order.
    """

    def __init__(self, layout: KVLayout, num_pages: int, pinned: bool | None, handle: SharedHandle | None):
        self._describe(layout, num_pages, pinned)
        self.is_writer = handle is None
        self.num_recorded = 0
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()
        self._events: Sequence[Any] = []
        self._handle = handle
        self._fd: int | None = None

    @classmethod
    def create(
        cls,
        layout: KVLayout,
        num_pages: int,
        pinned: bool | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        on_progress: OnProgress | None = None,
    ) -> SharedHostPool:
        """The writer's pool. Arguments and errors as of ``HostPool``."""
        pool = cls(layout, num_pages, pinned, None)
        check_available(pool.num_bytes, num_pages)
        fd = pool._fd = os.memfd_create("hisparse-host-pool", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, pool._mapped_bytes)
            pool._map(fd, chunk_bytes, on_progress)
            device = torch.cuda.current_device() if pool.pinned else None
            if pool.pinned:
                pool._events = [torch.cuda.Event(interprocess=True) for _ in range(NUM_EVENTS)]
            events = tuple(event.ipc_handle() for event in pool._events)
            inode = os.fstat(fd).st_ino
            pool._handle = SharedHandle(os.getpid(), fd, inode, layout, num_pages, device, events)
        except BaseException:
            pool.close()
            raise
        return pool

    @classmethod
    def attach(
        cls, handle: SharedHandle, *, chunk_bytes: int = CHUNK_BYTES, on_progress: OnProgress | None = None
    ) -> SharedHostPool:
        """A reader's pool, in another process of the same user, while the writer's is open.

        It is pinned if the writer's is.

        Raises:
            RuntimeError: the writer's memory cannot be reached; or as of ``HostPool``.
        """
        pool = cls(handle.layout, handle.num_pages, handle.device is not None, handle)
        try:
            fd = os.open(_path(handle), os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"the host pool of process {handle.pid} cannot be reached, {error}: attach while it is open, "
                "from a process of the same user that sees it in /proc"
            ) from error
        try:
            if os.fstat(fd).st_ino != handle.inode:
                raise RuntimeError(f"the host pool of process {handle.pid} is closed: attach before that")
            pool._map(fd, chunk_bytes, on_progress)
            if handle.device is not None:
                where = torch.device("cuda", handle.device)
                pool._events = [torch.cuda.Event.from_ipc_handle(where, event) for event in handle.events]
        except BaseException:
            pool.close()
            raise
        finally:
            os.close(fd)
        return pool

    @property
    def handle(self) -> SharedHandle:
        """For ``attach`` in other processes."""
        assert self._handle is not None
        return self._handle

    def record(self, stream: torch.cuda.Stream | None) -> SharedMark:
        """Behind its copies, the writer marks all that ``stream`` was given so far.

        A reader calls it for the copies that it leaves to the writer: its n-th mark is the writer's n-th.
        """
        self.num_recorded += 1
        number = self.num_recorded
        if not self.is_writer:
            return SharedMark(self, number)
        event = self.events.record(stream)
        if event is None:
            self._counters[COMPLETED] = number
        else:
            # A reader may be told of a later record of the same event: it waits longer than it has to.
            self._events[number % NUM_EVENTS].record(stream)
            self._pending.append((number, event))
        self._counters[RECORDED] = number
        return SharedMark(self, number)

    def release(self, mark: SharedMark) -> None:
        """Marks are numbers here: the event behind one is the pool's own."""

    def query(self, number: int) -> bool:
        """Whether the copies up to record ``number`` are in host memory. Never blocks."""
        while self._pending and self._pending[0][1].query():
            self._counters[COMPLETED], event = self._pending.popleft()
            self.events.release(event)
        if self._counters[COMPLETED] >= number:
            return True
        if self.is_writer or self._counters[RECORDED] < number or not self._events:
            return False
        return self._events[number % NUM_EVENTS].query()

    def wait(self, number: int, stream: torch.cuda.Stream, timeout: float = WAIT_SECONDS) -> None:
        """Make ``stream`` wait for the copies up to record ``number``; the CPU waits until they are enqueued.

        Raises:
            RuntimeError: the writer is gone.
            TimeoutError: it did not record that number in ``timeout`` seconds.
        """
        self._wait_recorded(number, timeout)
        if self._counters[COMPLETED] < number:
            stream.wait_event(self._events[number % NUM_EVENTS])

    def synchronize(self, number: int, timeout: float = WAIT_SECONDS) -> None:
        """Block until ``query(number)``. Errors as of ``wait``."""
        self._wait_recorded(number, timeout)
        while not self.query(number):
            self._events[number % NUM_EVENTS].synchronize()

    def close(self) -> None:
        """As of ``HostPool``. Readers that are attached keep the memory; nobody can attach any more."""
        self._pending.clear()
        self._events = []
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if hasattr(self, "memory"):
            self._counters = np.zeros(2, dtype=np.int64)
            super().close()

    @property
    def _mapped_bytes(self) -> int:
        return -(-self.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE

    def _map(self, fd: int, chunk_bytes: int, on_progress: OnProgress | None) -> None:
        self._open(self._mapped_bytes, chunk_bytes, on_progress, fd)
        page = self.memory.flat[-mmap.PAGESIZE :].view(torch.int64)
        self._counters = page[:2].numpy()

    def _wait_recorded(self, number: int, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self._counters[RECORDED] < number:
            if not _is_open(self.handle):
                raise RuntimeError(
                    f"the writer of the host pool, process {self.handle.pid}, is gone: record {number} was "
                    f"waited for, the last is {self._counters[RECORDED]}"
                )
            if time.monotonic() > end:
                raise TimeoutError(
                    f"record {number} of the host pool did not come in {timeout} s, the last is "
                    f"{self._counters[RECORDED]}: readers and writer have to make the same calls"
                )
            time.sleep(POLL_SECONDS)


def _path(handle: SharedHandle) -> str:
    return f"/proc/{handle.pid}/fd/{handle.fd}"


def _is_open(handle: SharedHandle) -> bool:
    """Whether the writer lives and has its pool open."""
    try:
        return os.stat(_path(handle)).st_ino == handle.inode
    except OSError:
        return False
