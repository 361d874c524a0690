"""Small checkpoints with random weights that SGLang loads: attention of full size, all else small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS = 6
SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,  # no layer has experts
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "max_position_embeddings": 131072,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
HEADS = {
    "glm": {"num_attention_heads": 64, "num_key_value_heads": 64, "qk_nope_head_dim": 192, "v_head_dim": 256},
    "v32": {
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
GLM = SHAPE | HEADS["glm"] | {"index_n_heads": 32, "mlp_layer_types": ["dense"] * LAYERS}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("GlmMoeDsa", GLM | {"index_topk_pattern": "FFSSFS"}),
    "glm_full": ("GlmMoeDsa", GLM),
    "deepseek_v32": (
        "DeepseekV32",
        SHAPE | HEADS["v32"] | {"index_n_heads": 64, "n_group": 1, "topk_group": 1},
    ),
}
"""Classes of transformers and their fields. ``glm`` has indexers in layers F, layers S share them."""

EXTRA = {
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "ep_size": 1,
}
"""What SGLang reads from published configurations and transformers does not write."""


def write_checkpoint(name: str, folder: Path, **other: Any) -> None:
    """Write a checkpoint in bf16, about 0.6 GB.

    Weights are normal with deviation 1 / sqrt(inputs), from a fixed seed: an answer depends on every key,
    which it does not with SGLang's dummy weights.

    Args:
        name: of ``CHECKPOINTS``.
        other: fields in place of those there, for tests.

    Raises:
        ValueError: transformers lacks the model.
    """
    import torch
    import transformers

    family, fields = CHECKPOINTS[name]
    fields = fields | other
    if not hasattr(transformers, f"{family}ForCausalLM"):
        raise ValueError(f"transformers {transformers.__version__} has no {family}ForCausalLM; install 5.19")
    config = getattr(transformers, f"{family}Config")(**fields)
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    path = folder / "config.json"
    pattern = {key: fields[key] for key in ("index_topk_pattern",) if key in fields}
    path.write_text(json.dumps(json.loads(path.read_text()) | EXTRA | pattern, indent=1))
