"""GPU time of a captured step, and the limits it is measured against.

A step is captured ``steps`` times with different inputs in one CUDA graph, and an event lies before and after
each replay. The GPU spins while the CPU launches the graph, so that no launch time is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles
from typing import NamedTuple

import torch

from hisparse_sgl.kernels.backend import jit, tl

REPLAYS = 11
SPIN_CYCLES = 1_000_000
"""About 500 us: longer than the launch of a graph of 24 steps takes on the CPU."""

KERNEL_READ_GBPS = 45.8
"""What a kernel read from pinned memory over PCIe 5.0 x16 of an H200 before this project; larger
rows reach 50.9 (benchmarks/README.md)."""


class Sample(NamedTuple):
    """Microseconds a step over the replays."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: list[float]) -> Sample:
        cuts = quantiles(values, n=10, method="inclusive")
        return cls(round(cuts[1], 3), round(cuts[4], 3), round(cuts[7], 3))


@jit
def _empty_kernel(target, SIZE: tl.constexpr):
    pass


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(body: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A call that replays ``body`` as a CUDA graph; on a CPU ``body`` itself.

    ``body`` must have run once before, so that its kernels are compiled.
    """
    if device.type != "cuda":
        return body
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph.replay


def time_once(replay: Callable[[], None], prepare: Callable[[], None], device: torch.device) -> float:
    """Microseconds of one ``replay``; ``prepare`` runs before it and is not counted."""
    prepare()
    if device.type != "cuda":
        began = time.perf_counter()
        replay()
        return (time.perf_counter() - began) * 1e6
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def measure(
    body: Callable[[], None],
    prepare: Callable[[], None],
    steps: int,
    device: torch.device,
    replays: int = REPLAYS,
) -> Sample:
    """Microseconds a step of ``body``, which holds ``steps`` of them; two replays warm up."""
    replay = capture(body, device)
    times = [time_once(replay, prepare, device) / steps for _ in range(replays + 2)]
    return Sample.of(times[2:])


def nothing() -> None:
    """For a body that needs no preparation."""


def measure_empty(device: torch.device, steps: int) -> Sample:
    """An empty kernel a step: what the method itself costs."""
    target = torch.zeros(16, dtype=torch.int32, device=device)

    def body() -> None:
        for _ in range(steps):
            _empty_kernel[(1,)](target, SIZE=16)

    if device.type != "cuda":
        return measure(nothing, nothing, steps, device)
    body()
    return measure(body, nothing, steps, device)


def copy_rate(target: torch.Tensor, source: torch.Tensor, device: torch.device, replays: int = 5) -> float:
    """GB/s of a plain copy (cudaMemcpyAsync), median."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    copy()
    times = [time_once(copy, nothing, device) for _ in range(replays)]
    return source.numel() * source.element_size() / sorted(times)[len(times) // 2] / 1e3
