"""Requests that a test moves itself, by the calls that SGLang's scheduler makes of the plugin."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from engine import LAYER_PATTERN, PAGE, Engine
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from texts import rows

LAYERS = range(len(LAYER_PATTERN))


class ByHand:
    """Moves requests of an engine whose event loop does not run. Each slot is written with its own number."""

    def __init__(self, engine: Engine) -> None:
        scheduler: Any = engine.scheduler
        self.device = engine.device
        self.tree: Any = scheduler.tree_cache
        self.coordinator: Any = scheduler.hisparse_coordinator
        self.allocator: Any = scheduler.token_to_kv_pool_allocator
        self.pool: Any = self.coordinator.mem_pool_device
        self.life: Any = self.coordinator.lifecycle
        self.num_admitted = 0

    def admit(self, tokens: int = 0, prefix: Sequence[int] = ()) -> Any:
        """A request with a row of its own; what it lacks of a prompt of so many tokens is promised to it."""
        used = {request.req.kv.req_pool_idx for request in self.life.requests.values()}
        row = min(set(range(1, self.life.config.max_requests)) - used)
        self.num_admitted += 1
        req = SimpleNamespace(rid=f"request {self.num_admitted}", kv=SimpleNamespace(req_pool_idx=row))
        self.life.admit(req.rid, req, prefix, tokens)
        return req

    def extend(self, ends: Sequence[tuple[Any, int]]) -> torch.Tensor | None:
        """What SGLang's allocator answers to a prefill batch of these requests up to these lengths."""
        self.coordinator.allocate_spec_scratch([req.kv.req_pool_idx for req, _ in ends])
        lens = torch.tensor([end for _, end in ends])
        new = int(lens.sum()) - sum(self.life.requests[req.rid].num_tokens for req, _ in ends)
        return self.allocator.alloc_extend(None, None, lens, lens, None, new)

    def prefill(self, tokens: int) -> Any:
        """A request whose prompt is written."""
        req = self.admit(tokens)
        slots = self.extend([(req, tokens)])
        assert slots is not None
        self.forward(slots)
        return req

    def decode(self, reqs: Sequence[Any]) -> torch.Tensor:
        """The slots of one more token of each."""
        assert self.coordinator.can_decode(reqs)
        self.coordinator.prepare_decode(reqs)
        lens = torch.tensor([self.life.requests[req.rid].num_tokens for req in reqs])
        return self.allocator.alloc_decode(lens, lens, None)

    def forward(self, slots: torch.Tensor) -> None:
        self.coordinator.before_forward()
        self.device.forward.synchronize()
        for layer in LAYERS:
            self.write(slots, layer)
        self.coordinator.after_forward()

    def write(self, slots: torch.Tensor, layer: int) -> None:
        data = self.expected(slots, layer).view(self.pool.dtype)
        rank = self.pool.kv_lora_rank
        where = SimpleNamespace(layer_id=layer)
        self.pool.set_mla_kv_buffer(where, slots, data[:, None, :rank], data[:, None, rank:])

    def expected(self, slots: torch.Tensor, layer: int) -> torch.Tensor:
        """int64 [n, words]: what was written to these slots."""
        return torch.from_numpy(rows(slots.numpy(), layer, self.pool.row_bytes // 8))

    def held(self, device_rows: torch.Tensor, layer: int) -> torch.Tensor:
        """int64 [n, words]: what these device rows hold."""
        buffer = self.pool.kv_buffer[layer]
        return buffer.view(buffer.shape[0], -1).view(torch.int64)[device_rows.long()]

    def slots(self, req: Any) -> torch.Tensor:
        """int64 [tokens]: the slots of a request, by position."""
        request = self.life.requests[req.rid]
        at = torch.arange(request.num_tokens)
        return torch.tensor(request.pages)[at // PAGE] * PAGE + at % PAGE

    def land(self) -> None:
        """Let all copies end."""
        while self.life.wait():
            pass
        self.coordinator.collect()

    def release(self, req: Any) -> None:
        """As SGLang does when a request ends and nothing of it is kept."""
        request = self.life.requests[req.rid]
        self.coordinator.request_finished(req)
        self.life.pages.free(request.pages)
        self.life.forget(req.rid)

    def publish(self, tokens: Sequence[int]) -> torch.Tensor:
        """Slots of a prompt of whole pages that is computed, durable and in the tree, and not in use."""
        req = self.prefill(len(tokens))
        self.land()
        slots = self.slots(req)
        self.tree.insert(InsertParams(key=key_of(tokens), value=slots))
        self.coordinator.request_finished(req)
        self.life.forget(req.rid)
        return slots

    def cool(self, req: Any) -> None:
        """Give a request a hot region, and let others take the device pages that it does not pin any more."""
        self.land()
        request = self.life.requests[req.rid]
        self.life.residency.give_hot(request)
        other = self.prefill(self.life.leases.num_free * PAGE)
        self.land()
        assert not any(map(self.life.leases.is_resident, request.pages[: request.pin_start]))
        self.release(other)


def key_of(tokens: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", tokens))
