"""Small random models, and their unmodified greedy run. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from conversations import LARGEST_CONTEXT
from options import TOP_K, V4
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    DeepseekV32Config,
    DynamicCache,
    GlmMoeDsaConfig,
    PreTrainedModel,
)

# 16 index heads or more: with fewer, the relu of the indexer often makes scores that tie exactly at the top-k
# boundary.
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": TOP_K,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": LARGEST_CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
}


def glm_config() -> GlmMoeDsaConfig:
    """Six layers in which three indexers serve three more layers (IndexShare, FFSSFS)."""
    types = ["full", "full", "shared", "shared", "full", "shared"]
    return GlmMoeDsaConfig(num_hidden_layers=len(types), indexer_types=types, **_SIZES)


def deepseek_config() -> DeepseekV32Config:
    """Four layers, each with an indexer of its own, and YaRN positions like the released model."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": LARGEST_CONTEXT // 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return DeepseekV32Config(num_hidden_layers=4, rope_parameters=yarn, **_SIZES)


def deepseek_v4_config() -> DeepseekV4Config:
    """Five layers: one that sees the sliding window only, two of C4, two of C128, with the released rates."""
    c4, c128 = "compressed_sparse_attention", "heavily_compressed_attention"
    types = ["sliding_attention", c4, c128, c4, c128]
    return DeepseekV4Config(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(types),
        layer_types=types,
        num_attention_heads=4,
        head_dim=32,
        partial_rotary_factor=8 / 32,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=["hash_moe", "moe", "moe", "moe", "moe"],
        hc_mult=2,
        hc_sinkhorn_iters=4,
        index_topk=TOP_K,
        index_head_dim=16,
        index_n_heads=16,
        max_position_embeddings=V4.context,
        bos_token_id=None,
        eos_token_id=None,
    )


def build(config: Any, dtype: torch.dtype, seed: int, device: str = "cpu") -> PreTrainedModel:
    """Builds a model with weights of standard deviation 1/sqrt(fan_in): the default 0.02 gives flat logits.

    Two calls with one seed give equal weights, and configs of their own. Grouped experts have no float64
    kernel on a CPU, so the experts are eager.
    """
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        # V4 starts with attention sinks and bases of its residual streams that are all zero.
        if parameter.dim() > 1 or name.endswith(("sinks", "base")):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = noise / parameter.shape[-1] ** 0.5
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # V4: the experts of each token
            table.random_(config.n_routed_experts, generator=generator)
    nn.init.normal_(model.get_input_embeddings().weight, generator=generator)
    # transformers keeps some modules in float32 whatever dtype says.
    return model.to(device=device, dtype=dtype).eval()


class Float64(TorchFunctionMode):
    """Turns every request for float32 into float64.

    The models hard-code float32 in the indexer, the router, the softmax and the norms. Its rounding flips
    near ties of the top-k now and then, so tokens can only be proven equal when all of the computation is in
    float64.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = [torch.float64 if value is torch.float32 else value for value in args]
        named = {
            name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()
        }
        return func(*widened, **named)


def precision(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """The mode in which both runs of a comparison compute."""
    return Float64() if dtype == torch.float64 else contextlib.nullcontext()


@torch.no_grad()
def generate_alone(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens of an unmodified model that runs one request with the cache of transformers."""
    parameters = inspect.signature(model.forward).parameters
    cache = {"cache" if "cache" in parameters else "past_key_values": DynamicCache(config=model.config)}
    tokens: list[int] = []
    new: Sequence[int] = prompt
    while len(tokens) < num_tokens:
        inputs = torch.tensor([list(new)], device=model.device)
        logits: Tensor = model(input_ids=inputs, use_cache=True, logits_to_keep=1, **cache).logits
        new = [int(logits[0, -1].argmax())]
        tokens += new
    return tokens
