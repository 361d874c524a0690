"""Fault memory in before it is pinned: in huge pages where the system has them, from many threads.

The driver faults pages in one by one, on one thread; pages that are there already it only pins.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

THREADS = 16
HUGE_PAGE = 2 << 20
CALL_BYTES = 64 << 20
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it

_libc = ctypes.CDLL(None, use_errno=True)


def advise_huge_pages(mapping: mmap.mmap, shared: bool) -> str | None:
    """Ask for huge pages in `mapping`. Why there are none, or None when there are."""
    setting = SETTINGS / ("shmem_enabled" if shared else "enabled")
    try:
        chosen = re.search(r"\[(\w+)\]", setting.read_text())
    except OSError as error:
        return str(error)
    if chosen is None or chosen[1] in ("never", "deny"):
        return f"{setting} is {chosen[1] if chosen else 'unreadable'}"
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        return f"madvise: {error}"
    return None


def populate(mapping: mmap.mmap, address: int, start: int, end: int, shared: bool) -> None:
    """Fault in bytes `start` to `end` of `mapping`, which lies at `address`; each thread takes one part.

    What the memory holds is not changed. `start` is a multiple of the OS's page.

    Raises:
        OSError: there is no memory left.
    """
    threads = min(THREADS, os.cpu_count() or 1)
    step = -(-(end - start) // threads)
    step = -(-step // HUGE_PAGE) * HUGE_PAGE
    starts = range(start, end, step)
    all_there = threading.Barrier(len(starts))

    def part(first: int) -> None:
        # A call holds the lock of the address space, for which a thread that starts has to wait.
        all_there.wait()
        last = min(first + step, end)
        for at in range(first, last, CALL_BYTES):
            if not _populate_write(address + at, min(CALL_BYTES, last - at)):
                _touch(mapping, at, last, shared)
                return

    with ThreadPoolExecutor(len(starts)) as executor:
        try:
            list(executor.map(part, starts))
        except BaseException:
            all_there.abort()  # a thread that did not start would be waited for
            raise


def _populate_write(address: int, num_bytes: int) -> bool:
    """False where the kernel does not know the call."""
    whole = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(whole), MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, f"{num_bytes} bytes of host memory could not be faulted in: {os.strerror(code)}")


def _touch(mapping: mmap.mmap, start: int, end: int, shared: bool) -> None:
    pages = np.frombuffer(mapping, np.uint8, end - start, start)[:: mmap.PAGESIZE]
    if shared:
        pages.max()  # others may have written: reading brings a page of a file in as well
    else:
        pages[:] = 0  # reading private memory would map the zero page
