"""The model-based test with real copies, and on a GPU with compiled kernels, streams and events."""

from __future__ import annotations

from random import Random

import pytest
import torch
from driver import Driver
from late_transfers import LateTransfers
from random_pools import ACTIONS
from stream_transfers import StreamTransfers

from hisparse_sgl.transfers import Transfers

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the pool on a CUDA device")


def drive(
    seed: int,
    actions: int,
    device: str,
    transfer_class: type[Transfers],
    eager: bool,
    tokens_per_row: int = 1,
) -> Driver:
    """Random actions, each followed by the byte audit and all other checks, then the end of everything."""
    driver, rng = Driver(seed, True, device, transfer_class, eager, tokens_per_row), Random(seed)
    try:
        for _ in range(actions):
            driver.act(rng.choice(ACTIONS), rng.randrange(2**32))
        driver.drain(rng)
        driver.run_alone(rng)
    finally:
        driver.close()
    return driver


@pytest.mark.parametrize("tokens_per_row", [1, 2])
@pytest.mark.parametrize("eager", [False, True])
def test_copies_that_run_at_once_on_a_cpu(eager: bool, tokens_per_row: int) -> None:
    drive(1, 200, "cpu", StreamTransfers, eager, tokens_per_row)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("transfer_class", [LateTransfers, StreamTransfers])
@pytest.mark.parametrize("tokens_per_row", [1, 2, 4])
def test_on_a_gpu(seed: int, transfer_class: type[Transfers], eager: bool, tokens_per_row: int) -> None:
    drive(seed, 300, "cuda", transfer_class, eager, tokens_per_row)
