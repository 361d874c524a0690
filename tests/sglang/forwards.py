"""A model that is only its KV cache: each forward writes rows, reads rows and compares every byte.

A forward is checked and its tokens are sampled when it is launched; its reads and writes are put on the
forward stream, a piece a layer. What it reads from tables of the scheduler it reads at the launch: SGLang
lets the scheduler go on as soon as those reads are over.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from streams import Device
from texts import Text, rows

NOBODY = -1


class WrongRow(AssertionError):
    """A reader was given a row that is not the row of that text and position."""


class Memory(Protocol):
    """How attention finds the rows of logical slots."""

    def prefill_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Device rows int64 [n] of slots int64 [n]."""
        ...

    def decode_rows(self, step: Decode, layer: int) -> torch.Tensor:
        """Device rows [requests, top_k] of the positions that were picked; -1 for none."""
        ...

    def choose_graph(self) -> str | None:
        """Of the decode step that is being launched."""
        ...


@dataclass(kw_only=True)
class Step:
    """One forward, as it was when it was launched."""

    rids: list[str]
    slots: list[torch.Tensor]  # of each request: int64 [its tokens]
    numbers: list[np.ndarray]  # and what is written there
    starts: list[int]  # the first position that is new
    written: torch.Tensor  # int64 [new positions]: the slots of all requests' new positions
    fresh: np.ndarray  # int64 [new positions]: what goes there


@dataclass(kw_only=True)
class Decode(Step):
    """A decode step; the rows behind those of the requests are padding."""

    request_rows: torch.Tensor  # int64 [batch]
    seq_lens: torch.Tensor  # int64 [batch]
    positions: torch.Tensor  # int32 [batch, top_k], of the index group that is running
    graph: str | None  # which variant is replayed, if there are several

    @property
    def num_real(self) -> int:
        return len(self.rids)


