"""A Hugging Face config.json, from a file or from a built-in entry, as a ``ModelShape``."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hisparse_sgl.capacity.fields import Fields, shorten
from hisparse_sgl.capacity.model import QUANT_BLOCK, ModelShape
from hisparse_sgl.capacity.parameters import count_parameters
from hisparse_sgl.mem_pool.layout import IndexGroup, group_layers

MAX_CONFIG_BYTES = 1 << 20
MAX_LAYERS = 1024
DSA_TYPES = ("glm_moe_dsa", "deepseek_v32")
V4_TYPE = "deepseek_v4"
V4_HEAD_DIM = 512
V4_ROPE_DIM = 64
V4_RATIOS = (0, 4, 128)
V4_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
FULL_MARKS = ("full", "F")
SHARED_MARKS = ("shared", "S")
DTYPES = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a config.json, or in the one inside a directory.

    Raises:
        ValueError: no such file, not a plain file, more than 1 MiB (never read), not a JSON object.
    """
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{file}: not a plain file: give the path of a config.json")
        if found.st_size > MAX_CONFIG_BYTES:
            raise ValueError(
                f"{file}: {found.st_size} bytes, a config.json has at most {MAX_CONFIG_BYTES}: "
                "give the config.json, not the weights"
            )
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES)
    except OSError as error:
        raise ValueError(
            f"{file}: {error.strerror}: give the path of a config.json or a built-in name"
        ) from None
    try:
        values = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "it"
        raise ValueError(f"{file}: {where} is not JSON text: give the config.json of a model") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: holds {shorten(values)}: a config.json is one JSON object")
    return values


def model_shape(values: Mapping[str, Any], name: str, place: str) -> ModelShape:
    """The shape that a config describes. ``ValueError`` names ``place``, the field and the fix."""
    fields = Fields(values, place)
    model_type = fields.text("model_type")
    if model_type in DSA_TYPES:
        return _dsa(fields, name, model_type)
    if model_type == V4_TYPE:
        return _v4(fields, name)
    raise fields.error(
        "model_type",
        f"is {shorten(model_type)}",
        f"known are {', '.join((*DSA_TYPES, V4_TYPE))}: other models have no indexer that HiSparse can use",
    )


def _dsa(fields: Fields, name: str, model_type: str) -> ModelShape:
    layers = _num_layers(fields)
    full = _full_layers(fields, layers)
    kv_lora_rank = fields.number("kv_lora_rank")
    if kv_lora_rank % QUANT_BLOCK:
        raise fields.error("kv_lora_rank", f"is {kv_lora_rank}", f"it must be a multiple of {QUANT_BLOCK}")
    rope_dim = fields.number("qk_rope_head_dim")
    if rope_dim % 8:
        raise fields.error("qk_rope_head_dim", f"is {rope_dim}", "it must be a multiple of 8")
    return ModelShape(
        name=name,
        model_type=model_type,
        max_context=fields.number("max_position_embeddings"),
        top_k=fields.number("index_topk"),
        num_layers=layers,
        index_groups=group_layers(full),
        index_head_dim=_index_head_dim(fields),
        kv_lora_rank=kv_lora_rank,
        rope_dim=rope_dim,
        num_heads=fields.number("num_attention_heads"),
        parameters=count_parameters(fields, layers, sum(full)),
        weights_dtype=_weights_dtype(fields),
    )


def _v4(fields: Fields, name: str) -> ModelShape:
    layers = _num_layers(fields)
    ratios = _compress_ratios(fields, layers)
    c4 = ratios.count(4)
    if not c4:
        raise fields.error("compress_ratios", "has no 4", "HiSparse keeps the rows of C4 layers on the host")
    for field, found, wanted in (
        ("head_dim", fields.number("head_dim", V4_HEAD_DIM), V4_HEAD_DIM),
        ("qk_rope_head_dim", fields.number("qk_rope_head_dim", V4_ROPE_DIM), V4_ROPE_DIM),
    ):
        if found != wanted:
            raise fields.error(field, f"is {found}", f"the V4 row format is for {wanted}")
    return ModelShape(
        name=name,
        model_type=V4_TYPE,
        max_context=fields.number("max_position_embeddings"),
        top_k=fields.number("index_topk"),
        num_layers=c4,
        index_groups=tuple(IndexGroup(layer) for layer in range(c4)),
        index_head_dim=_index_head_dim(fields),
        num_heads=fields.number("num_attention_heads") if fields.has("num_attention_heads") else None,
        tokens_per_row=4,
        c128_layers=ratios.count(128),
        window=fields.number("sliding_window"),
        window_layers=layers,
        weights_dtype=None,
    )


def _num_layers(fields: Fields) -> int:
    layers = fields.number("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise fields.error("num_hidden_layers", f"is {layers}", f"the limit is {MAX_LAYERS}")
    return layers


def _index_head_dim(fields: Fields) -> int:
    width = fields.number("index_head_dim")
    if width % QUANT_BLOCK:
        raise fields.error("index_head_dim", f"is {width}", f"it must be a multiple of {QUANT_BLOCK}")
    return width


def _full_layers(fields: Fields, layers: int) -> list[bool]:
    """Which layers run the indexer. The order of the fields is that of SGLang's ``dsa_layer_skips_topk``."""
    for field in ("indexer_types", "index_topk_pattern"):
        if not fields.has(field):
            continue
        marks = fields.items(field, layers)
        strange = [mark for mark in marks if mark not in FULL_MARKS + SHARED_MARKS]
        if strange:
            raise fields.error(field, f"has {shorten(strange[0])}", "an entry is full (F) or shared (S)")
        full = [mark in FULL_MARKS for mark in marks]
        if not full[0]:
            raise fields.error(field, "starts with a shared layer", "layer 0 has no earlier top-k to reuse")
        return full
    every = fields.number("index_topk_freq", 1)
    offset = fields.number("index_skip_topk_offset", 2)
    return [max(layer - offset + 1, 0) % every == 0 for layer in range(layers)]


def _compress_ratios(fields: Fields, layers: int) -> list[int]:
    if fields.has("compress_ratios"):
        ratios = fields.items("compress_ratios", layers)
        strange = [ratio for ratio in ratios if isinstance(ratio, bool) or ratio not in V4_RATIOS]
        if strange:
            raise fields.error("compress_ratios", f"has {shorten(strange[0])}", "a layer has 0, 4 or 128")
        return ratios
    kinds = fields.items("layer_types", layers)
    strange = [kind for kind in kinds if kind not in tuple(V4_LAYER_TYPES)]
    if strange:
        raise fields.error("layer_types", f"has {shorten(strange[0])}", f"use {', '.join(V4_LAYER_TYPES)}")
    return [V4_LAYER_TYPES[kind] for kind in kinds]


def _weights_dtype(fields: Fields) -> str | None:
    quantization = fields.values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        return "fp8" if method == "fp8" else None
    name = fields.text("dtype") or fields.text("torch_dtype")
    return DTYPES.get(name) if name else None
