"""What the SGLang plugin costs the scheduler's process in a decode step. No GPU is used.

SGLang's own scheduler decodes requests of equal size that all lie on the device, with the plugin and without
it. The forward, the sampling and the bytes of copies are left out, so that what remains is the CPU's part.

python -m benchmarks.plugin_step
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from random import Random
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import report
from benchmarks.cpu_scheduler import build_engine, common_arguments, engine, open_results, request
from hisparse_sgl import runtime, transfers

PAGE = engine.PAGE
PERIOD = PAGE
"""Decode steps after which the work repeats: each request has then opened one page."""

COORDINATOR = (
    "collect", "can_decode", "prepare_decode", "before_forward", "after_forward", "get_token_stats",
    "metrics", "map_last_loc_to_buffer", "wait_for_pending_backup", "has_ongoing_staging",
)  # fmt: skip
ALLOCATOR = ("alloc_decode", "available_size", "evict_to_free_tokens", "check_decode_capacity")
VIEWS = ("view", "slice", "select", "detach", "alias", "reshape", "unbind", "split", "expand", "lift_fresh")


class Hooks:
    """Times the calls that enter the plugin; while ``counting`` is set, counts their tensor operations.

    ``launched`` are those that put something on a stream of a GPU: uploads, writes of tables, kernels.
    """

    def __init__(self) -> None:
        self.inside: str | None = None
        self.counting = False
        self.seconds = 0.0  # in this step
        self.by_hook: defaultdict[str, float] = defaultdict(float)
        self.operations: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()

    def enter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.inside is not None:
                return function(*args, **kwargs)
            self.inside = name
            began = time.perf_counter()
            try:
                if self.counting:
                    with Operations(self):
                        return function(*args, **kwargs)
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                self.inside = None
                self.seconds += spent
                self.by_hook[name] += spent

        return timed

    def launch(self, what: str) -> None:
        if self.counting and self.inside is not None:
            self.launched[f"{self.inside}: {what}"] += 1

    def stand_in(self, what: str, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """In the place of something that launches on a GPU, and counts as that."""

        def launches(*args: Any, **kwargs: Any) -> Any:
            self.launch(what)
            return function(*args, **kwargs) if function else None

        return launches


class Operations(TorchDispatchMode):
    """Counts tensor operations, views apart, for the hook that is running."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self.hooks = hooks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.hooks.operations[f"{self.hooks.inside}: {name}"] += 1
        if name.startswith("index_put"):
            self.hooks.launch("index_put")
        return func(*args, **kwargs or {})


