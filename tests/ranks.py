"""A process of its own that holds a shared host pool and does what the test tells it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout
from hisparse_sgl.mem_pool.shared_host_pool import SharedHandle, SharedHostPool
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.requests import Deferred
from hisparse_sgl.transfers import Transfers

LAYOUT = KVLayout.single(2, (656,), 64, (IndexGroup(0, (1,)),), 132)
CONTEXT_LEN = 64


class Rank:
    """The other end of ``Process``: what a test can call there."""

    def __init__(self, peer: Connection | None) -> None:
        self.peer = peer
        self.pool: SharedHostPool | None = None
        self.device: torch.Tensor | None = None

    @property
    def opened(self) -> SharedHostPool:
        assert self.pool is not None
        return self.pool

    def create(self, num_pages: int, pinned: bool, layout: KVLayout = LAYOUT) -> SharedHandle:
        self.pool = SharedHostPool.create(layout, num_pages, pinned)
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

    def agree(self, counts: tuple[int, int]) -> tuple[int, int]:
        """The least of both ranks, as a MIN all-reduce gives it."""
        assert self.peer is not None
        self.peer.send(counts)
        assert self.peer.poll(30), "the other rank takes no part"
        to_host, to_device = self.peer.recv()
        return min(counts[0], to_host), min(counts[1], to_device)

    def serve_context(self, device: str) -> tuple[int, int]:
        """Decode one context in a pool whose device pages hold a part of it; check every row that is read.

        Bytes copied to the host, and bytes swapped in from there.
        """
        agree = self.agree

        class Agreed(Transfers):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, agree=agree)

        layout = self.opened.layout
        config = HiSparseConfig(
            top_k=4,
            context_len=CONTEXT_LEN,
            host_pages=30,
            device_pages=10,
            max_requests=2,
            kernels="auto" if device == "cuda" else "reference",
            poison=True,
        )
        with HiSparsePool(layout, config, device, Agreed, self.opened) as pool:
            generator = torch.Generator().manual_seed(0)
            shape = (layout.host_group.num_layers, CONTEXT_LEN, layout.host_group.row.row_bytes)
            rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
            pool.admit("r", list(range(8)))
            for start in range(0, CONTEXT_LEN - 4, 2):
                if start >= 8:
                    pool.append_tokens("r", [start, start + 1])
                positions = torch.randperm(start + 2, generator=generator)[:4].int()[None].to(device)
                decode(pool, rows, start, positions)
                pool.check_integrity()
                assert pool.audit() == 0
            while pool.wait():
                pass
            return pool.counters.device_to_host_bytes, pool.counters.swapped_in_bytes

    def close(self) -> None:
        self.opened.close()


def decode(pool: HiSparsePool, rows: torch.Tensor, start: int, positions: torch.Tensor) -> None:
    """One step of two tokens; the rows that attention would read must be the ones written."""
    slots = pool.extend("r", 2)
    while isinstance(slots, Deferred):
        assert pool.wait(), slots
        slots = pool.extend("r", 2)
    pool.begin_step(["r"])
    for layer in range(rows.shape[0]):
        pool.write(layer, slots, rows[layer, start : start + 2])
    for group in pool.layout.host_group.index_groups:
        where = pool.swap_in(group.leader, positions)
        for layer in group.layers:
            found = pool.rows(layer)[where[0].long()]
            assert torch.equal(found, rows[layer, positions[0].long()]), f"position {start}, layer {layer}"
    pool.step_done()


class Process:
    """Starts a ``Rank``; ``call`` runs one of its methods there and returns or raises what it does.

    ``peer`` is a pipe to another rank.
    """

    def __init__(self, peer: Connection | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, peer), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, name: str, *args: Any) -> Any:
        self.send(name, *args)
        return self.receive()

    def send(self, name: str, *args: Any) -> None:
        self.connection.send((name, args))

    def receive(self) -> Any:
        assert self.connection.poll(60), "no answer"
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


def serve(connection: Connection, peer: Connection | None) -> None:
    torch.set_num_threads(1)
    rank = Rank(peer)
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(rank, name)(*args)))
        except Exception as error:
            connection.send((False, error))
