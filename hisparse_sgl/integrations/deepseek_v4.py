"""Runs Hugging Face's `deepseek_v4` on a `HiSparsePool`, ragged batches included.

The rows of the C4 layers, their indexer rows and the rows of the C128 layers lie in the pool. A request's
sliding windows, partial windows and overlaps lie with this integration, which lets the pool keep them at page
boundaries, so that another request can resume there. No model code is copied or replaced:

1. `PoolCache` stands where the model expects its cache.
2. A forward hook on each C4 indexer picks up the top-k, and one on each compressor puts the selected rows of
   the pool in place of all rows (C4), or hides the rows that a shorter request of the batch does not have
   (C128).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hisparse_sgl.integrations.deepseek_v4_cache import (
    C128,
    COMPRESSED,
    HEAVILY,
    PoolCache,
    PooledLayer,
    RequestState,
    Step,
)
from hisparse_sgl.integrations.transformers import check_pool
from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.mem_pool.layout import CacheGroup, IndexGroup, KVLayout, StateGroup
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.requests import Admission

MODEL_TYPE = "deepseek_v4"


def layout_of(config: Any, dtype: torch.dtype, page_size: int = 256) -> KVLayout:
    """Derives the layout of a V4 model: one-part rows of `head_dim` values of `dtype`.

    Args:
        page_size: tokens a page, a multiple of every compression rate, so that no partial window is open at
            its end.

    Raises:
        ValueError: the config is not one of V4 or has no C4 layer, or a size does not fit.
    """
    if getattr(config, "model_type", None) != MODEL_TYPE:
        raise ValueError(
            f"model_type is {getattr(config, 'model_type', None)!r}, the limit is {MODEL_TYPE!r}"
        )
    numbers = _numbers(config)
    rates = {kind: config.compress_rates[kind] for kind in (COMPRESSED, HEAVILY) if numbers[kind]}
    whole = math.lcm(*rates.values())
    if COMPRESSED not in rates or page_size % whole:
        raise ValueError(
            f"page_size is {page_size} for layers of {sorted(rates)}, the limit is a multiple of {whole} "
            f"tokens and at least one layer of {COMPRESSED}: use 128 or 256"
        )
    size, rate = dtype.itemsize, rates[COMPRESSED]
    row = RowFormat.make((config.head_dim * size,), page_size // rate)
    leaders = tuple(IndexGroup(layer) for layer in range(len(numbers[COMPRESSED])))
    groups = [CacheGroup("c4", len(leaders), row, leaders, config.index_head_dim * size, rate)]
    if numbers[HEAVILY]:
        row = RowFormat.make((config.head_dim * size,), page_size // rates[HEAVILY])
        groups.append(
            CacheGroup(C128, len(numbers[HEAVILY]), row, tokens_per_row=rates[HEAVILY], host_backed=False)
        )
    return KVLayout(tuple(groups), page_size, _states(config, size, numbers))


def _states(config: Any, size: int, numbers: dict[str, dict[int, int]]) -> tuple[StateGroup, StateGroup]:
    """The sliding windows of all layers, and the projections (keys and gates) that a compressor keeps."""
    window = config.num_hidden_layers * (config.sliding_window - 1) * config.head_dim * size
    widths = config.head_dim + config.index_head_dim
    rate, c4, c128 = config.compress_rates[COMPRESSED], len(numbers[COMPRESSED]), len(numbers[HEAVILY])
    overlap = c4 * rate * 2 * widths * size
    partial = c4 * (rate - 1) * 2 * 2 * widths * size
    partial += c128 * (config.compress_rates[HEAVILY] - 1) * 2 * config.head_dim * size
    return (
        StateGroup("sliding window", window, window),
        StateGroup("compressor state", overlap + partial, overlap),
    )


def _numbers(config: Any) -> dict[str, dict[int, int]]:
    """For each kind of compressed layer: layer of the model -> its number among them."""
    kinds = (COMPRESSED, HEAVILY)
    layers = {kind: [i for i, found in enumerate(config.layer_types) if found == kind] for kind in kinds}
    return {kind: {layer: number for number, layer in enumerate(layers[kind])} for kind in kinds}


class PooledModel:
    """A Hugging Face V4 model whose compressed rows live in a `HiSparsePool`.

    The caller schedules: it admits requests and calls `start`, asks `pool.extend` for the slots of the new
    tokens, calls `prefill` or `decode` with them, and `stop` once the request has ended. The model gets
    hooks, until `close`; outside of these calls it works as before.

    Raises:
        ValueError: the model is not a V4 model, or its layers or top-k differ from those of the pool.
    """

    def __init__(self, model: PreTrainedModel, pool: HiSparsePool) -> None:
        check_pool(pool, model, layout_of(model.config, model.dtype, pool.layout.page_size))
        self.model = model
        self.pool = pool
        self.states: dict[str, RequestState] = {}
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._step: Step | None = None
        self._numbers = {layer: n for found in _numbers(model.config).values() for layer, n in found.items()}
        layers: list[Any] = [module for module in model.modules() if hasattr(module, "compressor")]
        self._compressors = {layer.layer_idx: layer.compressor for layer in layers}
        self._hooks = [hook for layer in self._compressors for hook in self._hook(layer)]

    def start(self, rid: str, admission: Admission) -> None:
        """Takes up a request that was admitted, with the state that was kept behind its cached tokens."""
        self.states[rid] = admission.state.at_boundary() if admission.cached_tokens else RequestState()

    def stop(self, rid: str) -> None:
        """Forgets a request that was finished, aborted or retracted."""
        del self.states[rid]

    def prefill(self, rid: str, start: int, token_ids: Sequence[int], slots: Tensor) -> Tensor:
        """Computes the positions `start..start + n - 1` of one request. Everything before them is in the
        pool.

        A chunk over a page boundary takes more than one forward, so that the state there can be kept.

        Args:
            rid: a request that was started.
            start: number of its tokens that are already computed or cached.
            token_ids: the n tokens.
            slots: what `pool.extend(rid, n)` returned, int32 [n].

        Returns:
            Logits after the last token, [vocab].
        """
        page_size, end = self.pool.layout.page_size, start + len(token_ids)
        cuts = [start, *range((start // page_size + 1) * page_size, end, page_size), end]
        self.pool.begin_step([rid])
        logits = torch.empty(0)
        for first, last in pairwise(cuts):
            part = slice(first - start, last - start)
            logits = self._forward([rid], [first], [token_ids[part]], slots[part], decode=False)[0]
        self.pool.step_done()
        return logits

    def decode(
        self, rids: Sequence[str], starts: Sequence[int], token_ids: Sequence[int], slots: Tensor
    ) -> Tensor:
        """Computes one token of each request, at position `starts[i]`. Contexts may differ in length.

        Args:
            rids: B requests that were started.
            starts: context length of each before this token.
            token_ids: the B tokens.
            slots: one slot of `pool.extend(rid, 1)` for each, int32 [B].

        Returns:
            Logits, [B, vocab].
        """
        self.pool.begin_step(rids)
        logits = self._forward(rids, starts, [[token] for token in token_ids], slots, decode=True)
        self.pool.step_done()
        return logits

    def close(self) -> None:
        """Removes the hooks and forgets all requests."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.states.clear()

    @torch.no_grad()
    def _forward(
        self,
        rids: Sequence[str],
        starts: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        slots: Tensor,
        decode: bool,
    ) -> Tensor:
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self.model.device)
        step = Step(
            pool=self.pool,
            states=[self.states[rid] for rid in rids],
            starts=list(starts),
            num_new=tokens.shape[1],
            slots=slots,
            pages=self.pool.page_table(rids).long(),
            decode=decode,
        )
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        self._step = step
        try:
            output = self.model(
                input_ids=tokens,
                attention_mask=self._mask(step),
                position_ids=torch.tensor(step.starts, device=tokens.device).unsqueeze(1) + offsets,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: PoolCache(self._layers(step))},
            )
        finally:
            self._step = None
        for rid, state, end in zip(rids, step.states, step.ends, strict=True):
            if end % self.pool.layout.page_size == 0:
                self.pool.keep_state(rid, end, state.at_boundary())
        return output.logits[:, -1]

    def _layers(self, step: Step) -> list[PooledLayer]:
        config = self.model.config
        rates = config.compress_rates
        return [
            PooledLayer(
                step,
                layer,
                self._numbers.get(layer, -1),
                rates.get(kind, 1),
                config.sliding_window,
                self._compressors[layer],
            )
            for layer, kind in enumerate(config.layer_types)
        ]

    def _mask(self, step: Step) -> Tensor:
        """Additive mask [B, 1, S, W + S] over right aligned windows and the new tokens."""
        width = self.model.config.sliding_window
        ends = torch.tensor(step.ends, device=step.pages.device).view(-1, 1, 1, 1)
        longest = min(max(step.starts), width - 1)
        query = ends - step.num_new + torch.arange(step.num_new, device=ends.device).view(1, 1, -1, 1)
        column = ends - step.num_new - longest + torch.arange(longest + step.num_new, device=ends.device)
        visible = (column >= 0) & (column <= query) & (column > query - width)
        return torch.where(visible, 0.0, float("-inf")).to(self.model.dtype)

    def _hook(self, layer: int) -> list[Any]:
        compressor = self._compressors[layer]
        if self.model.config.layer_types[layer] != COMPRESSED:
            return [compressor.register_forward_hook(self._hide(layer))] if compressor is not None else []
        return [
            compressor.indexer.register_forward_hook(self._select(layer)),
            compressor.register_forward_hook(self._swap_in(layer)),
        ]

    def _select(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], top_k: Tensor) -> None:
            if self._step is not None:
                self._step.selected[layer] = top_k

        return hook

    def _swap_in(self, layer: int) -> Callable[..., tuple[Tensor, Tensor] | None]:
        def hook(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
            step = self._step
            if step is None or not step.decode or output[0].shape[2] == 0:
                return None
            number, dtype = self._numbers[layer], output[0].dtype
            device_rows = self.pool.swap_in(number, step.selected[layer].flatten(0, 1).int())
            unread = device_rows < 0
            rows = self.pool.rows(number).view(dtype)[device_rows.clamp(min=0).long()]
            rows = rows.masked_fill(unread.unsqueeze(-1), 0).unsqueeze(1)
            return rows, torch.where(unread, float("-inf"), 0.0).to(dtype)[:, None, None]

        return hook

    def _hide(self, layer: int) -> Callable[..., tuple[Tensor, Tensor] | None]:
        def hook(
            module: nn.Module, args: Any, output: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, Tensor] | None:
            rows, step = output[0], self._step
            if step is None or not step.decode or rows.shape[2] == 0:
                return None
            _, there = step.columns(self.model.config.compress_rates[HEAVILY])
            return rows, torch.where(there, 0.0, float("-inf")).to(rows.dtype)[:, None, None]

        return hook
