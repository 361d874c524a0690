"""The checkpoints of the engine benchmark, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.17")

from benchmarks.engine.checkpoints import CHECKPOINTS, EXTRA, write_checkpoint

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_has_what_sglang_reads_and_the_same_weights_each_time(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        write_checkpoint(name, folder, **SMALL)
    config = json.loads((folders[0] / "config.json").read_text())
    assert config["num_hidden_layers"] == 6 and config["index_topk"] == 2048
    assert {key: config[key] for key in EXTRA} == EXTRA
    assert config.get("index_topk_pattern") == ("FFSSFS" if name == "glm" else None)
    one, two = (load_file(folder / "model.safetensors") for folder in folders)
    assert one.keys() == two.keys() and all(one[key].equal(two[key]) for key in one)
    assert any("indexer" in key for key in one)
    weight = next(value for key, value in one.items() if key.endswith("o_proj.weight"))
    assert 0.7 < float(weight.float().std()) * weight.shape[-1] ** 0.5 < 1.3
