"""Drives an engine through random traffic and checks all that can be seen from outside after each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from engine import CONTEXT, Engine, Place, Settings
from memory import tree_pages
from scenarios import SCENARIOS, random_engine
from sglang.srt.managers.io_struct import AbortReq
from traffic import Load, Traffic

PATIENCE = 400  # steps without a forward while requests wait
SLOW_COPIES = 40  # copies that requests may wait for, one after the other
GRACE = 150  # steps that requests have to end by themselves


def run(name: str, seed: int, steps: int) -> Counter[str]:
    """A named scenario, or a random engine; the command that repeats a failure is printed."""
    settings, load = SCENARIOS[name] if name else random_engine(seed)
    drive = Drive(settings, load, seed, steps)
    try:
        return drive.run()
    except BaseException:
        print(f"step {drive.num_steps}, {settings}, {load}, {dict(drive.seen)}")
        command = f"--scenario {name!r} --seed {seed} --steps {steps} --runs 1"
        print(f"Reproduce: python tests/sglang/soak_scheduler.py {command}")
        raise


class Drive:
    """One run: ``steps`` steps of traffic, then everything is answered and nothing may be left over.

    With ``structure`` False the plugin's own invariants are not asked: rows, answers and leaks alone must
    then show a fault.
    """

    def __init__(
        self,
        settings: Settings,
        load: Load,
        seed: int,
        steps: int,
        structure: bool = True,
        place: Place = Place(),  # noqa: B008
    ) -> None:
        self.engine = Engine(settings, seed, place)
        self.engine.memory.structure = structure
        self.scheduler: Any = self.engine.scheduler
        self.forwards = self.engine.forwards
        rng = self.engine.rng
        self.traffic = Traffic(rng, load, self.forwards, settings.priorities, CONTEXT)
        self.traffic.chunking = lambda: self.scheduler.chunked_req and self.scheduler.chunked_req.rid
        self.steps = steps
        self.num_steps = 0
        self.last_forward = (0, 0)
        self.scheduler.channels.inbox = self.step
        self.scheduler.channels.outbox = self.traffic.outbox
        self.scheduler.dp_attn_adapter = IdleBatches(self.scheduler, rng)
        self._check_matches()

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
        return self.traffic.seen + self.forwards.seen

    def step(self) -> list[Any]:
        """Between two steps of the event loop: time passes, all is checked, clients send."""
        self.num_steps += 1
        self.engine.device.advance()
        self.check()
        if self.num_steps < self.steps:
            return self.traffic.inbox()
        self.traffic.closed = True
        if not self.traffic.live and not self.traffic.flushing and self.scheduler.is_fully_idle():
            self.scheduler.gracefully_exit = True
        if self.num_steps != self.steps + GRACE:
            return []
        for client in self.traffic.live.values():
            client.aborted = True
        return [AbortReq(abort_all=True)]

    def check(self) -> None:
        count = self.forwards.seen["prefill steps"] + self.forwards.seen["decode steps"]
        if count != self.last_forward[0] or not self.traffic.live:
            self.last_forward = (count, self.num_steps)
        self.engine.memory.check(self.forwards)
        rate = self.engine.settings.copy_rate  # 0: copies wait until a test lets them go
        patience = max(PATIENCE, round(SLOW_COPIES / rate)) if rate else PATIENCE
        if self.num_steps - self.last_forward[1] > patience:
            waiting = [req.rid for req in self.scheduler.waiting_queue]
            raise AssertionError(f"{patience} steps without a forward; waiting {waiting}")

    def check_end(self) -> None:
        """Nothing runs and nothing is held: only the tree has pages, and all of them can be evicted."""
        s = self.scheduler
        self.engine.device.forward.synchronize()
        self.engine.memory.settle()
        assert s.chunked_req is None and not s.waiting_queue and s.running_batch.is_empty()
        rows = s.req_to_token_pool
        assert rows.available_size() == rows.size, f"{rows.available_size()} request rows free of {rows.size}"
        assert s.tree_cache.protected_size() == 0, f"{s.tree_cache.protected_size()} tokens are locked"
        free, cached = s.token_to_kv_pool_allocator.available_size(), s.tree_cache.evictable_size()
        assert free + cached == self.engine.memory.num_tokens, f"{free} free and {cached} cached tokens"
        self.engine.memory.check_end(self.forwards)

    def _check_matches(self) -> None:
        """Each request must match the longest prefix of its text that the tree holds."""
        tree = self.scheduler.tree_cache
        match = tree.match_prefix

        def match_prefix(params: Any) -> Any:
            result = match(params)
            if params.req is not None:
                found = result.device_prefix_len
                expected = self._longest(params.req.rid, len(params.key))
                assert found == expected, f"{params.req.rid} matches {found} tokens, the tree has {expected}"
                self.forwards.seen["matches"] += 1
            return result

        tree.match_prefix = match_prefix

    def _longest(self, rid: str, length: int) -> int:
        tree = self.scheduler.tree_cache
        size = tree.page_size
        held = set(self.forwards.owner[(tree_pages(tree) * size + size - 1).numpy()].tolist())
        text = self.forwards.texts[rid]
        text.grow(length)
        found = 0
        while found + size <= length and text.numbers[found + size - 1] in held:
            found += size
        return found


class Script(Drive):
    """A run whose requests are sent by ``script``, a generator that is resumed once a step."""

    def __init__(self, settings: Settings, script: Callable[[Script], Iterator[None]]) -> None:
        super().__init__(settings, Load(too_long=0.0, stop_every=10**9), seed=0, steps=0)
        self.outgoing: list[Any] = []
        self.script = script(self)

    def send(self, prompt_tokens: int, new_tokens: int) -> str:
        """Ask for an answer to a prompt that nobody else has; its request id."""
        prompt = [self.engine.rng.randrange(2, 42) for _ in range(prompt_tokens)]
        self.outgoing.append(self.traffic.send(prompt, None, new_tokens))
        return self.outgoing[-1].rid

    def abort(self, rid: str) -> None:
        """The client of a request goes away."""
        self.traffic.live[rid].aborted = True
        self.outgoing.append(AbortReq(rid=rid))

    def has_started(self, rid: str) -> bool:
        return rid in self.forwards.cached

    def is_live(self, rid: str) -> bool:
        return rid in self.traffic.live

    def step(self) -> list[Any]:
        self.num_steps += 1
        self.engine.device.advance()
        self.check()
        running = next(self.script, self) is not self
        if not running and not self.traffic.live and self.scheduler.is_fully_idle():
            self.scheduler.gracefully_exit = True
        sent, self.outgoing = self.outgoing, []
        return sent


class IdleBatches:
    """Runs an idle batch now and then where no request runs, as a rank of a data parallel group does."""

    def __init__(self, scheduler: Any, rng: Random) -> None:
        self.scheduler = scheduler
        self.adapter = scheduler.dp_attn_adapter
        self.rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)

    def maybe_prepare_mlp_sync_batch(self, batch: Any, need_sync: bool | None = None) -> Any:
        batch = self.adapter.maybe_prepare_mlp_sync_batch(batch, need_sync)
        wanted = batch is None and need_sync is not None and not self.scheduler.gracefully_exit
        return self.adapter.get_idle_batch() if wanted and self.rng.random() < 0.1 else batch
