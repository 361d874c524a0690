"""A process of its own that holds a shared host pool and does what the test tells it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout
from hisparse_sgl.mem_pool.shared_host_pool import SharedHandle, SharedHostPool

LAYOUT = KVLayout.single(2, (656,), 64, (IndexGroup(0, (1,)),), 132)


class Rank:
    """The other end of ``Process``: what a test can call there."""

    def __init__(self) -> None:
        self.pool: SharedHostPool | None = None
        self.device: torch.Tensor | None = None

    @property
    def opened(self) -> SharedHostPool:
        assert self.pool is not None
        return self.pool

    def create(self, num_pages: int, pinned: bool) -> SharedHandle:
        self.pool = SharedHostPool.create(LAYOUT, num_pages, pinned)
        return self.pool.handle

    def attach(self, handle: SharedHandle) -> None:
        self.pool = SharedHostPool.attach(handle)

    def fill(self, page: int, value: int) -> int:
        """Write a host page, and record it."""
        self.opened.buffer[:, page] = value
        return self.opened.record(None).number

    def values(self, page: int) -> list[int]:
        """The different bytes of a host page."""
        return self.opened.buffer[:, page].unique().tolist()

    def synchronize(self, number: int, timeout: float) -> None:
        self.opened.synchronize(number, timeout)

    def copy_to_host(self, page: int, value: int) -> int:
        """Fill a host page from the GPU, behind a slow kernel, and record it without waiting."""
        rows = torch.full_like(self.opened.buffer[:, page], value, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            for layer in range(rows.shape[0]):
                self.opened.buffer[layer, page].copy_(rows[layer], non_blocking=True)
        self.device = rows
        return self.opened.record(stream).number

    def copy_to_device(self, page: int, number: int) -> tuple[bool, list[int]]:
        """Wait for a record on a stream and read a host page behind it: was it over before, and the bytes."""
        over = self.opened.query(number)
        stream = torch.cuda.Stream()
        self.opened.wait(number, stream)
        with torch.cuda.stream(stream):
            rows = [layer.to("cuda", non_blocking=True) for layer in self.opened.buffer[:, page]]
        stream.synchronize()
        return over, torch.stack(rows).unique().tolist()

    def close(self) -> None:
        self.opened.close()


class Process:
    """Starts a ``Rank``; ``call`` runs one of its methods there and returns or raises what it does."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, name: str, *args: Any) -> Any:
        self.connection.send((name, args))
        assert self.connection.poll(60), f"{name} does not answer"
        ok, result = self.connection.recv()
        if not ok:
            raise result
        return result

    def kill(self) -> None:
        """SIGKILL: nothing in the process runs any more."""
        self.process.kill()
        self.process.join(10)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.connection.close()


def serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    rank = Rank()
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(rank, name)(*args)))
        except Exception as error:
            connection.send((False, error))