class Run:
    """One engine of ``batch`` requests of about ``context`` tokens: times of its decode steps."""

    def __init__(self, batch: int, context: int, plugin: bool, mirror: bool, periods: int) -> None:
        self.batch = batch
        self.context = context
        self.periods = periods
        self.hooks = Hooks()
        self.stack = ExitStack()
        self.steps: list[tuple[float, float]] = []  # whole, in hooks
        self.by_hook: list[dict[str, float]] = []
        self.began: float | None = None
        self.sent = False
        self.num_decoded = 0
        self.num_counted = 0
        longest = context + 2 * PAGE + (periods + 3) * PERIOD
        settings = engine.Settings(
            tokens=batch * longest + 16 * 2 * PAGE + PAGE,
            max_requests=batch,
            chunk=16 * 1024,
            hybrid=plugin,
            ratio=2,
            hisparse=(("poison", False), ("eager_host_mirror", mirror)),
        )
        self.engine = build_engine(self.stack, settings, longest)
        self.scheduler: Any = self.engine.scheduler
        self.engine.forwards.launch = self._launch
        self.scheduler.channels.inbox = self.inbox
        if plugin:
            self._hook()

    def _launch(self, batch: Any) -> None:
        self.num_decoded += batch.forward_mode.is_decode() and len(batch.rids) == self.batch

    def _hook(self) -> None:
        hooks, coordinator = self.hooks, self.scheduler.hisparse_coordinator
        for owner, names in (
            (coordinator, COORDINATOR),
            (self.scheduler.token_to_kv_pool_allocator, ALLOCATOR),
        ):
            for name in names:
                setattr(owner, name, hooks.enter(name, getattr(owner, name)))
        for module in (runtime, transfers, sys.modules["hisparse_sgl.integrations.sglang.coordinator"]):
            for name in ("upload", "upload_cells", "upload_pair"):
                if hasattr(module, name):
                    stand_in = hooks.stand_in("upload", getattr(module, name))
                    self.stack.enter_context(patch.object(module, name, stand_in))
        self.stack.enter_context(patch.object(transfers, "scatter", hooks.stand_in("kernel")))
        coordinator.transfers.pages.copy = hooks.stand_in("page copy")

    def inbox(self) -> list[Any]:
        """Once a step of the event loop: the clock, and the requests."""
        now = time.perf_counter()
        steady = self.num_decoded > PERIOD
        if steady and self.began is not None and not self.hooks.counting:
            self.steps.append((now - self.began, self.hooks.seconds))
            self.by_hook.append(self.hooks.by_hook)
        if len(self.steps) == self.periods * PERIOD:
            self.num_counted += self.hooks.counting
            self.hooks.counting = self.num_counted < PERIOD
            self.scheduler.gracefully_exit = not self.hooks.counting
        self.hooks.seconds, self.hooks.by_hook = 0.0, defaultdict(float)
        sent = [] if self.sent else [self.request(index) for index in range(self.batch)]
        self.sent = True
        self.began = time.perf_counter() if steady else None
        return sent

    def request(self, index: int) -> Any:
        """A prompt of its own; the lengths are spread, so that pages are opened in different steps."""
        rng = Random(index)
        length = self.context + index * PAGE // self.batch
        return request(f"{index:06d}", rng.choices(range(2, 500), k=length), 10**6)

    def measure(self) -> dict[str, Any]:
        try:
            gc.collect()
            gc.freeze()
            self.engine.run()
        finally:
            gc.unfreeze()
            self.stack.close()
        hooks = self.hooks
        names = {name for counter in self.by_hook for name in counter}
        by_hook = {n: least(c.get(n, 0.0) for c in self.by_hook) for n in sorted(names)}
        return {
            "step_us": least(whole for whole, _ in self.steps),
            "hooks_us": least(inside for _, inside in self.steps),
            "hooks_us_by_hook": by_hook,
            "operations_a_step": per_step(hooks.operations, self.num_counted),
            "launches_a_step": per_step(hooks.launched, self.num_counted),
        }


def least(seconds: Iterable[float]) -> float:
    """Microseconds a step: of each step of a period the least over all periods, then their mean."""
    values = list(seconds)
    return round(sum(min(values[phase::PERIOD]) for phase in range(PERIOD)) / PERIOD * 1e6, 1)


def per_step(counts: Counter[str], steps: int) -> dict[str, float]:
    return {name: round(count / steps, 2) for name, count in sorted(counts.items())}


def main() -> int:
    parser = common_arguments(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--context", type=int, default=16 * 1024, help="tokens of a prompt")
    parser.add_argument("--periods", type=int, default=8, help="how often each step of a period is timed")
    args = parser.parse_args()
    results = open_results("plugin_step.jsonl", args)
    rows = []
    for batch in args.batches:
        for plugin, mirror in ((False, False), (True, True), (True, False)):
            shape = {"label": args.label, "batch": batch, "context": args.context}
            values = Run(batch, args.context, plugin, mirror, args.periods).measure()
            engine_name = "none" if not plugin else "mirror" if mirror else "no mirror"
            results.write(shape | {"engine": engine_name} | values)
            counted = [sum(values[f"{what}_a_step"].values()) for what in ("operations", "launches")]
            figures = [values["step_us"], values["hooks_us"], *(round(count, 2) for count in counted)]
            rows.append([f"{batch} {engine_name}", *map(str, figures)])
            print(rows[-1], values["hooks_us_by_hook"], values["launches_a_step"], flush=True)
    results.close()
    print(report.table(["batch, engine", "step us", "hooks us", "operations", "launches"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
