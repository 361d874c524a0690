"""The matrix products of a GLM-5 decoder layer, one rank of tensor parallelism 8, at decode.

Memory traffic is that of FP8 weights: they are bf16 here with half the columns. Attention runs on rows of its
own, and there is no all-reduce, no norm and no top-k selection: a step is a little shorter than a real one,
which leaves less time to hide copies behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RANKS = 8


@dataclass(frozen=True)
class Shape:
    """GLM-5's published sizes. ``experts`` is how many of 256 a batch of 16 with 8 each reaches: 101."""

    batch: int = 16
    context: int = 65536
    top_k: int = 2048
    hidden: int = 6144
    heads: int = 64 // RANKS
    q_rank: int = 2048
    kv_rank: int = 512
    rope: int = 64
    nope: int = 192
    value: int = 256
    index_heads: int = 32
    index_dim: int = 128
    experts: int = 101
    tokens_per_expert: int = 2
    expert_width: int = 2048 // RANKS


TINY = Shape(
    batch=2, context=2048, top_k=32, hidden=64, heads=2, q_rank=32, kv_rank=32, rope=16, nope=16, value=16,
    index_heads=2, index_dim=16, experts=3, expert_width=16,
)  # fmt: skip


class Layer:
    """Random weights of one layer; its two methods lie before and after the point that needs the rows."""

    def __init__(self, shape: Shape, leader: bool, device: torch.device) -> None:
        self.shape = shape
        self.leader = leader
        self.device = device
        self.dtype = torch.bfloat16
        s = shape
        self.q_a = self._weights(s.hidden, s.q_rank)
        self.kv_a = self._weights(s.hidden, s.kv_rank + s.rope)
        self.q_b = self._weights(s.q_rank, s.heads * (s.nope + s.rope))
        self.key_up = self._weights(s.heads, s.nope, s.kv_rank)
        self.value_up = self._weights(s.heads, s.kv_rank, s.value)
        self.out = self._weights(s.heads * s.value, s.hidden)
        self.router = self._weights(s.hidden, 256)
        self.shared_in = self._weights(s.hidden, 2 * s.expert_width)
        self.shared_out = self._weights(s.expert_width, s.hidden)
        self.expert_in = self._weights(s.experts, s.hidden, 2 * s.expert_width)
        self.expert_out = self._weights(s.experts, s.expert_width, s.hidden)
        self.routed = self._values(s.experts, s.tokens_per_expert, s.hidden)
        self.routed_out = self._values(s.experts, s.tokens_per_expert, s.expert_width)
        self.query = self._values(s.batch, s.heads, s.kv_rank + s.rope)
        self.latent = self._values(s.heads, s.batch, s.kv_rank)
        self.attended = self._values(s.batch, s.heads * s.value)
        self.nope_query = self._values(s.heads, s.batch, s.nope)
        self.gated = self._values(s.batch, s.expert_width)
        self.q_latent = self._values(s.batch, s.q_rank)
        self.rows = self._values(s.batch, s.top_k, s.kv_rank + s.rope)
        if leader:
            self.index_q = self._weights(s.q_rank, s.index_heads * s.index_dim)
            self.index_k = self._weights(s.hidden, s.index_dim)
            self.index_query = self._values(s.batch, s.index_heads, s.index_dim)
            self.index_keys = self._values(s.batch, s.index_dim, s.context // 2)

    def before_rows(self, hidden: torch.Tensor) -> None:
        """Projections and, in a leader, the indexer's scores."""
        torch.mm(hidden, self.q_a)
        torch.mm(hidden, self.kv_a)
        torch.mm(self.q_latent, self.q_b)
        torch.bmm(self.nope_query, self.key_up)
        if self.leader:
            torch.mm(self.q_latent, self.index_q)
            torch.mm(hidden, self.index_k)
            torch.bmm(self.index_query, self.index_keys)

    def after_rows(self, hidden: torch.Tensor) -> None:
        """Attention over the selected rows, output projection and experts."""
        weights = torch.bmm(self.query, self.rows.transpose(1, 2)).softmax(-1)
        torch.bmm(weights, self.rows[:, :, : self.shape.kv_rank])
        torch.bmm(self.latent, self.value_up)
        torch.mm(self.attended, self.out)
        torch.mm(hidden, self.router)
        torch.mm(hidden, self.shared_in)
        torch.mm(self.gated, self.shared_out)
        torch.bmm(self.routed, self.expert_in)
        torch.bmm(self.routed_out, self.expert_out)

    def _weights(self, *sizes: int) -> torch.Tensor:
        """FP8 weights by their bytes: bf16 with half the columns."""
        return self._values(*sizes[:-1], max(1, sizes[-1] // 2))

    def _values(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=self.dtype, device=self.device)
