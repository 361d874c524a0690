"""Streams, events and copies of a GPU that does not exist: work runs in order on each stream, and late.

Work that is put on a stream runs when time passes, when other work depends on it, or when the CPU waits for
it. Whatever the CPU does itself in the name of a stream happens at once: as early as a GPU could do it,
behind the work that the stream has already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from late_transfers import LateTransfers

from hisparse_sgl.transfer_queue import Completion
from hisparse_sgl.transfers import Lane

Marks = dict["Stream", int]  # stream -> how many pieces of its work must be done


def merge(*several: Marks) -> Marks:
    """All of these points."""
    merged: Marks = {}
    for marks in several:
        for stream, count in marks.items():
            merged[stream] = max(count, merged.get(stream, 0))
    return merged


def reach(marks: Marks) -> None:
    for stream, count in marks.items():
        stream.run_to(count)


class Stream:
    """An in-order queue of work."""

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name
        self.work: deque[tuple[Callable[[], None], Marks]] = deque()
        self.num_done = 0
        self.running = False
        self.waits: Marks = {}

    @property
    def marks(self) -> Marks:
        """What comes before work that is put on this stream next."""
        return merge(self.waits, {self: self.num_done + len(self.work)})

    def put(self, work: Callable[[], None]) -> None:
        self.work.append((work, self.waits))
        self.waits = {}

    def run_to(self, count: int) -> None:
        assert not self.running or count <= self.num_done, f"{self.name} waits for itself"
        while self.num_done < count:
            reach(self.work[0][1])
            if self.num_done >= count:
                break
            work, _ = self.work.popleft()
            self.running = True
            with self.device.current_is(self):
                work()
            self.running = False
            self.num_done += 1
            self.device.move_copies()

    def wait_stream(self, other: Stream) -> None:
        self.waits = merge(self.waits, other.marks)

    def wait_event(self, event: Event) -> None:
        self.waits = merge(self.waits, event.marks)

    def synchronize(self) -> None:
        marks, self.waits = self.marks, {}
        reach(marks)


class Event:
    """A point of the stream that is current when it is recorded."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.marks: Marks = {}

    def record(self, stream: Stream | None = None) -> None:
        self.marks = (stream or self.device.current).marks

    def synchronize(self) -> None:
        reach(self.marks)


class Device:
    """Stands in for ``torch.cuda`` in the scheduler; ``transfers`` move while time passes."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.schedule = Stream(self, "schedule")
        self.forward = Stream(self, "forward")
        self.copy = Stream(self, "copy")
        self.current = self.schedule
        self.transfers: list[StreamTransfers] = []
        self.moving = False

    def Event(self) -> Event:
        return Event(self)

    def StreamContext(self, stream: Stream) -> StreamContext:
        return StreamContext(self, stream)

    @contextmanager
    def current_is(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def advance(self) -> None:
        """Some time passes."""
        count = self.rng.choice((0, 0, 1, 3))
        self.forward.run_to(self.forward.num_done + min(count, len(self.forward.work)))
        self.move_copies()

    def move_copies(self) -> None:
        """Copies move their bytes, or are over, or fail."""
        if not self.moving:
            self.moving = True
            for transfers in self.transfers:
                transfers.move(self.rng)
            self.moving = False


class StreamContext:
    """``with`` for one stream, as often as one likes.

    What the CPU does inside on the forward stream comes behind the work that is there. The copy stream only
    carries results, which are known when a step is launched.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device = device
        self.stream = stream
        self.entered: list[Any] = []

    def __enter__(self) -> None:
        if self.stream is self.device.forward:
            self.stream.synchronize()
        self.entered.append(self.device.current_is(self.stream))
        self.entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered.pop().__exit__(*error)


class StreamTransfers(LateTransfers):
    """Late copies that run behind the streams they were told to wait for.

    ``rate`` is how likely copies of a direction move when time passes, ``failure_rate`` how likely one to the
    host fails then and leaves garbage.
    """

    streams: Device
    rate = 0.3
    failure_rate = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams.transfers.append(self)
        self.behind: list[Stream] = []
        self.failure = "garbage"
        self.unreported: dict[str, list[int]] = {name: [] for name in self.queues}
        self.num_reported = dict.fromkeys(self.queues, 0)

    def run_behind(self, stream: Any) -> None:
        self.behind.append(stream)

    def join_restores(self) -> None:
        self.run("to_device", len(self.queues["to_device"]))

    def run_after(self, stream: Stream) -> Marks:
        """What a copy that starts now waits for, of a stream that it runs behind."""
        return stream.marks

    def poll(self) -> list[Completion]:
        """What is over on every rank, as ``Transfers.poll``: a count a direction is agreed on."""
        over = {completion.transfer_id: completion for completion in self.landed}
        counts = [
            self.num_reported[name] + sum(transfer_id in over for transfer_id in started)
            for name, started in self.unreported.items()
        ]
        reported: list[Completion] = []
        for (name, started), count in zip(self.unreported.items(), self.agree(tuple(counts)), strict=True):
            new = count - self.num_reported[name]
            reported += [over.pop(transfer_id) for transfer_id in started[:new]]
            del started[:new]
            self.num_reported[name] = count
        self.landed = list(over.values())
        return reported

    def wait(self) -> list[Completion]:
        started = {name: ids[0] for name, ids in self.unreported.items() if ids}
        if started:
            name = min(started, key=lambda name: started[name])
            queue = self.queues[name]
            if queue and queue[0].transfer_id == started[name]:
                self.land(name, 1)
        return self.poll()

    def move(self, rng: Random) -> None:
        for direction, queue in self.queues.items():
            if not queue or rng.random() > self.rate:
                continue
            if direction == "to_host" and rng.random() < self.failure_rate:
                self.failures["to_host"] = 1
            count = rng.choice((1, 1, 2, 4, len(queue)))
            if rng.random() < 0.3:
                self.run(direction, count)
            else:
                self.land(direction, count)

    def _start(self, lane: Lane, copy: Callable[[], None], inputs: tuple[Any, ...] = ()) -> int:
        marks = merge(*map(self.run_after, (self.streams.current, *self.behind)))

        def run() -> None:
            reach(marks)
            copy()

        transfer_id = super()._start(lane, run, inputs)
        self.unreported["to_host" if lane is self.to_host else "to_device"].append(transfer_id)
        return transfer_id
