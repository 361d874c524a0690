"""What a server with ``--enable-hisparse`` may combine, asked of SGLang's own resolution and validation."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import hopper, validate, write_model
from sglang.srt.arg_groups.overrides import record_of
from sglang.srt.runtime_context import get_memory, publish, restore_context, snapshot_context

from hisparse_sgl.integrations.sglang.validation import REFUSALS

pytestmark = pytest.mark.usefixtures("plugin")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path, "glm")


@pytest.mark.parametrize("name", ["glm", "deepseek_v32"])
def test_the_radix_cache_may_stay_on(tmp_path: Path, name: str) -> None:
    settings = validate(write_model(tmp_path, name), enable_hisparse=True)
    assert settings.disable_radix_cache is False
    assert settings.radix_cache_backend == "hisparse"
    assert settings.page_size == 64


@pytest.mark.parametrize(
    "flags",
    [
        {"disable_radix_cache": True},
        {"radix_cache_backend": "hisparse"},
        {"radix_eviction_policy": "slru"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"enable_priority_scheduling": True},
        {"enable_single_batch_overlap": True},
        {"disable_overlap_schedule": True},
        {"cuda_graph_backend_prefill": "breakable"},
        {"cuda_graph_backend_decode": "disabled"},
        {"tp_size": 2, "attn_dp_size": 2},
        {"hisparse_config": '{"host_to_device_ratio": 8, "audit_every": 100}'},
    ],
    ids=lambda flags: ",".join(flags),
)
def test_served_settings_select_our_tree(model: str, flags: dict[str, Any]) -> None:
    assert validate(model, enable_hisparse=True, **flags).radix_cache_backend == "hisparse"


REFUSED = {
    "--speculative-algorithm": {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 2,
    },
    "--disaggregation-mode": {"disaggregation_mode": "decode"},
    "--pp-size": {"pp_size": 2},
    "--enable-prefill-cp": {"tp_size": 2, "enable_prefill_cp": True, "cp_strategy": "zigzag"},
    "--attn-cp-size": {"tp_size": 2, "attn_cp_size": 2},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-flexkv": {"enable_flexkv": True},
    "--enable-unified-cache-external-linker": {"enable_unified_cache_external_linker": True},
    "--radix-cache-backend": {"radix_cache_backend": "flexkv"},
    "--enable-session-radix-cache": {"enable_session_radix_cache": True},
    "--enable-streaming-session": {"enable_streaming_session": True},
    "--enable-two-batch-overlap": {
        "enable_two_batch_overlap": True,
        "tp_size": 2,
        "moe_a2a_backend": "deepep",
    },
    "--cuda-graph-backend-prefill": {"cuda_graph_backend_prefill": "full"},
    "--cuda-graph-backend-decode": {"cuda_graph_backend_decode": "breakable"},
    "--enable-torch-compile": {"enable_torch_compile": True},
    "--enable-pdmux": {"enable_pdmux": True, "chunked_prefill_size": -1, "disable_overlap_schedule": True},
    "--enable-memory-saver": {"enable_memory_saver": True},
    "--kv-canary": {"kv_canary": "log"},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_we_do_not_serve_is_refused_by_name(model: str, flag: str) -> None:
    with pytest.raises(ValueError, match=rf"^{flag} is .*: .+") as caught:
        validate(model, enable_hisparse=True, **REFUSED[flag])
    assert "hisparse_sgl" in str(caught.value)
    validate(model, **{key: value for key, value in REFUSED[flag].items() if key != "radix_cache_backend"})


def test_every_refusal_is_tried() -> None:
    others = {"--page-size", "--moe-a2a-backend", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"}
    assert {refusal.flag for refusal in REFUSALS} == {*REFUSED, *others}


def test_another_page_size_is_refused() -> None:
    """SGLang sets 64 for DSA models on CUDA, whatever is asked for."""
    (refusal,) = (refusal for refusal in REFUSALS if refusal.flag == "--page-size")
    assert refusal.found(SimpleNamespace(page_size=64)) is None
    assert refusal.found(SimpleNamespace(page_size=32)) == 32


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"tp_size": 2, "dcp_size": 2}, "DCP does not support HiSparse"),
        ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
        ({"enable_unified_memory": True}, "page-major"),
        ({"prefill_only_disable_kv_cache": True}, "--prefill-only-disable-kv-cache"),
        ({"enable_dsa_cache_layer_split": True}, "--enable-dsa-cache-layer-split"),
        ({"disaggregation_decode_enable_offload_kvcache": True}, "only supported for decode"),
        ({"disaggregation_decode_retraction_backup": "host_pool"}, "only supported on a PD decode"),
        ({"dllm_algorithm": "LowConfidence"}, "diffusion"),
        ({"dsa_decode_backend": "trtllm"}, "DSA decode backend"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_sglang_refuses_is_left_to_it(model: str, flags: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, AssertionError, RuntimeError), match=message) as caught:
        validate(model, enable_hisparse=True, **flags)
    assert "hisparse_sgl" not in str(caught.value)


@pytest.mark.parametrize("name", ["deepseek_v4", "minimax_m3"])
def test_other_sparse_models_are_refused_by_us(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"--model-path is a .*hisparse_sgl is DSA.*HISPARSE_SGL=0"):
        validate(write_model(tmp_path, name), enable_hisparse=True, disable_radix_cache=True)


def test_dense_models_are_refused_by_sglang(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="only supported for DSA"):
        validate(write_model(tmp_path, "llama"), enable_hisparse=True)


def test_hybrid_and_pooled_models_are_refused(tmp_path: Path) -> None:
    for extra in ({"index_kpool": 4}, {"linear_attn_config": {"kda_layers": [1]}}):
        with pytest.raises(ValueError, match="one index key a token"):
            validate(write_model(tmp_path, "glm", **extra), enable_hisparse=True)


def test_other_devices_are_refused(model: str) -> None:
    with pytest.raises(ValueError, match="--device is cpu"):
        validate(model, enable_hisparse=True, device="cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"topk": 3}', "did you mean 'top_k'"),
        ('{"top_k": 512, "device_buffer_size": 1024}', "index_topk of the model = 2048"),
    ],
)
def test_bad_options_stop_the_start(model: str, config: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(model, enable_hisparse=True, hisparse_config=config)


def test_without_hisparse_nothing_is_chosen_or_refused(model: str) -> None:
    settings = validate(model, enable_hierarchical_cache=True, hisparse_config='{"topk": 3}')
    assert settings.radix_cache_backend is None


def test_the_choice_reaches_the_scheduler_process(model: str) -> None:
    """SGLang pickles the settings to its processes, and each publishes them there."""
    settings = validate(model, enable_hisparse=True)
    context = snapshot_context()
    try:
        publish(pickle.loads(pickle.dumps(record_of(settings))), role="scheduler")
        assert get_memory().radix_cache_backend == "hisparse"
        assert get_memory().disable_radix_cache is False
    finally:
        restore_context(context)


def test_published_settings_can_be_checked_again(model: str) -> None:
    """An engine that restarts validates the settings that it has published."""
    settings = validate(model, enable_hisparse=True)
    context = snapshot_context()
    try:
        publish(record_of(settings), role="tokenizer")
        with hopper():
            record_of(settings).check_server_args()
    finally:
        restore_context(context)


def test_the_check_of_sglang_is_whole_again_afterwards(model: str) -> None:
    """The view that hides the radix cache is gone, also after a refusal."""
    from sglang.srt.arg_groups import hisparse_hook, overrides

    with pytest.raises(ValueError):
        validate(model, enable_hisparse=True, enable_mixed_chunk=True)
    assert hisparse_hook.resolving_view is overrides.resolving_view
