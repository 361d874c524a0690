"""Copies between the pools that run late, complete late and fail, as the test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hisparse_sgl.kernels.rows import row_view
from hisparse_sgl.transfer_queue import Completion, PageCopy
from hisparse_sgl.transfers import Lane, Transfers

Failure = Literal["nothing", "garbage"]
GARBAGE = 0xA5


@dataclass
class Copy:
    """One transfer that was started and not reported."""

    transfer_id: int
    run: Callable[[], None]
    spoil: Callable[[], None]  # fills the destination with garbage
    has_run: bool = False


class LateTransfers(Transfers):
    """A ``TransferQueue`` whose copies read and write only when the test lands them, in order per direction.

    The next ``failures[direction]`` copies to land fail and leave their destination as it was ("nothing") or
    full of 0xA5 ("garbage").
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queues: dict[str, deque[Copy]] = {"to_host": deque(), "to_device": deque()}
        self.landed: list[Completion] = []
        self.failures = dict.fromkeys(self.queues, 0)
        self.failure: Failure = "nothing"
        self._spoil: Callable[[], None] = lambda: None

    @property
    def fails(self) -> bool:
        return any(self.failures.values())

    def mirror(self, slots: list[int], rows: list[int]) -> int:
        def spoil() -> None:
            index, size = torch.tensor(slots), self.row.page_size
            for part in range(len(self.row.parts)):
                row_view(self.host.buffer, self.row, part)[:, index // size, index % size] = GARBAGE

        self._spoil = spoil
        return super().mirror(slots, rows)

    def spill(self, pages: list[PageCopy]) -> int:
        targets = [copy.host_page for copy in pages if copy.moves_bytes]
        self._spoil = lambda: _fill(self.host.buffer, targets)
        return super().spill(pages)

    def restore(self, pages: list[PageCopy]) -> int:
        targets = [copy.device_page for copy in pages]
        self._spoil = lambda: _fill(self.device.buffer, targets)
        return super().restore(pages)

    def run(self, direction: str, count: int) -> None:
        """Move the bytes of the first ``count`` copies of a direction, and report nothing yet."""
        for copy in list(self.queues[direction])[:count]:
            self._run(copy)

    def land(self, direction: str, count: int) -> None:
        """Complete the first ``count`` copies of a direction; ``poll`` reports them."""
        queue = self.queues[direction]
        for _ in range(min(count, len(queue))):
            copy = queue.popleft()
            ok = self.failures[direction] == 0
            if ok:
                self._run(copy)
            else:
                self.failures[direction] -= 1
                if self.failure == "garbage":
                    copy.spoil()
            self.landed.append(Completion(copy.transfer_id, ok))

    def poll(self) -> list[Completion]:
        landed, self.landed = self.landed, []
        return landed

    def wait(self) -> list[Completion]:
        waiting = [(queue[0].transfer_id, name) for name, queue in self.queues.items() if queue]
        if not self.landed and waiting:
            self.land(min(waiting)[1], 1)
        return self.poll()

    def _start(self, lane: Lane, copy: Callable[[], None], inputs: tuple[torch.Tensor, ...] = ()) -> int:
        transfer_id, self.next_id = self.next_id, self.next_id + 1
        direction = "to_host" if lane is self.to_host else "to_device"
        self.queues[direction].append(Copy(transfer_id, copy, self._spoil))
        return transfer_id

    def _run(self, copy: Copy) -> None:
        if not copy.has_run:
            copy.run()
            copy.has_run = True
            if self.where.type == "cuda":
                torch.cuda.synchronize()


def _fill(buffer: torch.Tensor, pages: list[int]) -> None:
    if pages:
        buffer[:, torch.tensor(pages)] = GARBAGE