class Forwards:
    """Launches the forwards of one engine and remembers whose row every logical slot holds."""

    def __init__(self, runner: Any, memory: Memory, device: Device, top_k: int, leaders: list[bool]) -> None:
        self.runner = runner
        self.pool = runner.token_to_kv_pool
        self.memory = memory
        self.device = device
        self.rng: Random = device.rng
        self.top_k = top_k
        self.leaders = leaders
        self.texts: dict[str, Text] = {}
        self.cached: dict[str, int] = {}  # tokens that the first prefill of a request did not compute
        allocator = runner.token_to_kv_pool_allocator
        num_slots = getattr(allocator, "size_full", allocator.size) + allocator.page_size
        self.owner = np.full(num_slots, NOBODY, dtype=np.int64)
        self.seen: Counter[str] = Counter()
        self.log: list[tuple[Any, ...]] = []  # what was launched

    def launch(self, batch: Any) -> None:
        """Check what SGLang asks for, and put the forward on its stream."""
        if batch.forward_mode.is_idle():
            self.seen["idle batches"] += 1
            return
        step = self._step(batch)
        self._check_owners(step)
        self.owner[step.written.numpy()] = step.fresh
        self.log.append((batch.forward_mode.name, *step.rids, *step.written.tolist()))
        if isinstance(step, Decode):
            self.seen["decode steps"] += 1
        else:
            self.seen["prefill steps"] += 1
            for rid, start in zip(step.rids, step.starts, strict=True):
                self.cached.setdefault(rid, start)
        for layer in range(len(self.leaders)):
            self.device.forward.put(partial(self._layer, step, layer))
        if self.device.current is not self.device.forward:  # no overlap: what comes next reads the results
            self.device.forward.synchronize()

    def sample(self, batch: Any) -> torch.Tensor:
        lens = batch.seq_lens_cpu.tolist()
        return torch.tensor([self.texts[r].token(n) for r, n in zip(batch.rids, lens, strict=True)])

    def rows(self, layer: int) -> torch.Tensor:
        """int64 [device rows, words]: the device buffer of a layer, as words."""
        buffer = self.pool.kv_buffer[layer]
        return buffer.view(buffer.shape[0], -1).view(torch.int64)

    def _step(self, batch: Any) -> Step:
        decode = batch.forward_mode.is_decode()
        lens = batch.seq_lens_cpu.tolist()
        starts = [n - 1 for n in lens] if decode else list(batch.extend_prefix_lens_cpu)
        spans = list(zip([self.texts[rid] for rid in batch.rids], starts, lens, strict=True))
        numbers = [text.slice(0, end) for text, _, end in spans]
        tokens = [token for text, start, end in spans for token in text.tokens[start:end]]
        if batch.input_ids.tolist() != tokens:
            raise AssertionError(f"forward of {batch.rids} over {batch.input_ids.tolist()}, not {tokens}")
        table = self.runner.req_to_token_pool.req_to_token
        rows_of = zip(batch.req_pool_indices.tolist(), lens, strict=True)
        slots = [table[row, :end].long() for row, end in rows_of]
        written = torch.cat([held[start:] for held, start in zip(slots, starts, strict=True)])
        if not torch.equal(written, batch.out_cache_loc.long()):
            raise AssertionError(f"{batch.rids} write {batch.out_cache_loc}, their table says {written}")
        fresh = np.concatenate([n[start:] for n, start in zip(numbers, starts, strict=True)])
        step = Step(
            rids=batch.rids, slots=slots, numbers=numbers, starts=starts, written=written, fresh=fresh
        )
        return self._padded(batch, step) if decode else step

    def _padded(self, batch: Any, step: Step) -> Decode:
        most = self.runner.req_to_token_pool.size - len(step.rids)  # a graph is captured for no more
        padding = min(most, self.rng.choice((0, 0, 1, 3)))
        # A captured step keeps the rows of the batch before it behind its own.
        stale = torch.tensor([self.rng.randint(0, most) for _ in range(padding)], dtype=torch.int64)
        self.seen["padded rows"] += padding
        graph = self.memory.choose_graph()
        self.seen[f"steps: {graph}"] += 1
        return Decode(
            **vars(step),
            request_rows=torch.cat([batch.req_pool_indices.long(), stale]),
            seq_lens=torch.cat([batch.seq_lens.long(), torch.ones(padding, dtype=torch.int64)]),
            positions=torch.empty(0),
            graph=graph,
        )

    def _check_owners(self, step: Step) -> None:
        for rid, held, wanted, start in zip(step.rids, step.slots, step.numbers, step.starts, strict=True):
            wrong = self.owner[held[:start].numpy()] != wanted[:start]
            if wrong.any():
                at = int(wrong.nonzero()[0][0])
                raise WrongRow(f"{rid}: slot {int(held[at])} of position {at} is the row of another text")

    def _layer(self, step: Step, layer: int) -> None:
        self._write(layer, step.written, step.fresh)
        if isinstance(step, Decode):
            self._decode(step, layer)
            return
        found = self.memory.prefill_rows(torch.cat(step.slots))
        self._compare(f"prefill, layer {layer}", layer, found, np.concatenate(step.numbers))
        self.seen["prefill rows read"] += len(found)

    def _decode(self, step: Decode, layer: int) -> None:
        if self.leaders[layer]:
            step.positions = self._positions(step)
        found = self.memory.decode_rows(step, layer).numpy()
        if (found[step.num_real :] != -1).any():
            raise WrongRow(f"padding reads rows {found[step.num_real :].tolist()}")
        found, wanted = found[: step.num_real], step.positions[: step.num_real].numpy()
        if ((found < 0) != (wanted < 0)).any():
            at = tuple(np.argwhere((found < 0) != (wanted < 0))[0])
            raise WrongRow(f"decode, layer {layer}: position {wanted[at]} comes out as row {found[at]}")
        picked = np.concatenate([n[w[w >= 0]] for n, w in zip(step.numbers, wanted, strict=True)])
        self._compare(f"decode, layer {layer}", layer, torch.from_numpy(found[wanted >= 0]), picked)
        self.seen["decode rows read"] += len(picked)

    def _write(self, layer: int, slots: torch.Tensor, numbers: np.ndarray) -> None:
        if self.rng.random() < 0.3:  # a padded batch writes to slot 0
            slots = torch.cat([slots, torch.zeros(2, dtype=slots.dtype)])
            numbers = np.concatenate([numbers, np.zeros(2, dtype=np.int64)])
        words = self.rows(layer).shape[1]
        data = torch.from_numpy(rows(numbers, layer, words)).view(self.pool.dtype)
        nope = self.pool.kv_lora_rank
        where = SimpleNamespace(layer_id=layer)
        self.pool.set_mla_kv_buffer(where, slots, data[:, None, :nope], data[:, None, nope:])

    def _compare(self, what: str, layer: int, found: torch.Tensor, numbers: np.ndarray) -> None:
        memory = self.rows(layer)
        data = memory[found.long()].numpy()
        expected = rows(numbers, layer, memory.shape[1])
        if not np.array_equal(data, expected):
            at = int((data != expected).any(-1).nonzero()[0][0])
            row, first, wanted = int(found[at]), data[at, :2], expected[at, :2]
            raise WrongRow(f"{what}, entry {at}: device row {row} holds {first}, not {wanted}")

    def _positions(self, step: Decode) -> torch.Tensor:
        """The newest positions, some that the request asked for before, and some at random."""
        positions = torch.full((len(step.seq_lens), self.top_k), -1, dtype=torch.int32)
        for i, n in enumerate(step.seq_lens[: step.num_real].tolist()):
            if n <= self.top_k:
                picked = list(range(n))
            else:
                newest = range(n - self.rng.randint(1, 8), n)
                base = self.rng.randrange(n)
                near = [(base + j * self.rng.choice((1, 1, 7))) % n for j in range(self.top_k)]
                pool = dict.fromkeys([*newest, *near])
                picked = list(pool)[: self.top_k]
                while len(picked) < self.top_k:
                    other = self.rng.randrange(n)
                    if other not in pool:
                        pool[other] = None
                        picked.append(other)
            self.rng.shuffle(picked)
            positions[i, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
        positions[step.num_real :] = self.rng.choice((-1, 0, 70))
        return positions
