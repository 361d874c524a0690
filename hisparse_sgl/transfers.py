"""Copies between the host pool and the device pool: streams, events, and who knows when they are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch

from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.kernels.scatter import scatter
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.metrics import Counters
from hisparse_sgl.transfer_queue import Completion, PageCopy


def upload(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 1-D tensor on ``device``; the CPU does not wait for the copy."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Lane:
    """Transfers of one direction. They run and complete in order, on a stream of their own on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pending: deque[tuple[int, torch.cuda.Event | None, tuple[torch.Tensor, ...]]] = deque()
        self.num_reported = 0

    def start(
        self, transfer_id: int, copy: Callable[[], None], inputs: tuple[torch.Tensor, ...] = ()
    ) -> None:
        """Run ``copy`` behind all that the current stream was given; ``inputs`` live until it is over."""
        event = None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            copy()
            if self.stream is not None:
                event = torch.cuda.Event()
                event.record(self.stream)
        self.pending.append((transfer_id, event, inputs))

    @property
    def num_completed(self) -> int:
        """Transfers that are over on this rank, since the start."""
        over = 0
        for _, event, _ in self.pending:
            if event is not None and not event.query():
                break
            over += 1
        return self.num_reported + over

    def take(self, num_completed: int) -> Iterator[int]:
        """Ids of the transfers up to that count that were not reported yet."""
        while self.num_reported < num_completed:
            self.num_reported += 1
            yield self.pending.popleft()[0]


class Transfers:
    """The ``TransferQueue`` of one rank.

    Args:
        host, device: the two pools; read at each copy, so that closing them ends all use of their memory.
        row: byte layout of a row.
        counters: ``restored_bytes`` and ``device_to_host_bytes`` are counted here.
        backend: implementation of the row kernel, see ``kernels.backend.choose``.
        agree: with several ranks, maps the completed counts (device-to-host, host-to-device) of this rank to
            the least over all ranks (a MIN all-reduce); every rank calls ``poll`` and ``wait`` alike.
    """

    def __init__(
        self,
        host: HostPool,
        device: DevicePool,
        row: RowFormat,
        counters: Counters,
        backend: str | None = None,
        agree: Callable[[tuple[int, int]], tuple[int, int]] = lambda counts: counts,
    ) -> None:
        self.host = host
        self.device = device
        self.row = row
        self.counters = counters
        self.backend = backend
        self.agree = agree
        self.where = device.buffer.device
        self.to_host = Lane(self.where)
        self.to_device = Lane(self.where)
        self.num_layers = device.buffer.shape[0]
        self.next_id = 0

    def mirror(self, slots: list[int], rows: list[int]) -> int:
        slot_ids = upload(slots, torch.int32, self.where)
        row_ids = upload(rows, torch.int32, self.where)
        self.counters.device_to_host_bytes += len(slots) * self.num_layers * self.row.row_bytes
        return self._start(
            self.to_host,
            lambda: scatter(
                self.device.buffer, self.host.buffer, row_ids, slot_ids, self.row, backend=self.backend
            ),
            (slot_ids, row_ids),
        )

    def spill(self, pages: list[PageCopy]) -> int:
        moved = [copy for copy in pages if copy.moves_bytes]
        self.counters.device_to_host_bytes += self._bytes(moved)
        return self._start(self.to_host, lambda: self._copy(moved, to_host=True))

    def restore(self, pages: list[PageCopy]) -> int:
        self.counters.restored_bytes += self._bytes(pages)
        return self._start(self.to_device, lambda: self._copy(pages, to_host=False))

    def poll(self) -> list[Completion]:
        to_host, to_device = self.agree((self.to_host.num_completed, self.to_device.num_completed))
        over = [*self.to_host.take(to_host), *self.to_device.take(to_device)]
        return [Completion(transfer_id, True) for transfer_id in over]

    def wait(self) -> list[Completion]:
        lanes = [lane for lane in (self.to_host, self.to_device) if lane.pending]
        if lanes:
            event = min(lanes, key=lambda lane: lane.pending[0][0]).pending[0][1]
            if event is not None:
                event.synchronize()
        return self.poll()

    def _start(self, lane: Lane, copy: Callable[[], None], inputs: tuple[torch.Tensor, ...] = ()) -> int:
        transfer_id = self.next_id
        self.next_id += 1
        lane.start(transfer_id, copy, inputs)
        return transfer_id

    def _bytes(self, pages: list[PageCopy]) -> int:
        return len(pages) * self.num_layers * self.row.page_bytes

    def _copy(self, pages: list[PageCopy], to_host: bool) -> None:
        for host_page, device_page, count in _runs(pages):
            for layer in range(self.num_layers):
                host = self.host.buffer[layer, host_page : host_page + count]
                device = self.device.buffer[layer, device_page : device_page + count]
                target, source = (host, device) if to_host else (device, host)
                target.copy_(source, non_blocking=True)


def _runs(pages: list[PageCopy]) -> Iterator[tuple[int, int, int]]:
    """(first host page, first device page, count) of pages that are neighbours on both sides."""
    start = 0
    for end in range(1, len(pages) + 1):
        first = pages[start]
        step = end - start
        if end < len(pages) and pages[end][:2] == (first.host_page + step, first.device_page + step):
            continue
        yield first.host_page, first.device_page, step
        start = end
