"""HostPool: size check, registration with its return code, and a close that is safe in every state."""

from __future__ import annotations

import logging
import math
import mmap
import os
import types
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch

from hisparse_sgl.mem_pool import host_memory, prefault
from hisparse_sgl.mem_pool.host_memory import Progress, chunk_bounds
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout

PAGESIZE = mmap.PAGESIZE
LAYOUT = KVLayout.single(2, (656,), 64, (IndexGroup(0, (1,)),), 132)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="registers memory with a CUDA device")
needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="replaces the CUDA runtime, if there is none"
)


class FakeCudart:
    """The two calls HostPool makes, with the return codes of a test; only `limit` registrations succeed."""

    def __init__(self, register: int = 0, unregister: int = 0, limit: int = 1000) -> None:
        self.codes = (register, unregister)
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address))
        if self.codes[0] or len(self.registered) == self.limit:
            return self.codes[0] or 2
        for start, length in self.registered.items():  # CUDA counts whole pages of the OS
            assert address >= -(-(start + length) // PAGESIZE) * PAGESIZE or address + size <= start
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        if not self.codes[1]:
            del self.registered[address]
        return self.codes[1]


def use(monkeypatch: pytest.MonkeyPatch, cudart: FakeCudart) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_buffer() -> None:
    with HostPool(LAYOUT, 5, pinned=False) as pool:
        assert pool.buffer.shape == (2, 5, 64 * 656) and pool.buffer.dtype == torch.uint8
        assert pool.num_bytes == LAYOUT.host_bytes(5) == pool.buffer.numel()
        assert not pool.buffer.any() and pool.buffer.data_ptr() % 4096 == 0
        pool.buffer[1, 4, -1] = 7
        assert pool.buffer.view(-1)[-1] == 7


def test_close_is_idempotent_and_final() -> None:
    pool = HostPool(LAYOUT, 2, pinned=False)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="close"):
        _ = pool.buffer


def test_close_gives_the_memory_back() -> None:
    process = psutil.Process()
    pool = HostPool(LAYOUT, 400, pinned=False)
    pool.buffer.fill_(1)
    before = process.memory_info().rss
    pool.close()
    assert before - process.memory_info().rss > 0.9 * LAYOUT.host_bytes(400)


def test_a_view_outlives_close(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(LAYOUT, 2, pinned=False)
    view = pool.buffer[1]
    view.fill_(3)
    with caplog.at_level(logging.WARNING):
        pool.close()
    assert "a view of them is alive" in caplog.text
    assert view.min() == 3


def test_refuses_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    page = LAYOUT.host_bytes(1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=100 * page))
    with pytest.raises(ValueError, match=r"num_pages is 96 .* the limit is 95 .*fewer pages"):
        HostPool(LAYOUT, 96, pinned=False)
    HostPool(LAYOUT, 95, pinned=False).close()


def test_refuses_a_pool_of_the_null_page_alone() -> None:
    with pytest.raises(ValueError, match="num_pages is 1"):
        HostPool(LAYOUT, 1, pinned=False)


@needs_no_gpu
def test_pinned_needs_cuda() -> None:
    with pytest.raises(ValueError, match="pinned is True"):
        HostPool(LAYOUT, 2, pinned=True)
    with HostPool(LAYOUT, 2) as pool:
        assert not pool.pinned


@needs_no_gpu
def test_registers_all_of_it_once_and_unregisters(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart()
    use(monkeypatch, cudart)
    pool = HostPool(LAYOUT, 4)
    assert pool.pinned and cudart.registered == {pool.buffer.data_ptr(): LAYOUT.host_bytes(4)}
    pool.close()
    pool.close()
    assert cudart.registered == {}


@needs_no_gpu
def test_failed_registration_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeCudart(register=2))
    before = psutil.Process().memory_info().rss
    with pytest.raises(RuntimeError, match=r"could not be pinned, cudaHostRegister returned 2"):
        HostPool(LAYOUT, 400)
    assert psutil.Process().memory_info().rss - before < 0.5 * LAYOUT.host_bytes(400)


@needs_no_gpu
@pytest.mark.parametrize("raises", [False, True])
def test_dead_context_leaves_the_pages_to_the_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raises: bool
) -> None:
    def die() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    use(monkeypatch, FakeCudart(unregister=700))
    left: list[object] = []
    monkeypatch.setattr(host_memory, "_left_to_kernel", left)
    if raises:
        monkeypatch.setattr(torch.cuda, "synchronize", die)
    pool = HostPool(LAYOUT, 2)
    with caplog.at_level(logging.WARNING):
        pool.close()
        pool.close()
    assert len(left) == 1 and caplog.text.count("stay pinned until exit") == 1


