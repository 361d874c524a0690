"""Points in the work of a stream, at which somebody waits or asks whether it is over."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a stream's work. torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether all work before the mark is over."""
        ...

    def synchronize(self) -> None:
        """Block until it is."""
        ...


class Marker(Protocol):
    """Sets marks."""

    def record(self, stream: torch.cuda.Stream | None) -> Mark | None:
        """Mark what `stream` was given so far; None when it is over already."""
        ...

    def release(self, mark: Any) -> None:
        """What was before the mark is over, and nobody asks for it again."""
        ...


class Events:
    """Marks that are CUDA events. Those released are recorded again: to make and destroy one in each step
    costs more than to record it."""

    def __init__(self) -> None:
        self.spare: list[torch.cuda.Event] = []

    def record(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """As of `Marker`; None on a CPU, where nothing is ever under way."""
        if stream is None:
            return None
        event = self.spare.pop() if self.spare else torch.cuda.Event()
        event.record(stream)
        return event

    def release(self, mark: torch.cuda.Event | None) -> None:
        """As of `Marker`."""
        if mark is not None:
            self.spare.append(mark)
