"""A synthetic decode step: how much of the followers' copies shows on the compute stream.

    python -m benchmarks.decode_step

Eight layers in two index groups of a leader and three followers, at 90 % hits, in one CUDA graph, through
``Runtime``. The same step is timed with all copies, with the leaders' only, and with none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import memory, report, timing
from benchmarks.cells import PAGE_SIZE, Cell
from benchmarks.glm_layer import TINY, Layer, Shape
from benchmarks.workload import place_pages, select_positions
from hisparse_sgl.config import HiSparseConfig, Sizes
from hisparse_sgl.kernels.rows import row_view
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout
from hisparse_sgl.requests import Deltas
from hisparse_sgl.runtime import Runtime

GROUPS = (IndexGroup(0, (1, 2, 3)), IndexGroup(4, (5, 6, 7)))
NUM_LAYERS = 8
HIT_RATE = 0.9
STEPS = 24
MODES = ("all", "leaders", "none")


class Step:
    """The pools, the runtime and the layers; ``positions`` int32 [steps + 1, groups, batch, top_k]."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        misses = round((1 - HIT_RATE) * shape.top_k)
        cell = Cell(shape.batch, misses, context=shape.context, top_k=shape.top_k)
        layout = KVLayout.single(NUM_LAYERS, (656,), PAGE_SIZE, GROUPS, 0)
        pages = shape.context // PAGE_SIZE
        config = HiSparseConfig(
            top_k=shape.top_k,
            context_len=shape.context,
            host_pages=shape.batch * pages + 1,
            device_pages=(shape.batch + 2) * -(-2 * shape.top_k // PAGE_SIZE) + 8,
            max_requests=shape.batch,
        )
        self.host: HostPool = memory.open_pool(layout, config.host_pages)[0]
        self.mirror = memory.fill_random(self.host, device)
        sizes = Sizes.of(config, PAGE_SIZE)
        pool = DevicePool(layout, config.device_pages, config.host_pages, device, poison=True)
        self.runtime = Runtime(layout, config, sizes, self.host, pool)
        rng = np.random.default_rng(0)
        self.runtime.tables.page_table.copy_(
            torch.from_numpy(place_pages(rng, cell, config.host_pages, self.runtime.row.page_bytes))
        )
        regions = 1 + np.arange(shape.batch * sizes.hot_pages).reshape(shape.batch, sizes.hot_pages)
        held = {row: (row, pages) for row, pages in enumerate(regions.tolist())}
        self.runtime.apply(Deltas(hot_regions=held))
        self.runtime.set_batch(list(range(shape.batch)), 1)
        chosen = [
            [select_positions(rng, cell, STEPS)[:, 0] for _ in range(shape.batch)] for _ in range(len(GROUPS))
        ]
        self.positions = torch.from_numpy(np.array(chosen)).permute(2, 0, 1, 3).contiguous().to(device)
        self.current = self.positions[0].clone()
        leaders = {group.leader for group in GROUPS}
        self.layers = [Layer(shape, i in leaders, device) for i in range(NUM_LAYERS)]
        self.hidden = torch.randn((shape.batch, shape.hidden), dtype=torch.bfloat16, device=device)
        self.replay_followers = self.runtime._replay

    def run(self, mode: str) -> None:
        """One step on the positions in ``current``."""
        runtime = self.runtime
        # The followers' copies are left out at the one place where the runtime starts them.
        runtime._replay = self.replay_followers if mode == "all" else lambda followers, plan: None
        for group, index_group in enumerate(GROUPS):
            for layer in index_group.layers:
                self.layers[layer].before_rows(self.hidden)
                if mode != "none":
                    if layer == index_group.leader:
                        runtime.swap_in(group, self.current[group])
                    runtime.wait_layer(layer)
                self.layers[layer].after_rows(self.hidden)
        runtime.join()
        runtime._replay = self.replay_followers

    def warm(self) -> None:
        """The state after the warm-up selection, with its rows in every layer."""
        self.runtime.hot.reset()
        self.current.copy_(self.positions[0])
        self.run("all")

    def count_wrong(self, step: int) -> int:
        """Selected rows, over all layers, that do not hold the host's bytes after ``step``."""
        wrong = 0
        row, table = self.runtime.row, self.runtime.tables.page_table
        for group, index_group in enumerate(GROUPS):
            rows = self.runtime.rows[group].long()
            positions = self.positions[step, group].long()
            pages = torch.gather(table.long(), 1, positions // PAGE_SIZE)
            for layer in index_group.layers:
                got = row_view(self.runtime.device.buffer[layer], row)[rows // PAGE_SIZE, rows % PAGE_SIZE]
                want = row_view(self.mirror[layer], row)[pages, positions % PAGE_SIZE]
                wrong += int((got != want).any(-1).sum())
        return wrong


def time_mode(step: Step, mode: str) -> timing.Sample:
    """Microseconds of the whole step; each replay gets the next selection."""
    step.warm()
    step.run(mode)
    replay = timing.capture(lambda: step.run(mode), step.device)
    step.warm()
    times = []
    for index in range(1, STEPS + 1):

        def prepare(index: int = index) -> None:
            step.current.copy_(step.positions[index])

        times.append(timing.time_once(replay, prepare, step.device))
    wrong = step.count_wrong(STEPS) if mode == "all" else 0
    if wrong:
        raise RuntimeError(f"decode step: {wrong} selected rows have wrong bytes")
    return timing.Sample.of(times[2:])


def time_replay(step: Step) -> dict[str, timing.Sample]:
    """Microseconds of three followers' copies: as the runtime replays them, and as three copies in a row."""
    runtime, followers = step.runtime, list(GROUPS[0].followers)
    step.warm()
    step.current.copy_(step.positions[1])
    step.run("all")
    plan = runtime.plans[0]
    rounds = 8

    def replayed() -> None:
        for _ in range(rounds):
            step.replay_followers(followers, plan)
            runtime.join()

    def plain() -> None:
        for _ in range(rounds):
            for layer in followers:
                runtime._gather(layer, plan)

    bodies: dict[str, Callable[[], None]] = {"replay_us": replayed, "copy_us": plain}
    samples = {}
    for name, body in bodies.items():
        body()
        samples[name] = timing.measure(body, timing.nothing, rounds, step.device)
    return samples


def main() -> int:
    arguments = report.common_arguments("decode_step", __doc__).parse_args()
    device = torch.device(arguments.device)
    step = Step(TINY if arguments.tiny else Shape(), device)
    samples = {mode: time_mode(step, mode) for mode in MODES}
    replays = time_replay(step)
    whole, leaders, none = (samples[mode].p50 for mode in MODES)
    values: dict[str, Any] = {
        "shape": vars(step.shape),
        "hit_rate": HIT_RATE,
        "followers_exposed": round((whole - leaders) / whole, 4),
        "leaders_exposed": round((leaders - none) / whole, 4),
        "replay_over_copy": round(replays["replay_us"].p50 / replays["copy_us"].p50 - 1, 4),
    }
    values |= {f"{mode}_us": sample._asdict() for mode, sample in samples.items()}
    values |= {name: sample._asdict() for name, sample in replays.items()}
    results = report.Report(arguments.out / "decode_step.jsonl", device)
    results.write(values)
    results.close()
    rows = [
        [name, f"{sample.p20:.1f}", f"{sample.p50:.1f}", f"{sample.p80:.1f}"]
        for name, sample in (samples | replays).items()
    ]
    print(report.table(["step, us", "p20", "p50", "p80"], rows))
    for name in ("followers_exposed", "leaders_exposed", "replay_over_copy"):
        print(f"{name}: {values[name]:.2%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
