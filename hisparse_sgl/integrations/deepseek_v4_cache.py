"""The cache of one forward of a `deepseek_v4` model: rows in a `HiSparsePool`, the rest with each request.

A row of a C4 layer stands for four tokens, one of a C128 layer for 128. It is written when the last token of
its window is computed; until then the window's projections wait in the request's buffers. Source:
transformers' `DeepseekV4CSACache` and `DeepseekV4HCACache`, whose four methods `PooledLayer` implements for
ragged batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

if TYPE_CHECKING:
    from hisparse_sgl.pool import HiSparsePool

COMPRESSED, HEAVILY = "compressed_sparse_attention", "heavily_compressed_attention"
C128 = "c128"

Pair = tuple[Tensor, Tensor]  # projected keys and gates
Part = tuple[int, str]  # a layer, and "compressor" or "indexer"


@dataclass
class RequestState:
    """What one request keeps besides its pages. Tensors are replaced, never changed: copies may share them.

    `windows` maps a layer to its newest rows [at most sliding_window - 1, head_dim]. `buffers` holds the
    tokens of the newest partial window, `overlaps` what the next C4 row needs of the window before.
    """

    windows: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[Part, Pair] = field(default_factory=dict)
    overlaps: dict[Part, Pair] = field(default_factory=dict)

    def at_boundary(self) -> RequestState:
        """The state as it is now, behind a multiple of every compression rate: no partial window is open."""
        left = [part for part, (keys, _) in self.buffers.items() if keys.shape[0]]
        assert not left, f"{left} have tokens of a partial window at a page boundary"
        return RequestState(dict(self.windows), {}, dict(self.overlaps))


@dataclass
class Step:
    """What one forward knows of its batch: B requests, S new tokens each; S is 1 where B is over 1.

    `starts` are the contexts before it, `slots` int32 [B * S] the token slots of the new tokens, `pages`
    int64 [B, n] the host pages. `decode` is true for a batch that reads C4 rows through `swap_in`, false for
    a prefill chunk, which reads all of them.
    """

    pool: HiSparsePool
    states: list[RequestState]
    starts: list[int]
    num_new: int
    slots: Tensor
    pages: Tensor
    decode: bool
    selected: dict[int, Tensor] = field(default_factory=dict)  # C4 layer -> positions its indexer picked

    @property
    def ends(self) -> list[int]:
        """Context of each request after the forward."""
        return [start + self.num_new for start in self.starts]

    def closed_slots(self, rate: int) -> Tensor:
        """Row slots int64 of the windows of `rate` tokens that close in this forward, in batch order."""
        slots = self.slots.long()
        return slots[slots % rate == rate - 1] // rate

    def columns(self, rate: int) -> tuple[Tensor, Tensor]:
        """Row slots int64 [B, T] of all rows of `rate` tokens, and which of them are there, bool [B, T]."""
        counts = torch.tensor([end // rate for end in self.ends], device=self.pages.device)
        column = torch.arange(int(counts.max()), device=self.pages.device)
        per_page = self.pool.layout.page_size // rate
        there = column < counts[:, None]
        slots = self.pages[:, column // per_page] * per_page + column % per_page
        return torch.where(there, slots, 0), there


class PooledLayer:
    """One layer's part in the cache protocol. `number` counts the layers of its kind, as the pool does."""

    def __init__(self, step: Step, layer: int, number: int, rate: int, window: int, compressor: Any) -> None:
        self.step = step
        self.layer = layer
        self.number = number
        self.rate = rate
        self.window = window
        self.compressor = compressor
        self.num_closed: list[int] = []  # windows that close, for each request

    def update(self, rows: Tensor) -> Tensor:
        """Adds the new rows [B, 1, S, D] to the windows; returns both, right aligned, [B, 1, W + S, D]."""
        old = [state.windows.get(self.layer, rows.new_zeros(0, rows.shape[-1])) for state in self.step.states]
        longest = max(part.shape[0] for part in old)
        padded = torch.stack([torch.nn.functional.pad(part, (0, 0, longest - len(part), 0)) for part in old])
        for state, part, new in zip(self.step.states, old, rows[:, 0], strict=True):
            state.windows[self.layer] = torch.cat((part, new))[-(self.window - 1) :].clone()
        return torch.cat((padded.unsqueeze(1), rows), dim=2)

    def store_compression_weights(self, name: str, keys: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, int]:
        """Buffers projections [B, S, w]; returns those of windows that close, and the position of the first.

        They are [B, n * rate, w], zeros where a request closes fewer. In a batch the position is 0, where
        nothing is rotated: `update_compressor_states` does it.
        """
        chunks: list[Pair] = []
        for state, new in zip(self.step.states, zip(keys, gates, strict=True), strict=True):
            held = state.buffers.get((self.layer, name))
            both = new if held is None else tuple(map(torch.cat, zip(held, new, strict=True)))
            usable = both[0].shape[0] // self.rate * self.rate
            chunks.append((both[0][:usable], both[1][:usable]))
            state.buffers[self.layer, name] = both[0][usable:].clone(), both[1][usable:].clone()
        self.num_closed = [chunk[0].shape[0] // self.rate for chunk in chunks]
        width = max(self.num_closed) * self.rate
        padded = [
            torch.stack([torch.nn.functional.pad(part, (0, 0, 0, width - len(part))) for part in parts])
            for parts in zip(*chunks, strict=True)
        ]
        first = self.step.starts[0] // self.rate * self.rate if len(chunks) == 1 else 0
        return padded[0], padded[1], first

    def update_overlap_state(self, name: str, keys: Tensor, gates: Tensor, head_dim: int) -> Pair:
        """Keeps the first series of the last window that closes, [rate, head_dim]; returns what was kept
        before.

        `keys` and `gates` are [B, n, rate, 2 * head_dim].
        """
        empty = keys.new_zeros(self.rate, head_dim), gates.new_full((self.rate, head_dim), float("-inf"))
        prior = [state.overlaps.get((self.layer, name), empty) for state in self.step.states]
        for index, (state, count) in enumerate(zip(self.step.states, self.num_closed, strict=True)):
            if count:
                last = keys[index, count - 1, :, :head_dim], gates[index, count - 1, :, :head_dim]
                state.overlaps[self.layer, name] = last[0].clone(), last[1].clone()
        return torch.stack([pair[0] for pair in prior]), torch.stack([pair[1] for pair in prior])

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Writes the rows [B, n, D] of the windows that close; returns all rows, [B, T, D].

        C4 rows of a decode batch are not read: only their number counts, and the top-k chooses among them.
        """
        step, pool = self.step, self.step.pool
        width, dtype = compressed.shape[-1], compressed.dtype
        if compressed.shape[1] and len(self.num_closed) > 1:
            compressed = self._rotate(name, compressed)
        new = torch.cat([rows[:count] for rows, count in zip(compressed, self.num_closed, strict=True)])
        slots = step.closed_slots(self.rate)
        columns, there = step.columns(self.rate)
        if self.rate != pool.layout.host_group.tokens_per_row:
            rows = pool.group_rows(C128, self.number).view(dtype)
            rows[slots] = new
        elif name == "indexer":
            if len(new):
                pool.write_index(self.number, slots.int(), new)
            rows = pool.index_rows(self.number).view(dtype)
        else:
            if len(new):
                pool.write(self.number, slots.int(), new)
            if step.decode:
                return new.new_zeros(1, 1, width).expand(*columns.shape, width)
            rows = pool.rows(self.number).view(dtype)
            columns = pool.translate(columns.int()).long().clamp(min=0)
        # Rows that are not there hold anything, and a NaN would survive an additive mask.
        return rows[columns].masked_fill(~there.unsqueeze(-1), 0)

    def _rotate(self, name: str, rows: Tensor) -> Tensor:
        """Rotates the one row [B, 1, D] of each request, not rotated so far, to where its window begins."""
        module = self.compressor.indexer if name == "indexer" else self.compressor
        starts = [start // self.rate * self.rate for start in self.step.starts]
        positions = torch.tensor(starts, device=rows.device).unsqueeze(1)
        cos, sin = module.rotary_emb(rows, position_ids=positions, layer_type=module.rope_layer_type)
        apply: Callable[..., Tensor] = sys.modules[type(module).__module__].apply_rotary_pos_emb
        return apply(rows.unsqueeze(1), cos, sin).squeeze(1)


class PoolCache(Cache):
    """The cache object of one forward: it hands each layer its `PooledLayer` and holds nothing."""

    def __init__(self, layers: Sequence[PooledLayer]) -> None:
        super().__init__(layers=[])
        self.layers: list[Any] = list(layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The sliding window of a layer and the new rows; keys and values are one."""
        rows = self.layers[layer_idx].update(key_states)
        return rows, rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest context before this forward, in tokens."""
        return max(self.layers[layer_idx].step.starts)
