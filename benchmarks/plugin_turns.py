"""What the SGLang plugin costs the scheduler's process in multi-turn load. No GPU is used.

SGLang's own scheduler serves conversations over one shared prefix, with the plugin and without it, as
``engine/conversations.py`` does with real servers. The forward, the sampling and the bytes of copies are left
out, so that what remains is the CPU's part.

python -m benchmarks.plugin_turns
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict, deque
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest.mock import patch

from benchmarks import report
from benchmarks.cpu_scheduler import build_engine, common_arguments, engine, open_results, request, traffic
from benchmarks.engine.conversations import Shape
from benchmarks.engine.settings import ENGINES, Engine
from hisparse_sgl import transfers

CONTEXT = 32 * 1024
SERVED = ("roomy_none", "roomy", "quarter_none", "quarter")
WARM_UP = "warm-up"
COLUMNS = ("requests", "prefills", "decode steps", "ms a request", "ms a step", "ms", "retracted", "deferred")


class Turns:
    """One engine that serves ``shape`` with at most ``concurrency`` requests in flight."""

    def __init__(self, kind: Engine, shape: Shape, concurrency: int) -> None:
        self.shape = shape
        self.concurrency = concurrency
        self.rng = Random(0)
        shared = self.rng.choices(range(2, 500), k=shape.shared)
        self.histories = [list(shared) for _ in range(shape.conversations)]
        # Of answers: each conversation draws its own, so that they are the same in any order of turns.
        self.lengths = [Random(index) for index in range(shape.conversations)]
        self.num_turns = [0] * shape.conversations
        self.waiting = deque(range(shape.conversations))
        self.in_flight: dict[str, tuple[int, int]] = {}  # conversation, length of the answer
        self.warm = False
        self.num_forwards: defaultdict[str, int] = defaultdict(int)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.step = "idle"
        self.began: float | None = None
        self.stack = ExitStack()
        self._build(kind)

    def _build(self, kind: Engine) -> None:
        settings = engine.Settings(
            tokens=kind.tokens,
            max_requests=kind.requests,
            chunk=8192,
            top_k=2048,
            hot_rows=4096,
            hybrid=kind.plugin,
            ratio=min(kind.ratio or 1, 7),  # the working set fits, and its rows fit this machine
            hisparse=(("poison", False),),
        )
        self.engine = build_engine(self.stack, settings, CONTEXT)
        self.scheduler: Any = self.engine.scheduler
        self.engine.forwards.launch = self._launch
        channels = self.scheduler.channels
        channels.inbox, channels.outbox = self._inbox, self._outbox
        if kind.plugin:
            self.scheduler.hisparse_coordinator.transfers.pages.copy = lambda *args, **kwargs: None
            self.stack.enter_context(patch.object(transfers, "scatter", lambda *args, **kwargs: None))

    def _launch(self, batch: Any) -> None:
        self.step = "decode" if batch.forward_mode.is_decode() else "prefill"
        self.num_forwards[self.step] += self.warm

    def _inbox(self) -> list[Any]:
        """Once a step of the event loop: the clock, and the requests."""
        if self.began is not None and self.warm:
            self.seconds[self.step] += time.perf_counter() - self.began
        sent = []
        if not self.warm and not self.in_flight:
            sent.append(self._request(WARM_UP, -1, self.histories[0][: self.shape.shared], 1))
        while self.warm and self.waiting and len(self.in_flight) < self.concurrency:
            sent.append(self._turn(self.waiting.popleft()))
        self.scheduler.gracefully_exit = self.warm and not self.in_flight
        self.step, self.began = "idle", time.perf_counter()
        return sent

    def _turn(self, index: int) -> Any:
        self.histories[index] += self.rng.choices(range(2, 500), k=self.shape.turn)
        rid = f"{index}-{self.num_turns[index]}"
        return self._request(rid, index, self.histories[index], self.shape.draw_answer(self.lengths[index]))

    def _request(self, rid: str, index: int, prompt: list[int], new_tokens: int) -> Any:
        self.in_flight[rid] = index, new_tokens
        return request(rid, prompt, new_tokens)

    def _outbox(self, output: Any) -> None:
        if not isinstance(output, traffic.BatchTokenIDOutput):
            return
        for rid, reason in zip(output.rids, output.finished_reasons, strict=True):
            if reason is None:
                continue
            index, new_tokens = self.in_flight.pop(rid)
            self.warm = True
            if rid != WARM_UP:
                self.histories[index] += [5] * new_tokens
                self.num_turns[index] += 1
                if self.num_turns[index] < self.shape.turns:
                    self.waiting.append(index)

    def measure(self) -> dict[str, Any]:
        """Milliseconds of the scheduler's process, and what it decided."""
        try:
            gc.collect()
            gc.freeze()
            self.engine.run()
            requests = sum(self.num_turns)
            beside = self.seconds["prefill"] + self.seconds["idle"]
            values = {
                "requests": requests,
                "prefills": self.num_forwards["prefill"],
                "decode_steps": self.num_forwards["decode"],
                "ms_a_request_beside_decoding": round(beside / requests * 1e3, 3),
                "ms_a_decode_step": round(self.seconds["decode"] / self.num_forwards["decode"] * 1e3, 3),
                "ms": round(sum(self.seconds.values()) * 1e3, 1),
            }
            if coordinator := self.scheduler.hisparse_coordinator:
                counters = coordinator.counters
                values |= {
                    "retractions": counters.retractions,
                    "deferred_admissions": counters.deferred_admissions,
                }
            return values
        finally:
            gc.unfreeze()
            self.stack.close()


def main() -> int:
    parser = common_arguments(__doc__)
    parser.add_argument("--engines", nargs="+", choices=SERVED, default=list(SERVED))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--runs", type=int, default=3, help="the one that takes least counts")
    args = parser.parse_args()
    results = open_results("plugin_turns.jsonl", args)
    rows = []
    for concurrency in args.concurrency:
        runs: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for name in args.engines * args.runs:  # in turns, as others may use the machine
            runs[name].append(Turns(ENGINES[name], Shape(), concurrency).measure())
        for name in args.engines:
            values = min(runs[name], key=lambda run: run["ms"])
            results.write({"label": args.label, "engine": name, "concurrency": concurrency} | values)
            rows.append([f"{name} {concurrency}", *map(str, values.values())])
            print(rows[-1], flush=True)
    results.close()
    names = ["engine", *COLUMNS]
    print(report.table(names, [[*row, *[""] * (len(names) - len(row))] for row in rows]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
