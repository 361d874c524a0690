"""Serve a small GLM-5 shaped model with random weights through SGLang's engine, HiSparse and radix cache on.

Conversations of two turns share a system prompt. Their second turns find the first ones in the cache, though
the device pool cannot hold them all. Needs SGLang, this package and one NVIDIA GPU; downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

TOP_K = 2048
VOCABULARY = 8192
CONTEXT = 65536
SHARED_TOKENS = 4096
TURN_TOKENS = 6000
ANSWER_TOKENS = 32

LAYERS = 6
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "mlp_layer_types": ["dense"] * LAYERS,
    "first_k_dense_replace": LAYERS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": TOP_K,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk_pattern": "FFSSFS",  # F runs the indexer, S reuses the top-k of the layer before
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def write_checkpoint(folder: Path) -> None:
    """A model with the attention shapes that the Hopper kernels need, and everything else small: 0.6 GB.

    Weights are normal with deviation 1 / sqrt(inputs), so that an answer depends on every key: SGLang's own
    dummy weights give two tokens in turn, whatever the cache holds.
    """
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    model: Any = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**MODEL))
    model.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    path = folder / "config.json"
    # SGLang reads these from published configs; transformers does not write them.
    extra = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}
    extra |= {"num_nextn_predict_layers": 0, "index_topk_pattern": MODEL["index_topk_pattern"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | extra))


def engine_settings(model: str, device_tokens: int) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``. The only one that this package needs is ``enable_hisparse``."""
    return {
        "model_path": model,
        "skip_tokenizer_init": True,
        "context_length": CONTEXT,
        "max_running_requests": 8,
        "chunked_prefill_size": 8192,
        "max_total_tokens": device_tokens,
        "mem_fraction_static": 0.5,
        "enable_hisparse": True,
        "hisparse_config": json.dumps({"host_to_device_ratio": 4, "audit_every": 16}),
    }


def converse(engine: Any, source: Random, conversations: int) -> list[tuple[int, int]]:
    """Prompt tokens and cached tokens of each conversation's second turn."""

    def tokens(count: int) -> list[int]:
        return [source.randrange(2, VOCABULARY) for _ in range(count)]

    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    shared = tokens(SHARED_TOKENS)
    prompts = [shared + tokens(TURN_TOKENS) for _ in range(conversations)]
    first = engine.generate(input_ids=prompts, sampling_params=sampling)
    prompts = [p + answer["output_ids"] + tokens(200) for p, answer in zip(prompts, first, strict=True)]
    second = engine.generate(input_ids=prompts, sampling_params=sampling)
    cached = [answer["meta_info"]["cached_tokens"] for answer in second]
    return list(zip(map(len, prompts), cached, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a DSA model to serve instead")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--device-tokens", type=int, default=16384, help="size of the device pool")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("sglang_offline.py needs an NVIDIA GPU: torch sees none", file=sys.stderr)
        return 2
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            write_checkpoint(Path(folder))
        engine = sglang.Engine(**engine_settings(options.model or folder, options.device_tokens))
        try:
            start = time.perf_counter()
            turns = converse(engine, Random(0), options.conversations)
            seconds = time.perf_counter() - start
        finally:
            engine.shutdown()
    for prompt, cached in turns:
        print(f"second turn: {prompt} prompt tokens, {cached} of them cached")
    print(
        f"{len(turns)} conversations of two turns in {seconds:.1f} s, {options.device_tokens} device tokens"
    )
    return 0 if all(cached >= SHARED_TOKENS for _, cached in turns) else 1


if __name__ == "__main__":
    sys.exit(main())
