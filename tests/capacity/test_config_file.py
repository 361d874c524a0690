"""config.json files: what is read, and one line for each that cannot be."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from hisparse_sgl.capacity.builtin import BUILT_IN
from hisparse_sgl.capacity.command import load_model
from hisparse_sgl.capacity.config_file import MAX_CONFIG_BYTES, model_shape, read_config

GLM: dict[str, Any] = BUILT_IN["glm-5"].config
V4: dict[str, Any] = BUILT_IN["deepseek-v4-flash"].config


def shape(config: dict[str, Any]) -> Any:
    return model_shape(config, "test", "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "model_type is None: known are glm_moe_dsa, deepseek_v32, deepseek_v4"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"model_type": "glm5_next"}, "model_type is 'glm5_next'"),
        ({"model_type": 7}, "model_type is 7: it must be a string"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "78"}, "num_hidden_layers is '78': it must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 78.0}, "num_hidden_layers is 78.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000: the limit is 1024"),
        ({"num_hidden_layers": 10**60}, "num_hidden_layers is a very large number"),
        ({"index_topk": -1}, "index_topk is -1"),
        ({"index_head_dim": 100}, "index_head_dim is 100: it must be a multiple of 128"),
        ({"kv_lora_rank": 500}, "kv_lora_rank is 500: it must be a multiple of 128"),
        ({"qk_rope_head_dim": 4}, "qk_rope_head_dim is 4: it must be a multiple of 8"),
        ({"index_topk_pattern": "FS"}, "index_topk_pattern is 'FS': it must hold an entry for each of 78"),
        ({"index_topk_pattern": "S" * 78}, "index_topk_pattern starts with a shared layer"),
        ({"index_topk_pattern": "FX" * 39}, "index_topk_pattern has 'X'"),
        ({"indexer_types": [[]] * 78}, "indexer_types has []"),
        ({"indexer_types": {}}, "indexer_types is {}"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0"),
        ({"q_lora_rank": []}, "q_lora_rank is []"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        shape({**GLM, **change})
    assert f"config.json: {message}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"compress_ratios": [4] * 42},
            "compress_ratios is a list of 42 entries: it must hold an entry for each of 43",
        ),
        ({"compress_ratios": [0, 2] * 30}, "compress_ratios has 2: a layer has 0, 4 or 128"),
        ({"compress_ratios": [128] * 43}, "compress_ratios has no 4"),
        ({"compress_ratios": None}, "layer_types is None"),
        ({"compress_ratios": None, "layer_types": [[]] * 43}, "layer_types has []"),
        ({"head_dim": 256}, "head_dim is 256: the V4 row format is for 512"),
        ({"sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_a_bad_field_of_v4_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        shape({**V4, **change})
    assert f"config.json: {message}" in str(error.value)


def test_layer_types_and_compress_ratios_describe_the_same() -> None:
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    types = [kinds[ratio] for ratio in V4["compress_ratios"]]
    assert shape({**V4, "compress_ratios": None, "layer_types": types}) == shape(V4)


def test_indexer_types_come_before_pattern_and_frequency() -> None:
    types = ["full", "shared", "full", "shared", "shared", "shared"]
    small = {**GLM, "num_hidden_layers": 6, "index_topk_freq": 2}
    leaders = [group.leader for group in shape({**small, "index_topk_pattern": "FFFFFF"}).index_groups]
    assert leaders == [0, 1, 2, 3, 4, 5]
    given = shape({**small, "index_topk_pattern": "FFFFFF", "indexer_types": types}).index_groups
    assert [(group.leader, group.followers) for group in given] == [(0, (1,)), (2, (3, 4, 5))]


def test_weights_need_a_count_and_a_dtype() -> None:
    with pytest.raises(ValueError, match="cannot be counted from its config: give --weights-gib"):
        shape({**GLM, "vocab_size": None}).weight_bytes("fp8")
    strange = {**GLM, "quantization_config": {"quant_method": "modelopt"}}
    with pytest.raises(ValueError, match="names no weight dtype"):
        shape(strange).weight_bytes(None)
    assert shape(strange).weight_bytes("bf16") == 2 * shape(GLM).parameters
    with pytest.raises(ValueError, match="cannot be counted"):
        shape(V4).weight_bytes("fp4")


def test_path_folder_and_name_give_the_same_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GLM))
    assert load_model(str(file)) == load_model(str(tmp_path))
    assert load_model(str(file)).index_groups == load_model("GLM-5").index_groups
    assert load_model("deepseek-v4") == load_model("DeepSeek-V4-Pro")


def test_a_huge_file_is_refused_without_being_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(1 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=f"1073741824 bytes, a config.json has at most {MAX_CONFIG_BYTES}"):
        read_config(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1 is not JSON text"),
        (b'{\n"a": 1,\n', "line 3 is not JSON text"),
        (b"\xff\xfe{}", "it is not JSON text"),
        (b"[" * 100_000, "it is not JSON text"),
        (b"[1, 2]", "holds [1, 2]: a config.json is one JSON object"),
    ],
)
def test_a_file_without_a_json_object_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_config(file)
    assert f"{file}: {message}" in str(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_config(tmp_path)
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="not a plain file"):
        read_config(pipe)
    with pytest.raises(ValueError, match=r"no file and no built-in model; .* glm-5\.3"):
        load_model("glm-9")
    for name in ("a" * 300, "a" * 300 + ".json"):
        with pytest.raises(ValueError, match=r"no built-in model|File name too long"):
            load_model(name)
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    with pytest.raises(ValueError, match="Too many levels of symbolic links"):
        load_model(str(loop))


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(GLM).encode())
    assert read_config(file) == GLM