@pytest.mark.parametrize("page_bytes", [64 * 656, 64 * 1152, 37440, 16, 8 * 4099])
@pytest.mark.parametrize("pages", [2, 1000, 12345])
def test_bounds_split_no_page(page_bytes: int, pages: int) -> None:
    unit = math.lcm(page_bytes, PAGESIZE)
    for chunk in (unit, unit + 1, 3 * unit - 1, 5 * unit, 1 << 60):
        bounds = chunk_bounds(pages * page_bytes, page_bytes, chunk)
        assert bounds[0] == 0 and bounds[-1] == pages * page_bytes
        assert all(0 < end - start <= chunk for start, end in pairwise(bounds))
        assert all(bound % page_bytes == 0 and bound % PAGESIZE == 0 for bound in bounds[:-1])
    with pytest.raises(ValueError, match=f"chunk_bytes is {unit - 1}, the limit is >= {unit}"):
        chunk_bounds(pages * page_bytes, page_bytes, unit - 1)


@needs_no_gpu
def test_chunks_are_registered_in_order_and_given_back_in_reverse(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = FakeCudart()
    use(monkeypatch, cudart)
    seen: list[Progress] = []
    with caplog.at_level(logging.INFO):
        pool = HostPool(LAYOUT, 50, chunk_bytes=1 << 20, on_progress=seen.append)
    starts = [pool.buffer.data_ptr() + bound for bound in pool.bounds[:-1]]
    assert len(starts) == 5 and list(cudart.registered) == starts
    assert sum(cudart.registered.values()) == pool.num_bytes
    assert [progress.done_bytes for progress in seen] == pool.bounds[1:]
    assert caplog.text.count("GiB/s") == len(seen) and seen[-1].total_bytes == pool.num_bytes
    pool.close()
    assert cudart.calls[5:] == [("unregister", start) for start in reversed(starts)]


@needs_no_gpu
@pytest.mark.parametrize("failure", ["limit", "progress"])
def test_an_error_in_the_middle_undoes_what_was_done(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    cudart = FakeCudart(limit=3 if failure == "limit" else 1000)
    use(monkeypatch, cudart)

    def stop(progress: Progress) -> None:
        if failure == "progress" and len(cudart.registered) == 3:
            raise KeyboardInterrupt

    before = psutil.Process().memory_info().rss
    with pytest.raises(RuntimeError if failure == "limit" else KeyboardInterrupt):
        HostPool(LAYOUT, 400, chunk_bytes=8 << 20, on_progress=stop)
    assert cudart.registered == {} and len(cudart.calls) == (4 if failure == "limit" else 3) + 3
    assert psutil.Process().memory_info().rss - before < 8 << 20


@needs_no_gpu
def test_says_so_where_huge_pages_are_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    use(monkeypatch, FakeCudart())
    monkeypatch.setattr(prefault, "SETTINGS", tmp_path)
    for text, reason in (("always madvise [never]", "enabled is never"), ("[madvise] never", None)):
        (tmp_path / "enabled").write_text(text)
        caplog.clear()
        with HostPool(LAYOUT, 4) as pool:
            assert pool.pinned
        assert ("small pages" in caplog.text) == (reason is not None)
        assert reason is None or reason in caplog.text


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("knows_the_call", [False, True])
def test_populate_brings_memory_in_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, shared: bool, knows_the_call: bool
) -> None:
    if not knows_the_call:
        monkeypatch.setattr(prefault, "_populate_write", lambda address, num_bytes: False)
    size = (64 << 20) + 12345
    fd = os.memfd_create("test") if shared else -1
    if shared:
        os.ftruncate(fd, size)
        os.pwrite(fd, b"x" * 100, size - 100)
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(fd, size, flags=flags) as mapping:
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        before = psutil.Process().memory_info().rss
        prefault.populate(mapping, memory.data_ptr(), 1 << 20, size, shared)
        grown = psutil.Process().memory_info().rss - before
        assert 60 << 20 < grown < 65 << 20
        assert memory[-100:].eq(ord("x") if shared else 0).all() and not memory[:-100].any()
        del memory
    if shared:
        os.close(fd)


@needs_gpu
@pytest.mark.gpu
def test_chunks_on_a_gpu() -> None:
    with HostPool(LAYOUT, 400, chunk_bytes=1 << 20) as pool:
        assert len(pool.bounds) > 30
        on_device = torch.randint(0, 256, pool.buffer.shape, dtype=torch.uint8, device="cuda")
        for start, end in pairwise(pool.bounds):
            part = pool.buffer.view(-1)[start:end]
            assert part.is_pinned()
            part.copy_(on_device.view(-1)[start:end], non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(pool.buffer, on_device.cpu())
        del part
    assert not pool.memory.registered


@needs_gpu
@pytest.mark.gpu
def test_pinned_memory_on_a_gpu() -> None:
    for _ in range(2):
        with HostPool(LAYOUT, 400) as pool:
            assert pool.pinned and pool.buffer.is_pinned() and not pool.buffer.any()
            pool.buffer[1, 399].fill_(9)
            on_device = torch.empty_like(pool.buffer, device="cuda")
            on_device.copy_(pool.buffer, non_blocking=True)
            assert torch.equal(on_device.cpu(), pool.buffer)
            del on_device
        assert not pool.memory.registered
