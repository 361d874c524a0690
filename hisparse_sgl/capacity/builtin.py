"""Models known by name: the fields of their public config.json and where they come from.

Each entry is read like a config.json of a user. ``source_url`` is the published config, ``retrieved`` the day
on which the catalogue of kvcache-simulator 0.1.3 took these fields from it. Sizes that only count parameters
are those of transformers 5.19. ``weights_note`` says what the number of parameters is checked against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hisparse_sgl.capacity.config_file import model_shape
from hisparse_sgl.capacity.model import ModelShape

_GLM_5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "max_position_embeddings": 202752,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "q_lora_rank": 2048,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "dtype": "bfloat16",
}
_FP8 = {"quantization_config": {"quant_method": "fp8"}}
_DEEPSEEK_V32: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "max_position_embeddings": 163840,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    **_FP8,
}
_DEEPSEEK_V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "max_position_embeddings": 1048576,
    "head_dim": 512,
    "sliding_window": 128,
    "index_head_dim": 128,
}


@dataclass(frozen=True)
class BuiltIn:
    """One entry. ``parameters`` and ``weights_dtype`` are given where the config does not tell them."""

    label: str
    config: dict[str, Any]
    source_url: str
    retrieved: str
    weights_note: str
    parameters: int | None = None
    weights_dtype: str | None = None

    def shape(self, name: str) -> ModelShape:
        shape = model_shape(self.config, name, f"built-in model {name}")
        return replace(
            shape,
            parameters=self.parameters or shape.parameters,
            weights_dtype=self.weights_dtype or shape.weights_dtype,
        )


BUILT_IN: dict[str, BuiltIn] = {
    "glm-5": BuiltIn(
        label="GLM-5",
        config=_GLM_5,
        source_url="https://huggingface.co/zai-org/GLM-5/raw/main/config.json",
        retrieved="2026-05-20",
        weights_note="the technical report gives 744 B, counted here 743.9 B; GLM-5-FP8: --weights-dtype fp8",
    ),
    "glm-5.3": BuiltIn(
        label="GLM-5.3",
        config={
            **_GLM_5,
            "max_position_embeddings": 1048576,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
            **_FP8,
        },
        source_url="https://huggingface.co/zai-org/GLM-5.3/raw/main/config.json",
        retrieved="2026-09-14",
        weights_note="counted 743.4 B; model cards give about 753 B with the MTP layer",
    ),
    "deepseek-v3.2": BuiltIn(
        label="DeepSeek-V3.2",
        config=_DEEPSEEK_V32,
        source_url="https://huggingface.co/deepseek-ai/DeepSeek-V3.2/raw/main/config.json",
        retrieved="2026-05-20",
        weights_note="the DeepSeek-V3 report gives 671 B without indexers, counted here 671.9 B with them",
    ),
    "deepseek-v4-flash": BuiltIn(
        label="DeepSeek-V4-Flash (0731)",
        config={
            **_DEEPSEEK_V4,
            "num_hidden_layers": 43,
            "index_topk": 512,
            "compress_ratios": [0, 0, *[4, 128] * 20, 4],
        },
        source_url="https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash-0731/raw/main/config.json",
        retrieved="2026-09-14",
        weights_note="an estimate, better --weights-gib: the card gives 284 B, experts in FP4, the rest FP8",
        parameters=284 * 10**9,
        weights_dtype="fp4",
    ),
    "deepseek-v4-pro": BuiltIn(
        label="DeepSeek-V4-Pro (0813)",
        config={
            **_DEEPSEEK_V4,
            "num_hidden_layers": 61,
            "index_topk": 1024,
            "compress_ratios": [128, 128, *[4, 128] * 29, 4],
        },
        source_url="https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro-0813/raw/main/config.json",
        retrieved="2026-09-14",
        weights_note="an estimate, better --weights-gib: the card gives 1.6 T, experts in FP4, the rest FP8",
        parameters=1600 * 10**9,
        weights_dtype="fp4",
    ),
}
ALIASES = {"deepseek-v4": "deepseek-v4-pro"}
"""The series alone means its larger model: a plan for it errs on the safe side."""


def find_built_in(name: str) -> str | None:
    """The key of a built-in model, whatever the case of ``name``; None if there is none."""
    key = name.lower()
    key = ALIASES.get(key, key)
    return key if key in BUILT_IN else None
