"""Runs Hugging Face DSA models (`glm_moe_dsa`, `deepseek_v32`) on a `HiSparsePool`.

No model code is copied or replaced. Three public seams of transformers carry the whole integration:

1. `PoolCache` stands where the model expects its cache. It stores indexer rows in the pool and passes latents
   through.
2. `sparse_attention` is registered as the attention implementation "hisparse". It writes the new rows and
   attends over the rows that the pool returns for the top-k of the indexer.
3. A forward pre-hook on `kv_b_proj` picks up the normed latent, the part of a row that all heads share.

One row is `[latent | rotated key]` of a token in a layer, in the dtype of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout, group_layers
from hisparse_sgl.requests import Admission

if TYPE_CHECKING:
    from hisparse_sgl.pool import HiSparsePool

IMPLEMENTATION = "hisparse"


def index_groups(config: Any) -> tuple[IndexGroup, ...]:
    """Groups the layers of a model config by the indexer they use.

    A "full" entry of `config.indexer_types` starts a group and the "shared" entries after it follow. A config
    without that field runs an indexer in each layer.

    Raises:
        ValueError: the config is not one of a DSA model, or its first layer has no indexer to share.
    """
    missing = [name for name in ("index_topk", "kv_lora_rank") if getattr(config, name, None) is None]
    if missing:
        raise ValueError(
            f"model_type is {getattr(config, 'model_type', None)!r}, without {' and '.join(missing)} in its "
            "config; use a DSA model: glm_moe_dsa or deepseek_v32"
        )
    types = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    if types[0] != "full":
        raise ValueError(
            f"indexer_types[0] is {types[0]!r}, but layer 0 has no earlier indexer to share; use 'full'"
        )
    return group_layers([kind == "full" for kind in types])


def layout_of(config: Any, dtype: torch.dtype, page_size: int = 64) -> KVLayout:
    """Derives the layout of a DSA model: rows of `kv_lora_rank + qk_rope_head_dim` values, indexer rows of
    `index_head_dim` values, both of `dtype`.

    Raises:
        ValueError: the config is not one of a DSA model, or the layout refuses a size.
    """
    return KVLayout.single(
        num_layers=config.num_hidden_layers,
        row_parts=((config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize,),
        page_size=page_size,
        index_groups=index_groups(config),
        index_row_bytes=config.index_head_dim * dtype.itemsize,
    )


@dataclass
class Step:
    """What one forward knows of its batch: B requests, S new tokens each, T tokens in the longest context.

    `positions` int64 [B, S] and `slots` int32 [B * S] belong to the new tokens. `columns` int64 [B, T] holds
    the slot of every position; past the end of a request it holds null slots, which `visible` (causal, bool
    [B, 1, S, T]) hides. `decode` is true for a batch that reads through `swap_in`, false for a prefill chunk,
    whose pages are all resident.
    """

    pool: HiSparsePool
    positions: Tensor
    slots: Tensor
    columns: Tensor
    visible: Tensor
    leaders: dict[int, int]
    top_k: int
    decode: bool
    latents: dict[int, Tensor] = field(default_factory=dict)
    device_rows: dict[int, Tensor] = field(default_factory=dict)

    def select(self, layer: int, indices: Tensor) -> Tensor:
        """Turns columns picked by an indexer, int32 [B, S, k], into device rows, int32 [B, S, top_k].

        A column that lies after its query becomes -1. The leader of an index group asks the pool; its
        followers reuse the answer.
        """
        leader = self.leaders[layer]
        if layer == leader:
            seen = torch.where(indices <= self.positions.unsqueeze(-1), indices, -1)
            seen = nn.functional.pad(seen, (0, self.top_k - seen.shape[-1]), value=-1).to(torch.int32)
            positions = seen.flatten(0, 1)
            rows = self.pool.swap_in(leader, positions) if self.decode else self._translate(positions)
            self.device_rows[leader] = rows.view(seen.shape)
        return self.device_rows[leader]

    def _translate(self, positions: Tensor) -> Tensor:
        slots = self.columns[0, positions.clamp(min=0).long()].to(torch.int32)
        return torch.where(positions < 0, -1, self.pool.translate(slots))


class PoolCache(Cache):
    """The cache object of one forward. It holds no rows: they live in the pool of its `Step`."""

    def __init__(self, step: Step) -> None:
        super().__init__(layers=[])
        self.step = step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Passes the new tokens through: `sparse_attention` stores them and reads the earlier ones."""
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Stores the indexer rows [B, S, D] of the new tokens and returns those of all columns, [B, T, D]."""
        step = self.step
        step.pool.write_index(layer_idx, step.slots, indexer_key_states.flatten(0, 1))
        rows = step.pool.index_rows(layer_idx).view(indexer_key_states.dtype)[step.columns]
        # Null slots hold anything, and a NaN would survive an additive mask.
        return rows.masked_fill(~step.visible[:, 0, -1, :, None], 0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest context before this forward, in tokens."""
        return self.step.columns.shape[1] - self.step.positions.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first new token of the longest request."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of columns and the position of the first one."""
        return self.step.columns.shape[1], 0


