"""Drives an engine through random traffic and checks all that can be seen from outside after each step."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from engine import Engine, Settings
from traffic import Load, Traffic

PATIENCE = 400  # steps without a forward while requests wait


class Drive:
    """One run: ``steps`` steps of traffic, then everything is answered and nothing may be left over."""

    def __init__(self, settings: Settings, load: Load, seed: int, steps: int) -> None:
        self.engine = Engine(settings, seed)
        self.scheduler: Any = self.engine.scheduler
        forwards = self.engine.forwards
        self.traffic = Traffic(self.engine.rng, load, forwards.texts, forwards.cached)
        self.traffic.priorities = settings.priorities
        self.steps = steps
        self.num_steps = 0
        self.last_forward = (0, 0)
        self.scheduler.channels.inbox = self.step
        self.scheduler.channels.outbox = self.traffic.outbox
        self.scheduler.dp_attn_adapter = IdleBatches(self.scheduler.dp_attn_adapter, self.engine.rng)

    def run(self) -> Counter[str]:
        """The whole run; what was seen."""
        try:
            self.engine.run()
            self.check_end()
            return self.seen
        finally:
            self.engine.close()

    @property
    def seen(self) -> Counter[str]:
        return self.traffic.seen + self.engine.forwards.seen

    def step(self) -> list[Any]:
        """Between two steps of the event loop: time passes, all is checked, clients send."""
        self.num_steps += 1
        self.engine.device.advance()
        self.check()
        if self.num_steps >= self.steps:
            self.traffic.closed = True
            if not self.traffic.live and not self.traffic.flushing and self.scheduler.is_fully_idle():
                self.scheduler.gracefully_exit = True
        return self.traffic.inbox()

    def check(self) -> None:
        forwards = self.scheduler.forward_ct
        if forwards != self.last_forward[0] or not self.traffic.live:
            self.last_forward = (forwards, self.num_steps)
        self.engine.memory.check(self.engine.forwards)
        if self.num_steps - self.last_forward[1] > PATIENCE:
            waiting = [req.rid for req in self.scheduler.waiting_queue]
            raise AssertionError(f"{PATIENCE} steps without a forward; waiting {waiting}")

    def check_end(self) -> None:
        """Nothing runs and nothing is held: only the tree has pages, and all of them can be evicted."""
        s = self.scheduler
        self.engine.device.forward.synchronize()
        assert s.chunked_req is None and not s.waiting_queue and s.running_batch.is_empty()
        rows = s.req_to_token_pool
        assert rows.available_size() == rows.size, f"{rows.available_size()} request rows free of {rows.size}"
        assert s.tree_cache.protected_size() == 0, f"{s.tree_cache.protected_size()} tokens are locked"
        memory = self.engine.memory
        memory.check_end(self.engine.forwards)
        free, cached = s.token_to_kv_pool_allocator.available_size(), s.tree_cache.evictable_size()
        assert free + cached == memory.num_tokens, f"{free} free and {cached} cached tokens"


class IdleBatches:
    """Runs an idle batch now and then where no request runs, as a rank of a data parallel group does."""

    def __init__(self, adapter: Any, rng: Random) -> None:
        self.adapter = adapter
        self.rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)

    def maybe_prepare_mlp_sync_batch(self, batch: Any, need_sync: bool | None = None) -> Any:
        batch = self.adapter.maybe_prepare_mlp_sync_batch(batch, need_sync)
        wanted = batch is None and need_sync is not None and self.rng.random() < 0.1
        return self.adapter.get_idle_batch() if wanted else batch
