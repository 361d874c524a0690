"""Host memory of a benchmark: pools with random bytes, and machines that grow their memory as it is used."""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import psutil
import torch

from benchmarks.workload import row_format
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import CacheGroup, IndexGroup, KVLayout

CHUNK = 1 << 29
ROOM = 3 << 29
"""Bytes that stay available while the memory of the machine grows."""
SPARE = 6 << 30
"""Bytes that stay available beside a pool."""
WAIT_SECONDS = 5.0


def layout_of(parts: tuple[int, ...], num_layers: int = 1) -> KVLayout:
    """Rows of ``parts`` bytes in pages of 64, every layer with an indexer of its own."""
    groups = tuple(IndexGroup(layer) for layer in range(num_layers))
    return KVLayout((CacheGroup("kv", num_layers, row_format(parts), groups, 0),), 64)


def pages_in(layout: KVLayout, gib: float) -> int:
    """Host pages that fill ``gib`` GiB over all layers."""
    return int(gib * 2**30) // layout.host_group.bytes_per_page().rows


def grow_memory(num_bytes: int) -> float:
    """Touch ``num_bytes`` and give them back, slowly enough for a virtual machine that adds memory on demand.

    Such a machine shows little memory at first, and a pool that asks for more is refused. Returns seconds.
    Stops early when memory does not grow.
    """
    began = time.perf_counter()
    held: list[mmap.mmap] = []
    while len(held) * CHUNK < num_bytes and _wait_for_room():
        held.append(mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            held[-1].madvise(mmap.MADV_HUGEPAGE)
        parts = np.array_split(np.frombuffer(held[-1], dtype=np.uint8), 4)
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(lambda part: part.fill(1), parts))
        del parts
    for mapping in held:
        mapping.close()
    return time.perf_counter() - began


def _wait_for_room() -> bool:
    deadline = time.perf_counter() + WAIT_SECONDS
    while psutil.virtual_memory().available < ROOM:
        if time.perf_counter() > deadline:
            return False
        time.sleep(0.05)
    return True


def open_pool(layout: KVLayout, num_pages: int) -> tuple[HostPool, float]:
    """A host pool and the seconds its set-up took, memory growth apart."""
    wanted = layout.host_bytes(num_pages)
    if wanted > psutil.virtual_memory().available - SPARE and wanted > CHUNK:
        print(f"growing the memory of the machine took {grow_memory(wanted + SPARE):.1f} s", flush=True)
    began = time.perf_counter()
    pool = HostPool(layout, num_pages)
    return pool, time.perf_counter() - began


def fill_random(pool: HostPool, device: torch.device) -> torch.Tensor:
    """Random bytes in the pool's buffer; the same bytes on ``device``."""
    mirror = _random(pool.buffer, device)
    for start, stop in pairwise(pool.bounds):  # CUDA refuses a copy that crosses two registrations
        pool.buffer.view(-1)[start:stop].copy_(mirror.view(-1)[start:stop])
    return mirror


def fill_alike(pool: HostPool, device: torch.device) -> torch.Tensor:
    """The same random bytes in every layer of the pool; those of one layer on ``device``."""
    mirror = _random(pool.buffer[0], device)
    size = mirror.numel()
    for layer in range(pool.buffer.shape[0]):
        inside = [bound - layer * size for bound in pool.bounds if 0 < bound - layer * size < size]
        for start, stop in pairwise([0, *inside, size]):
            pool.buffer[layer].view(-1)[start:stop].copy_(mirror.view(-1)[start:stop])
    return mirror


def _random(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(0)
    mirror = torch.empty(like.shape, dtype=torch.uint8, device=device)
    for chunk in mirror.view(-1).view(torch.int64).split(1 << 27):
        chunk.random_(generator=generator)
    return mirror
