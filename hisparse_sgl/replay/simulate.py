"""Replay with a clock: admissions, chunked prefill, decode from event to event, retractions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf
from typing import Any

from hisparse_sgl.replay.measures import Measures, timed_result
from hisparse_sgl.replay.occupancy import Occupancy
from hisparse_sgl.replay.sequences import PageIds, Sequences
from hisparse_sgl.replay.setup import Setup, make_engine
from hisparse_sgl.requests import Deferred


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the engine. ``generated`` survives a retraction, the rest starts anew."""

    index: int
    rid: str
    arrival: float
    output_tokens: int
    ids: PageIds
    generated: int = 0  # tokens of the answer at step ``counted_at``
    counted_at: int = 0
    prefill_left: int = 0
    num_uncached: int = 0  # pages to extend by before the first chunk
    extended: bool = False
    next_page: int = 0  # of ``ids.answer``, the one after the page that is being filled
    admissions: int = 0
    deferred: bool = False
    queried: bool = False
    first_token: float | None = None


class Simulation:
    """One engine that serves a trace.

    A step computes a chunk of the prompts let in, oldest first, and one token for every decoding request.
    Nothing changes for a decoding request until its page is full or its answer complete, so steps without a
    prompt pass in one go up to the next such event, arrival or awaited copy.
    """

    def __init__(
        self, setup: Setup, sequences: Sequences, on_request: Callable[[], None] = lambda: None
    ) -> None:
        self.setup = setup
        self.rates = setup.rates
        self.sequences = sequences
        self.block_size = sequences.block_size
        self.engine = make_engine(setup, sequences)
        self.clock, self.coordinator = self.engine.clock, self.engine.coordinator
        self.transfers = self.engine.transfers
        self.occupancy = Occupancy(self.coordinator, self.block_size, setup.model.top_k)
        self.measures = Measures()
        self.on_request = on_request
        self.num_arrived = 0
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self.decoding: dict[Job, None] = {}
        self.admitted: dict[str, Job] = {}
        self.steps = 0
        self.events: list[tuple[int, int, int, Job]] = []  # step, serial number, admission of the job, job
        self.num_events = 0
        self.refusal: tuple[int, ...] | None = None  # state of the pools when the head was deferred

    def run(self) -> dict[str, Any]:
        """Serve every request and return the figures."""
        while self.step():
            pass
        lanes = self.transfers
        return timed_result(self.measures, lanes.to_host.bytes_moved, lanes.to_device.bytes_moved)

    def step(self) -> bool:
        """Let in what can be let in, then pass to the next event. False when every request is served."""
        self._arrive()
        self._admit()
        batch = self._prefill_batch()
        if batch or self.decoding:
            self._advance(batch)
        elif not self._idle():
            if self.waiting or self.prefilling:
                raise RuntimeError(f"{len(self.waiting)} requests wait and nothing can change that")
            return False
        return True

    def _next_arrival(self) -> float | None:
        requests = self.sequences.trace.requests
        if self.num_arrived == len(requests):
            return None
        return requests[self.num_arrived].arrival * self.setup.slowdown

    def _arrive(self) -> None:
        requests = self.sequences.trace.requests
        while (arrival := self._next_arrival()) is not None and arrival <= self.clock.now:
            index = self.num_arrived
            ids = self.sequences.of(index)
            output = max(1, requests[index].output_tokens)
            self.num_arrived += 1
            if self._fits(len(ids.prompt) + len(ids.answer)):
                self.waiting.append(Job(index, str(index), arrival, output, ids))
            else:
                self.measures.refused += 1
                self.on_request()

    def _fits(self, pages: int) -> bool:
        """Whether a request can be let in at all, even after a retraction late in its answer."""
        config, sizes = self.coordinator.config, self.coordinator.sizes
        return pages <= min(config.device_pages - 1 - sizes.hot_pages, config.host_pages - 1)

    def _admit(self) -> None:
        """Let in the waiting requests in order, as long as the prompts let in fill less than one chunk."""
        while self.waiting and sum(job.prefill_left for job in self.prefilling) < self.rates.prefill_chunk:
            if self.refusal == self._pool_state():
                return
            job = self.waiting[0]
            written = job.ids.offset + job.generated
            answer = job.ids.answer[: written // self.block_size + 1]
            began = self.clock.now
            admission = self.coordinator.admit(job.rid, [*job.ids.prompt, *answer])
            self._stall(began)
            if isinstance(admission, Deferred):
                self.refusal = self._pool_state()
                if not job.deferred:
                    job.deferred = True
                    self.measures.deferred[admission.reason] += 1
                return
            self.refusal = None
            self.prefilling.append(self.waiting.popleft())
            self._enter(job, admission.cached_tokens, len(answer))

    def _enter(self, job: Job, cached_pages: int, answer_pages: int) -> None:
        prompt_tokens = self.sequences.trace.requests[job.index].input_tokens
        cached = self.sequences.cached_tokens(job.index, cached_pages)
        job.prefill_left = max(1, prompt_tokens + job.generated - cached)
        job.num_uncached = len(job.ids.prompt) + answer_pages - cached_pages
        job.extended = False
        job.next_page = answer_pages
        job.admissions += 1
        self.admitted[job.rid] = job
        if not job.queried:
            job.queried = True
            self.measures.query_tokens += prompt_tokens
            self.measures.hit_tokens += min(cached, prompt_tokens)

    def _pool_state(self) -> tuple[int, ...]:
        coordinator = self.coordinator
        return (
            coordinator.leases.num_free,
            coordinator.allocator.num_free,
            coordinator.tree.num_evictable,
            coordinator.residency.promised,
            coordinator.pages.counters.pages_spilled,
            len(coordinator.requests),
        )

    def _prefill_batch(self) -> list[tuple[Job, int]]:
        """(job, tokens) of the next chunk; jobs whose prefix is still being restored are passed over."""
        batch: list[tuple[Job, int]] = []
        budget = self.rates.prefill_chunk
        for job in self.prefilling:
            if budget == 0:
                break
            if not job.extended:
                if isinstance(self.coordinator.extend(job.rid, job.num_uncached), Deferred):
                    continue
                job.extended = True
                if job.admissions == 1:
                    self.measures.queueing.append(self.clock.now - job.arrival)
            taken = min(budget, job.prefill_left)
            budget -= taken
            batch.append((job, taken))
        return batch

    def _idle(self) -> bool:
        """Nothing to compute: pass to the next arrival or the end of a copy. False if there is neither."""
        times = [t for t in (self._next_arrival(), self.transfers.next_completion) if t is not None]
        if not times:
            return False
        began = self.clock.now
        self.clock.advance_to(min(times))
        self._stall(began)
        self.coordinator.collect()
        self.occupancy.update()
        return True

    def _stall(self, began: float) -> None:
        """Account for time in which nothing was computed while requests ran: the pool waited for copies."""
        seconds, running = self.clock.now - began, len(self.coordinator.requests)
        if seconds and running:
            self.measures.stalled_seconds += seconds
            self.measures.lapse(seconds, running)

    def _advance(self, batch: list[tuple[Job, int]]) -> None:
        """Pass as many steps as look alike, then carry out what is due."""
        decoding, hot = len(self.decoding), self.occupancy.counts
        gathered = None
        if any(hot.values()):
            rows = self.occupancy.missing_rows * (1 - self.rates.hot_hit_rate)
            gathered = rows * self.setup.model.token_bytes
        seconds = self.rates.step_seconds(decoding, sum(tokens for _, tokens in batch), gathered)
        steps = 1 if batch else self._steps_until_event(seconds)
        self.steps += steps
        self.clock.advance_to(self.clock.now + steps * seconds)
        self.measures.output_tokens += steps * decoding
        self.measures.lapse(steps * seconds, len(self.coordinator.requests))
        self.measures.decode(steps * seconds, decoding, hot, steps * (gathered or 0.0))
        self.measures.region_rows += steps * self.occupancy.selected_rows
        self.measures.region_rows_missing += steps * self.occupancy.missing_rows
        self._end_step(batch)
        self.occupancy.update()

    def _steps_until_event(self, step_seconds: float) -> int:
        while self._is_stale(self.events[0]):
            heappop(self.events)
        steps = self.events[0][0] - self.steps
        awaited = []
        if not self.waiting:
            awaited.append(self._next_arrival())
        if self.waiting or self.prefilling:
            awaited.append(self.transfers.next_completion)
        for time in awaited:
            if time is not None:
                steps = min(steps, max(1, ceil((time - self.clock.now) / step_seconds)))
        return steps

    def _is_stale(self, event: tuple[int, int, int, Job]) -> bool:
        _, _, admission, job = event
        return job not in self.decoding or job.admissions != admission

    def _end_step(self, batch: list[tuple[Job, int]]) -> None:
        for job, tokens in batch:
            job.prefill_left -= tokens
        written = [job for job, _ in batch if job.prefill_left == 0]
        self._settle(written)
        for job in written:
            self.prefilling.remove(job)
            self._emit_first(job)
        grown = [job for job in self._due() if job in self.decoding and self._grow(job)]
        grown = [job for job in grown if job in self.decoding]  # a later one may have retracted it
        if grown:
            self._settle(grown)
        elif not written and (self.transfers.next_completion or inf) <= self.clock.now:
            self.coordinator.collect()
        for job in grown:
            self._schedule(job)

    def _settle(self, jobs: list[Job]) -> None:
        """Rows of all pages these jobs have count as written.

        That is early by up to a page for the page that an answer has just begun; the tail of a running
        request stays on the device anyway.
        """
        requests = [self.coordinator.request(job.rid) for job in jobs]
        self.coordinator.begin_step(requests)
        self.coordinator.step_done(requests)

    def _emit_first(self, job: Job) -> None:
        """The prefill is over, which yields one token."""
        if job.first_token is None:
            job.first_token = self.clock.now
            self.measures.ttft.append(self.clock.now - job.arrival)
        job.generated += 1
        self.measures.output_tokens += 1
        if job.generated >= job.output_tokens:
            self._finish(job)
        else:
            self.decoding[job] = None
            self._schedule(job)

    def _schedule(self, job: Job) -> None:
        """Note when the job's page is full or its answer complete, whichever comes first."""
        until_full = job.next_page * self.block_size - (job.ids.offset + job.generated - 1)
        until_done = job.output_tokens - job.generated
        job.counted_at = self.steps
        self.num_events += 1
        due = self.steps + min(until_full, until_done)
        heappush(self.events, (due, self.num_events, job.admissions, job))

    def _count(self, job: Job) -> None:
        """Bring the tokens of a decoding job up to this step."""
        job.generated += self.steps - job.counted_at
        job.counted_at = self.steps

    def _grow(self, job: Job) -> bool:
        """Begin the next page of a decoding job. The youngest requests are retracted until there is one;
        False if that was the job itself."""
        while True:
            began = self.clock.now
            slots = self.coordinator.extend(job.rid, 1)
            self._stall(began)
            if not isinstance(slots, Deferred):
                break
            youngest = max(self.coordinator.requests.values(), key=lambda request: request.order)
            self._retract(self.admitted[youngest.rid])
            if youngest.rid == job.rid:
                return False
        self.coordinator.append_tokens(job.rid, [job.ids.answer[job.next_page]])
        job.next_page += 1
        self.occupancy.grow(job.rid)
        return True

    def _retract(self, job: Job) -> None:
        """Take a job back to the head of the queue; what it generated is part of its new prompt."""
        if job in self.decoding:
            self._count(job)
            del self.decoding[job]
        else:
            self.prefilling.remove(job)
        self.occupancy.remove(job.rid)
        self.coordinator.retract(job.rid)
        del self.admitted[job.rid]
        self.measures.retracted[job.index] += 1
        self.waiting.appendleft(job)

    def _due(self) -> list[Job]:
        """Finish the jobs whose answer is complete, and return those whose page is full."""
        full = []
        while self.events and (self._is_stale(self.events[0]) or self.events[0][0] <= self.steps):
            event = heappop(self.events)
            job = event[3]
            if self._is_stale(event):
                continue
            self._count(job)
            if job.generated >= job.output_tokens:
                del self.decoding[job]
                self._finish(job)
            else:
                full.append(job)
        return full

    def _finish(self, job: Job) -> None:
        self.occupancy.remove(job.rid)
        self.coordinator.finish(job.rid)
        del self.admitted[job.rid]
        self.measures.completed += 1
        self.measures.makespan = self.clock.now
        self.on_request()
