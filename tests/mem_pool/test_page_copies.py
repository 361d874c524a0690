"""PageCopies: every way to copy gives the same bytes, also across the bounds of registrations."""

from __future__ import annotations

import ctypes
import types
from random import Random

import numpy as np
import pytest
import torch

from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.mem_pool import cuda_runtime
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import CacheGroup, IndexGroup, KVLayout
from hisparse_sgl.mem_pool.page_copies import Method, PageCopies, Run, pieces

HOST_PAGES, DEVICE_PAGES, LAYERS = 24, 17, 3
METHODS: tuple[Method, ...] = ("strided", "batch", "plain")
ROWS = [RowFormat.make((16,), 16), RowFormat.make((656,), 64), RowFormat.make((576, 8), 64, 576)]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a CUDA device")


class FakeRuntime:
    """The two copies of ``CudaRuntime``, done by the CPU at once."""

    def __init__(self) -> None:
        self.calls = 0

    def copy_2d(
        self,
        target: int,
        target_stride: int,
        source: int,
        source_stride: int,
        width: int,
        height: int,
        to_host: bool,
        stream: int,
    ) -> None:
        self.calls += 1
        for i in range(height):
            ctypes.memmove(target + i * target_stride, source + i * source_stride, width)

    def copy_batch(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        self.calls += 1
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)


def layout_of(row: RowFormat) -> KVLayout:
    groups = (IndexGroup(0, tuple(range(1, LAYERS))),)
    return KVLayout((CacheGroup("kv", LAYERS, row, groups, 8),), row.page_size)


def random_runs(rng: Random) -> list[Run]:
    """Runs that overlap on neither side."""
    host, device = list(range(1, HOST_PAGES)), list(range(1, DEVICE_PAGES))
    runs = []
    for _ in range(rng.randint(1, 4)):
        num_pages = rng.randint(1, 6)
        starts = [
            [start for start in pages if set(range(start, start + num_pages)) <= set(pages)]
            for pages in (host, device)
        ]
        if not all(starts):
            continue
        runs.append(Run(rng.choice(starts[0]), rng.choice(starts[1]), num_pages))
        host = [p for p in host if not 0 <= p - runs[-1].host_page < num_pages]
        device = [p for p in device if not 0 <= p - runs[-1].device_page < num_pages]
    return runs


def check(copies: PageCopies, runs: list[Run], to_host: bool) -> None:
    """Random bytes on both sides; only the pages of ``runs`` change, to those of the other side."""
    host, device = copies.host.buffer, copies.device.buffer
    host.random_(0, 256)
    device.random_(0, 256)
    wanted, source = (host, device) if to_host else (device, host)
    wanted, source = wanted.cpu().clone(), source.cpu()
    for run in runs:
        for i in range(run.num_pages):
            ours, theirs = run.host_page + i, run.device_page + i
            target, origin = (ours, theirs) if to_host else (theirs, ours)
            wanted[:, target] = source[:, origin]
    copies.copy(runs, to_host)
    if device.is_cuda:
        torch.cuda.synchronize()
    assert torch.equal((host if to_host else device).cpu(), wanted)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.parts))
@pytest.mark.parametrize("method", METHODS)
def test_every_method_copies_the_same(
    monkeypatch: pytest.MonkeyPatch, method: Method, row: RowFormat
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=1))
    layout, rng, fake = layout_of(row), Random(1), FakeRuntime()
    with HostPool(layout, HOST_PAGES, False) as host:
        copies = PageCopies(host, DevicePool(layout, DEVICE_PAGES, HOST_PAGES, "cpu"))
        copies.method, copies.runtime = method, fake  # type: ignore[assignment]
        for to_host in (True, False) * 10:
            runs, before = random_runs(rng), fake.calls
            check(copies, runs, to_host)
            calls = {"strided": len(runs), "batch": 1, "plain": 0}
            assert fake.calls - before == calls[method]
        copies.copy([], True)


def test_the_default_stream_takes_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    layout, fake = layout_of(ROWS[0]), FakeRuntime()
    with HostPool(layout, HOST_PAGES, False) as host:
        copies = PageCopies(host, DevicePool(layout, DEVICE_PAGES, HOST_PAGES, "cpu"))
        copies.method, copies.runtime = "batch", fake  # type: ignore[assignment]
        check(copies, [Run(1, 2, 3)], to_host=True)
        assert fake.calls == 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.parts))
def test_pieces_cross_no_bound(row: RowFormat) -> None:
    """Against a walk page by page."""
    layout, rng = layout_of(row), Random(2)
    host = torch.empty((LAYERS, HOST_PAGES, row.page_bytes), dtype=torch.uint8)
    device = torch.empty((LAYERS, DEVICE_PAGES, row.page_bytes), dtype=torch.uint8)
    for _ in range(60):
        runs = random_runs(rng)
        cuts = sorted(rng.sample(range(1, LAYERS * HOST_PAGES), rng.randint(0, 12)))
        bounds = [0, *(cut * row.page_bytes for cut in cuts), layout.host_bytes(HOST_PAGES)]
        ours, theirs, sizes = (column.tolist() for column in pieces(runs, host, device, bounds))
        for start, size in zip(ours, sizes, strict=True):
            assert size > 0 and not any(start < bound < start + size for bound in bounds)
        found = sorted(
            (start + offset, other + offset)
            for start, other, size in zip(ours, theirs, sizes, strict=True)
            for offset in range(0, size, row.page_bytes)
        )
        assert found == sorted(
            (host[layer, run.host_page + i].data_ptr() - host.data_ptr(),
             device[layer, run.device_page + i].data_ptr() - device.data_ptr())
            for run in runs for layer in range(LAYERS) for i in range(run.num_pages)
        )  # fmt: skip
        whole = len(runs) * LAYERS
        assert whole <= len(sizes) <= whole + len(cuts)


def test_a_method_that_does_not_work_here_is_refused() -> None:
    layout = layout_of(ROWS[0])
    with HostPool(layout, HOST_PAGES, False) as host:
        device = DevicePool(layout, DEVICE_PAGES, HOST_PAGES, "cpu")
        assert PageCopies(host, device).method == "plain"
        with pytest.raises(ValueError, match=r"method is 'batch', the limit is one of \['plain'\]"):
            PageCopies(host, device, "batch")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.parts))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk_pages", [1 << 40, 5])
def test_on_a_gpu(method: Method, row: RowFormat, chunk_pages: int) -> None:
    layout, rng = layout_of(row), Random(3)
    chunk = max(chunk_pages * row.page_bytes, np.lcm(row.page_bytes, 4096).item())
    with HostPool(layout, HOST_PAGES, chunk_bytes=chunk) as host:
        device = DevicePool(layout, DEVICE_PAGES, HOST_PAGES, "cuda")
        if method not in PageCopies.usable(host, device):
            assert method == "strided" and len(host.bounds) > 2
            return
        copies = PageCopies(host, device, method)
        with torch.cuda.stream(torch.cuda.Stream()):
            for to_host in (True, False) * 6:
                check(copies, random_runs(rng), to_host)


@needs_gpu
@pytest.mark.gpu
def test_a_refused_copy_is_an_error_and_leaves_torch_alone() -> None:
    runtime = cuda_runtime.load()
    assert runtime is not None
    rows = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync returned"):
        runtime.copy_2d(rows.data_ptr(), 16, rows.data_ptr(), 16, 32, 4, True, 0)  # wider than its stride
    assert int((rows + 1).sum()) == 4096
