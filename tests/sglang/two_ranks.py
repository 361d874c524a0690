"""Engines of one tensor parallel group: a process each, the same clients, copies that take other times."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 180  # seconds


def run_ranks(
    name: str, seed: int, steps: int, agree: bool = True, ranks: int = 2
) -> list[tuple[Counter[str], list[Any]]]:
    """What each rank saw, and what it launched. Raises what a rank raises.

    With ``agree`` False each rank takes in what its own copies have done.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            place = (rank, ranks, str(Path(folder, "meeting_point")))
            args = (theirs, sys.path, name, seed, steps, agree, place)
            processes.append(context.Process(target=_serve, args=args, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return [_receive(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _receive(pipe: Connection) -> tuple[Counter[str], list[Any]]:
    if not pipe.poll(TIMEOUT):
        raise AssertionError(f"a rank gives no answer for {TIMEOUT} seconds")
    error, result = pipe.recv()
    if error:
        raise AssertionError(error)
    return result


def _serve(
    pipe: Connection,
    path: list[str],
    name: str,
    seed: int,
    steps: int,
    agree: bool,
    place: tuple[Any, ...],
) -> None:
    sys.path[:] = path
    import conftest  # noqa: F401  declares the operators that SGLang's imports need
    import torch
    from drive import Drive
    from engine import Place
    from scenarios import SCENARIOS

    torch.set_num_threads(1)
    settings, load = SCENARIOS[name]
    drive = Drive(replace(settings, failure_rate=0.0), load, seed, steps, place=Place(*place))
    if not agree:
        drive.scheduler.hisparse_coordinator.transfers.agree = lambda counts: counts
    try:
        pipe.send((None, (drive.run(), drive.forwards.log)))
    except BaseException:
        pipe.send((f"rank {place[0]}, step {drive.num_steps}: {traceback.format_exc()}", None))
