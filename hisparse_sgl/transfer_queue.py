"""What the coordinator asks of whoever moves bytes. No torch here: ``transfers`` implements it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PageCopy(NamedTuple):
    """One page, all layers. ``moves_bytes`` is False where the host already has every row."""

    host_page: int
    device_page: int
    moves_bytes: bool = True


class Completion(NamedTuple):
    """A transfer that is over. ``ok`` False: its destination holds nothing that can be trusted."""

    transfer_id: int
    ok: bool


class TransferQueue(Protocol):
    """Copies in flight. Each call starts one transfer and returns its id.

    Device-to-host transfers (mirror, spill) run and complete in the order of their calls, so a spill that
    moves no bytes completes after the mirrors before it. With several ranks ``poll`` and ``wait`` answer
    what *every* rank has completed (rule 8).
    """

    def mirror(self, slots: list[int], rows: list[int]) -> int:
        """Copy device rows to host slots, all layers."""
        ...

    def spill(self, pages: list[PageCopy]) -> int:
        """Copy pages device to host, all layers."""
        ...

    def restore(self, pages: list[PageCopy]) -> int:
        """Copy pages host to device, all layers."""
        ...

    def poll(self) -> list[Completion]:
        """Transfers completed since the last call, in order; never blocks."""
        ...

    def wait(self) -> list[Completion]:
        """Block until the oldest transfer in flight is over; answers like ``poll``."""
        ...
