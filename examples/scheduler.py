"""Continuous batching over a `HiSparsePool`: first come first served, chunked prefill, retraction under
pressure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from conversations import Request, next_turn

from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.requests import Admission, Deferred


class PooledModel(Protocol):
    """What the two integrations offer to a scheduler."""

    @property
    def pool(self) -> HiSparsePool: ...

    def start(self, rid: str, admission: Admission) -> None: ...

    def stop(self, rid: str) -> None: ...

    def prefill(
        self, rid: str, start: int, token_ids: Sequence[int], slots: torch.Tensor
    ) -> torch.Tensor: ...

    def decode(
        self, rids: Sequence[str], starts: Sequence[int], token_ids: Sequence[int], slots: torch.Tensor
    ) -> torch.Tensor: ...


class Scheduler:
    """Serves requests with greedy decoding. A finished first turn brings its second turn into the queue.

    `on_end` is called with each request that has ended, `on_step` after each step.
    """

    def __init__(
        self,
        model: PooledModel,
        requests: Iterable[Request],
        prefill_chunk: int,
        max_running: int,
        on_end: Callable[[Request], None] = lambda request: None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.pool = model.pool
        self.waiting = deque(requests)
        self.running: list[Request] = []
        self.ended: list[Request] = []
        self.prefill_chunk = prefill_chunk
        self.max_running = max_running
        self.on_end = on_end
        self.on_step = on_step

    def run(self) -> list[Request]:
        """Serves until nothing waits or runs; returns the requests in the order of their end."""
        while self.waiting or self.running:
            self.step()
            self.on_step()
        return self.ended

    def step(self) -> None:
        """Admits what fits, computes one prefill chunk, then one token of every other running request."""
        self._admit()
        prefilled = self._prefill()
        decoded = self._decode()
        if prefilled or decoded or self.pool.wait():
            return
        if not self.running:
            raise RuntimeError(f"request {self.waiting[0].rid} fits no empty pool: raise device_pages")
        self._retract(self.running[-1])

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            admission = self.pool.admit(request.rid, request.context)
            if isinstance(admission, Deferred):
                return
            self.running.append(self.waiting.popleft())
            request.num_computed = admission.cached_tokens
            request.cached_tokens += admission.cached_tokens
            request.shortened_tokens += admission.shortened_tokens
            request.hot = admission.hot
            self.model.start(request.rid, admission)

    def _prefill(self) -> bool:
        for request in filter(lambda request: request.is_prefilling and not request.hot, self.running):
            left = request.context[request.num_computed :]
            chunk = left[: self.prefill_chunk]
            slots = self.pool.extend(request.rid, len(chunk))
            if isinstance(slots, Deferred):
                continue
            logits = self.model.prefill(request.rid, request.num_computed, chunk, slots)
            request.num_computed += len(chunk)
            if len(chunk) == len(left):
                self._accept(request, int(logits.argmax()))
            return True
        return False

    def _decode(self) -> bool:
        batch: list[Request] = []
        slots: list[torch.Tensor] = []
        for request in self.running:
            waits = request.is_prefilling and not request.hot
            slot = None if waits else self.pool.extend(request.rid, 1)
            if isinstance(slot, torch.Tensor):
                batch.append(request)
                slots.append(slot)
        if not batch:
            return False
        logits = self.model.decode(
            [request.rid for request in batch],
            [request.num_computed for request in batch],
            [request.context[request.num_computed] for request in batch],
            torch.cat(slots),
        )
        for request, token in zip(batch, logits.argmax(dim=-1).tolist(), strict=True):
            request.num_computed += 1
            if request.num_computed == len(request.context):
                self._accept(request, token)
        return True

    def _accept(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        self.pool.append_tokens(request.rid, [token])
        if len(request.tokens) == request.num_tokens:
            self.pool.finish(request.rid)
            self._end(request)
            follow_up = next_turn(request)
            if follow_up:
                self.waiting.append(follow_up)
        elif len(request.tokens) == request.abort_at:
            request.aborted = True
            self.pool.abort(request.rid)
            self._end(request)
        elif len(request.tokens) == request.retract_at:
            self._retract(request)

    def _retract(self, request: Request) -> None:
        self.pool.retract(request.rid)
        self.model.stop(request.rid)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _end(self, request: Request) -> None:
        self.model.stop(request.rid)
        self.running.remove(request)
        self.ended.append(request)
        self.on_end(request)
