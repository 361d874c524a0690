"""Simulated time: what a step of one engine takes, and copies that complete by the clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

from hisparse_sgl.transfer_queue import Completion, PageCopy

GB = 1e9
MIN_RATE, MAX_RATE = 1e-6, 1e12


@dataclass(frozen=True)
class Rates:
    """Speeds of one engine. Every field is positive, or at least 0 where 0 switches a cost off.

    Args:
        prefill_tokens: prompt tokens a second.
        prefill_chunk: most prompt tokens in one step.
        decode_step_ms: a step of an empty batch (the weights are read once).
        decode_request_ms: what each request adds to the step.
        swap_step_ms: what the swap-in kernels add to a step, if any request reads through a hot region.
        gather_gb_s: rate at which a kernel gathers scattered rows from pinned memory.
        to_device_gb_s, to_host_gb_s: rates of the copy engines.
        copy_us: fixed cost of one copy; a page takes one a layer.
        hot_hit_rate: share of the selected rows that are not resident and still lie in the hot region.
    """

    prefill_tokens: float = 40_000.0
    prefill_chunk: int = 8192
    decode_step_ms: float = 18.0
    decode_request_ms: float = 0.1
    swap_step_ms: float = 0.5
    gather_gb_s: float = 45.0
    to_device_gb_s: float = 53.7
    to_host_gb_s: float = 54.7
    copy_us: float = 10.0
    hot_hit_rate: float = 0.85

    def __post_init__(self) -> None:
        may_be_zero = ("decode_request_ms", "swap_step_ms", "copy_us", "hot_hit_rate")
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in may_be_zero else MIN_RATE
            if not least <= value <= MAX_RATE:
                raise ValueError(
                    f"{each.name} is {value}, it must be a number in {least}..{MAX_RATE:g}: correct it"
                )
        if self.hot_hit_rate > 1:
            raise ValueError(
                f"hot_hit_rate is {self.hot_hit_rate}, the limit is 1: give a share such as 0.85"
            )

    def step_seconds(self, decoding: int, prefill_tokens: int, gathered_bytes: float | None) -> float:
        """Seconds of one step; ``gathered_bytes`` is None when no request has a hot region.

        The parts add up: nothing overlaps, so the truth is no slower.
        """
        seconds = prefill_tokens / self.prefill_tokens
        if decoding:
            seconds += (self.decode_step_ms + decoding * self.decode_request_ms) / 1e3
        if gathered_bytes is not None:
            seconds += self.swap_step_ms / 1e3 + gathered_bytes / (self.gather_gb_s * GB)
        return seconds

    def page_seconds(self, page_bytes: int, layers: int, to_host: bool) -> float:
        """Seconds to copy one page of all layers."""
        rate = self.to_host_gb_s if to_host else self.to_device_gb_s
        return layers * self.copy_us / 1e6 + page_bytes / (rate * GB)


@dataclass(slots=True)
class Clock:
    """The simulated time in seconds. It never goes back."""

    now: float = 0.0

    def advance_to(self, time: float) -> None:
        self.now = max(self.now, time)


class Lane:
    """Copies of one direction: one after the other, in the order of their calls."""

    def __init__(self, page_seconds: float, page_bytes: int) -> None:
        self.page_seconds = page_seconds
        self.page_bytes = page_bytes
        self.in_flight: deque[tuple[float, int]] = deque()
        self.free_at = 0.0
        self.bytes_moved = 0

    def start(self, transfer_id: int, pages: float, now: float) -> None:
        self.free_at = max(self.free_at, now) + pages * self.page_seconds
        self.bytes_moved += round(pages * self.page_bytes)
        self.in_flight.append((self.free_at, transfer_id))


class SimulatedTransfers:
    """A ``TransferQueue`` whose copies take time on ``clock`` and move no bytes.

    ``to_host_seconds`` and ``to_device_seconds`` are those of one page; with 0 a copy is over at once.
    """

    def __init__(
        self,
        clock: Clock,
        page_bytes: int,
        page_size: int = 1,
        to_host_seconds: float = 0.0,
        to_device_seconds: float = 0.0,
    ) -> None:
        self.clock = clock
        self.page_size = page_size
        self.to_host = Lane(to_host_seconds, page_bytes)
        self.to_device = Lane(to_device_seconds, page_bytes)
        self.next_id = 0

    @property
    def next_completion(self) -> float | None:
        """When the next copy in flight is over; None if there is none."""
        return min((lane.in_flight[0][0] for lane in self._lanes() if lane.in_flight), default=None)

    def mirror(self, slots: list[int], rows: list[int]) -> int:
        return self._start(self.to_host, len(slots) / self.page_size)

    def spill(self, pages: list[PageCopy]) -> int:
        return self._start(self.to_host, sum(copy.moves_bytes for copy in pages))

    def restore(self, pages: list[PageCopy]) -> int:
        return self._start(self.to_device, len(pages))

    def poll(self) -> list[Completion]:
        done: list[tuple[float, int]] = []
        for lane in self._lanes():
            while lane.in_flight and lane.in_flight[0][0] <= self.clock.now:
                done.append(lane.in_flight.popleft())
        return [Completion(transfer_id, True) for _, transfer_id in sorted(done)]

    def wait(self) -> list[Completion]:
        if self.next_completion is not None:
            self.clock.advance_to(self.next_completion)
        return self.poll()

    def _lanes(self) -> tuple[Lane, Lane]:
        return self.to_host, self.to_device

    def _start(self, lane: Lane, pages: float) -> int:
        transfer_id = self.next_id
        self.next_id += 1
        lane.start(transfer_id, pages, self.clock.now)
        return transfer_id