def sparse_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    indices: Tensor,
    hisparse: Step,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Absorbed MLA over the pool rows that `indices` selects.

    The weight of `kv_b_proj` is applied to the query and to the output, so the rows are read as they lie.
    Source of the absorption: DeepSeek-V2, arXiv 2405.04434, section 2.1.

    Args:
        module: the attention layer, with its `kv_b_proj` and head sizes.
        query: rotated, [B, heads, S, nope + rope].
        key: keys of the new tokens only, [B, heads, S, nope + rope]. Their rope part goes into the rows.
        value: not used, the latent stands for it.
        attention_mask: not used, `indices` and the positions of the step say what is visible.
        scaling: factor of the scores.
        indices: columns chosen by the indexer, int32 [B, S, k].
        hisparse: the step, whose pool receives the new rows.

    Returns:
        Output [B, S, heads, v_head_dim] in the dtype of the query, and None in place of the weights.
    """
    layer: int = module.layer_idx
    nope: int = module.qk_nope_head_dim
    rank: int = module.kv_lora_rank
    batch, heads, num_new, _ = query.shape
    latent = hisparse.latents.pop(layer).reshape(batch, num_new, rank)
    new_rows = torch.cat((latent, key[:, 0, :, nope:]), dim=-1)
    hisparse.pool.write(layer, hisparse.slots, new_rows.flatten(0, 1))

    device_rows = hisparse.select(layer, indices)
    unread = device_rows < 0
    rows = hisparse.pool.rows(layer).view(query.dtype)[device_rows.clamp(min=0).long()]
    rows = rows.masked_fill(unread.unsqueeze(-1), 0)  # [B, S, top_k, rank + rope]

    w_k, w_v = module.kv_b_proj.weight.view(heads, -1, rank).split([nope, module.v_head_dim], dim=1)
    absorbed = torch.einsum("bhsn,hnr->bhsr", query[..., :nope], w_k)
    scores = torch.einsum("bhsd,bskd->bhsk", torch.cat((absorbed, query[..., nope:]), dim=-1), rows)
    scores = (scores * scaling).masked_fill(unread.unsqueeze(1), float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.einsum("bhsk,bskr->bhsr", weights, rows[..., :rank])
    return torch.einsum("bhsr,hvr->bshv", mixed, w_v), None


AttentionInterface.register(IMPLEMENTATION, sparse_attention)


def check_pool(pool: HiSparsePool, model: PreTrainedModel, needed: KVLayout) -> None:
    """Raise ``ValueError`` unless the pool has the layout and the top-k of the model."""
    if pool.layout != needed:
        raise ValueError(
            f"layout of the pool is {pool.layout}, but the model needs {needed}; "
            "build it with layout_of(model.config, model.dtype, page_size)"
        )
    if pool.config.top_k != model.config.index_topk:
        raise ValueError(
            f"top_k of the pool is {pool.config.top_k}, but the model selects "
            f"index_topk={model.config.index_topk} rows a query; give both the same value"
        )


class PooledModel:
    """A Hugging Face DSA model whose rows live in a `HiSparsePool`.

    The caller schedules: it admits requests, asks `pool.extend` for the slots of the new tokens and calls
    `prefill` or `decode` with them. The model is changed: its attention implementation becomes "hisparse" and
    its `kv_b_proj` layers get a hook, until `close`. Keep a second copy for runs without the pool.

    Raises:
        ValueError: the model is not a DSA model, or its layers or top-k differ from those of the pool.
    """

    def __init__(self, model: PreTrainedModel, pool: HiSparsePool) -> None:
        check_pool(pool, model, layout_of(model.config, model.dtype, pool.layout.page_size))
        self.model = model
        self.pool = pool
        self.leaders = {layer: group.leader for group in index_groups(model.config) for layer in group.layers}
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._step: Step | None = None
        self._implementation = model.config._attn_implementation or "eager"
        model.set_attn_implementation(IMPLEMENTATION)
        layers: list[Any] = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
        self._hooks = [
            layer.kv_b_proj.register_forward_pre_hook(self._keep_latent(layer.layer_idx)) for layer in layers
        ]

    def start(self, rid: str, admission: Admission) -> None:
        """Takes up a request that was admitted. There is nothing to do: all it has lies in the pool."""

    def stop(self, rid: str) -> None:
        """Forgets a request that has ended. There is nothing to do."""

    def prefill(self, rid: str, start: int, token_ids: Sequence[int], slots: Tensor) -> Tensor:
        """Computes the positions `start..start + n - 1` of one request. Everything before them is in the
        pool.

        Args:
            rid: an admitted request.
            start: number of its tokens that are already computed or cached.
            token_ids: the n tokens.
            slots: what `pool.extend(rid, n)` returned, int32 [n].

        Returns:
            Logits after the last token, [vocab].
        """
        return self._run([rid], [start], [token_ids], slots, decode=False)[0]

    def decode(
        self, rids: Sequence[str], starts: Sequence[int], token_ids: Sequence[int], slots: Tensor
    ) -> Tensor:
        """Computes one token of each request, at position `starts[i]`. Contexts may differ in length.

        Args:
            rids: B running requests.
            starts: context length of each before this token.
            token_ids: the B tokens.
            slots: one slot of `pool.extend(rid, 1)` for each, int32 [B].

        Returns:
            Logits, [B, vocab].
        """
        return self._run(rids, starts, [[token] for token in token_ids], slots, decode=True)

    def close(self) -> None:
        """Gives the model its former attention implementation back and removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.model.set_attn_implementation(self._implementation)

    @torch.no_grad()
    def _run(
        self,
        rids: Sequence[str],
        starts: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        slots: Tensor,
        decode: bool,
    ) -> Tensor:
        device = self.model.device
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=device)
        offsets = torch.arange(tokens.shape[1], device=device)
        positions = torch.tensor(starts, dtype=torch.int64, device=device).unsqueeze(1) + offsets
        self.pool.begin_step(rids)
        step = self._step = self._describe(rids, positions, max(starts) + tokens.shape[1], slots, decode)
        try:
            output = self.model(
                input_ids=tokens,
                attention_mask=step.visible,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                hisparse=step,
                **{self._cache_name: PoolCache(step)},
            )
        finally:
            self._step = None
        self.pool.step_done()
        return output.logits[:, -1]

    def _describe(
        self, rids: Sequence[str], positions: Tensor, num_columns: int, slots: Tensor, decode: bool
    ) -> Step:
        page_size = self.pool.layout.page_size
        column = torch.arange(num_columns, device=positions.device)
        pages = self.pool.page_table(rids)[:, column // page_size].long()
        return Step(
            pool=self.pool,
            positions=positions,
            slots=slots,
            columns=pages * page_size + column % page_size,
            visible=column <= positions[:, None, :, None],
            leaders=self.leaders,
            top_k=self.pool.config.top_k,
            decode=decode,
        )

    def _keep_latent(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._step is not None:
                self._step.latents[layer] = args[0]

        return hook
