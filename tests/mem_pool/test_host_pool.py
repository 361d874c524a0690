"""HostPool: size check, registration with its return code, and a close that is safe in every state."""

from __future__ import annotations

import logging
import types

import psutil
import pytest
import torch

from hisparse_sgl.mem_pool import host_pool
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout

LAYOUT = KVLayout.single(2, (656,), 64, (IndexGroup(0, (1,)),), 132)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="registers memory with a CUDA device")
needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="replaces the CUDA runtime, if there is none"
)


class FakeCudart:
    """The two calls HostPool makes, with the return codes of a test."""

    def __init__(self, register: int = 0, unregister: int = 0) -> None:
        self.codes = (register, unregister)
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.codes[0]:
            self.registered[address] = size
        return self.codes[0]

    def cudaHostUnregister(self, address: int) -> int:
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
    monkeypatch.setattr(host_pool, "_left_to_kernel", left)
    if raises:
        monkeypatch.setattr(torch.cuda, "synchronize", die)
    pool = HostPool(LAYOUT, 2)
    with caplog.at_level(logging.WARNING):
        pool.close()
        pool.close()
    assert len(left) == 1 and caplog.text.count("stay pinned until exit") == 1


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
        assert pool._mapping is None
