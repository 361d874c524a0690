"""SGLang's resolution and validation of server settings for small models, on a machine without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs

_DSA = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_topk": 2048,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**_DSA, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "glm": {**_DSA, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"},
    "deepseek_v4": {
        **_DSA,
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "head_dim": 512,
        "compress_ratios": [0, 4, 128, 4],
        "sliding_window": 128,
    },
    "minimax_m3": {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": {
            **_DSA,
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "model_type": "mixtral",
            "head_dim": 128,
            "sparse_attention_config": {"sparse_topk_blocks": 16, "sparse_block_size": 128},
        },
        "vision_config": {"hidden_size": 64},
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 1024,
        "torch_dtype": "bfloat16",
    },
}


def write_model(folder: Path, name: str, **extra: Any) -> str:
    """A folder with the config of a model, and nothing else."""
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**MODELS[name], **extra}))
    return str(path)


def validate(model_path: str, **flags: Any) -> Any:
    """Resolved settings of a server; raises what SGLang, or a plugin in it, has against them."""
    flags = {"model_path": model_path, "device": "cuda", "skip_tokenizer_init": True, **flags}
    with hopper():
        server_args = ServerArgs(**flags)
        server_args.resolve_once()
        server_args.check_server_args()
    return resolving_view(server_args)


@contextmanager
def hopper() -> Iterator[None]:
    """What resolution asks of a GPU, answered as by an H200."""
    with patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        yield
