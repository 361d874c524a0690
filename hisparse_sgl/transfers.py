"""Copies between the host pool and the device pool: streams, events, and who knows when they are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.kernels.scatter import scatter
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.marks import Events, Mark, Marker
from hisparse_sgl.mem_pool.page_copies import PageCopies, Run
from hisparse_sgl.metrics import Counters
from hisparse_sgl.transfer_queue import Completion, PageCopy


def upload(values: Sequence[int] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 1-D tensor on ``device``; the CPU does not wait for the copy."""
    staging = torch.empty(len(values), dtype=dtype, pin_memory=device.type == "cuda")
    staging.numpy()[:] = values
    return staging.to(device, non_blocking=True)


def upload_cells(cells: dict[int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Index int64 [n] and value int32 [n] of these cells, in one copy that the CPU does not wait for."""
    split = 8 * len(cells)
    staging = torch.empty(12 * len(cells), dtype=torch.uint8, pin_memory=device.type == "cuda")
    staged = staging.numpy()
    staged[:split].view(np.int64)[:] = list(cells)
    staged[split:].view(np.int32)[:] = list(cells.values())
    packed = staging.to(device, non_blocking=True)
    return packed[:split].view(torch.int64), packed[split:].view(torch.int32)


def upload_pair(
    first: list[int], second: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors int64 [n], in one copy that the CPU does not wait for."""
    size = len(first)
    start = size + size % 2  # at a multiple of 16 bytes: Triton makes other code for other addresses
    staging = torch.empty(start + size, dtype=torch.int64, pin_memory=device.type == "cuda")
    staged = staging.numpy()
    staged[:size] = first
    staged[start:] = second
    packed = staging.to(device, non_blocking=True)
    return packed[:size], packed[start:]


class Lane:
    """Transfers of one direction. They run and complete in order, on a stream of their own on a GPU.

    ``marker`` marks what the stream was given so far; None in place of a mark is over at once.
    """

    def __init__(self, device: torch.device, marker: Marker) -> None:
        self.device = device
        self.marker = marker
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.reached: Any = None if self.stream is None else torch.cuda.Event()
        self.behind: list[torch.cuda.Stream] = []
        self.pending: deque[tuple[int, Mark | None, tuple[torch.Tensor, ...]]] = deque()
        self.num_reported = 0

    def start(
        self, transfer_id: int, copy: Callable[[], None], inputs: tuple[torch.Tensor, ...] = ()
    ) -> None:
        """Run ``copy`` behind all that the current stream and those of ``behind`` were given.

        ``inputs`` live until it is over.
        """
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device.index)
            for stream in (current, *(other for other in self.behind if other != current)):
                # A wait is for the record before it, so that one event serves all of them.
                self.reached.record(stream)
                self.stream.wait_event(self.reached)
        with _on(self.stream):
            copy()
            mark = self.marker.record(self.stream)
        self.pending.append((transfer_id, mark, inputs))

    @property
    def num_completed(self) -> int:
        """Transfers that are over on this rank, since the start."""
        over = 0
        for _, mark, _ in self.pending:
            if mark is not None and not mark.query():
                break
            over += 1
        return self.num_reported + over

    def take(self, num_completed: int) -> Iterator[int]:
        """Ids of the transfers up to that count that were not reported yet."""
        while self.num_reported < num_completed:
            self.num_reported += 1
            transfer_id, mark, _ = self.pending.popleft()
            self.marker.release(mark)
            yield transfer_id


class Transfers:
    """The ``TransferQueue`` of one rank.

    With a ``SharedHostPool`` the writer alone copies to the host; on a reader the same calls start transfers
    that are over when the writer's are.

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
        self.to_host = Lane(self.where, host)
        self.to_device = Lane(self.where, Events())
        self.pages = PageCopies(host, device)
        self.num_layers = device.buffer.shape[0]
        self.next_id = 0
        self.uploaded: tuple[list[int], list[int], tuple[torch.Tensor, torch.Tensor]] | None = None

    def run_behind(self, stream: torch.cuda.Stream) -> None:
        """From now on every copy waits for what ``stream`` was given too: the forward of another stream."""
        for lane in (self.to_host, self.to_device):
            if stream not in lane.behind:
                lane.behind.append(stream)

    def join_restores(self) -> None:
        """Make the current stream wait for the restores started so far."""
        if self.to_device.stream is not None and self.to_device.pending:
            torch.cuda.current_stream(self.where.index).wait_stream(self.to_device.stream)

    def upload_step(self, slots: list[int], rows: list[int]) -> torch.Tensor:
        """Slots int64 of the rows that a forward will write, on the device, on the current stream.

        What the mirror of just these rows needs is in the same copy. The mirror runs behind that forward,
        which runs behind this stream: it reads the slots as well.
        """
        if not self.host.is_writer:
            return upload(slots, torch.int64, self.where)
        ids = upload_pair(slots, rows, self.where)
        self.uploaded = slots, rows, ids
        return ids[0]

    def mirror(self, slots: list[int], rows: list[int]) -> int:
        if not self.host.is_writer:
            return self._start(self.to_host, _leave_to_the_writer)
        if self.uploaded is not None and self.uploaded[:2] == (slots, rows):
            ids = self.uploaded[2]
        else:
            ids = upload_pair(slots, rows, self.where)
        self.uploaded = None
        slot_ids, row_ids = ids
        self.counters.device_to_host_bytes += len(slots) * self.num_layers * self.row.row_bytes
        return self._start(
            self.to_host,
            lambda: scatter(
                self.device.buffer, self.host.buffer, row_ids, slot_ids, self.row, backend=self.backend
            ),
            ids,
        )

    def spill(self, pages: list[PageCopy]) -> int:
        if not self.host.is_writer:
            return self._start(self.to_host, _leave_to_the_writer)
        moved = [copy for copy in pages if copy.moves_bytes]
        self.counters.device_to_host_bytes += self._bytes(moved)
        return self._start(self.to_host, lambda: self.pages.copy(list(_runs(moved)), to_host=True))

    def restore(self, pages: list[PageCopy]) -> int:
        self.counters.restored_bytes += self._bytes(pages)
        return self._start(self.to_device, lambda: self.pages.copy(list(_runs(pages)), to_host=False))

    def poll(self) -> list[Completion]:
        to_host, to_device = self.agree((self.to_host.num_completed, self.to_device.num_completed))
        over = [*self.to_host.take(to_host), *self.to_device.take(to_device)]
        return [Completion(transfer_id, True) for transfer_id in over]

    def wait(self) -> list[Completion]:
        lanes = [lane for lane in (self.to_host, self.to_device) if lane.pending]
        if lanes:
            mark = min(lanes, key=lambda lane: lane.pending[0][0]).pending[0][1]
            if mark is not None:
                mark.synchronize()
        return self.poll()

    def _start(self, lane: Lane, copy: Callable[[], None], inputs: tuple[torch.Tensor, ...] = ()) -> int:
        transfer_id = self.next_id
        self.next_id += 1
        lane.start(transfer_id, copy, inputs)
        return transfer_id

    def _bytes(self, pages: list[PageCopy]) -> int:
        return len(pages) * self.num_layers * self.row.page_bytes


def _on(stream: Any) -> AbstractContextManager[Any]:
    """A context in which ``stream`` is current. From torch 2.7 on a stream is one itself, and a fast one."""
    if stream is None:
        return nullcontext()
    return stream if hasattr(stream, "__enter__") else torch.cuda.stream(stream)


def _leave_to_the_writer() -> None:
    """A reader's part in a copy to a shared host pool."""


def _runs(pages: list[PageCopy]) -> Iterator[Run]:
    start = 0
    for end in range(1, len(pages) + 1):
        first = pages[start]
        step = end - start
        if end < len(pages) and pages[end][:2] == (first.host_page + step, first.device_page + step):
            continue
        yield Run(first.host_page, first.device_page, step)
        start = end
