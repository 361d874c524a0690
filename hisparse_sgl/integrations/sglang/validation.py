"""What a server with ``--enable-hisparse`` may combine: the radix cache, and nothing that we do not serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hisparse_sgl.integrations.sglang import targets
from hisparse_sgl.integrations.sglang.options import PAGE_SIZE, Options

BACKEND = "hisparse"
STOCK = "set HISPARSE_SGL=0 and pass --disable-radix-cache for SGLang's own HiSparse"


class Refusal(NamedTuple):
    """A setting that we do not serve. ``refused`` gets SGLang's resolved settings."""

    flag: str
    refused: Callable[[Any], bool]
    fix: str


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda cfg: bool(getattr(cfg, name))


def _over_one(name: str) -> Callable[[Any], bool]:
    return lambda cfg: (getattr(cfg, name) or 1) > 1


REFUSALS = (
    Refusal(
        "--speculative-algorithm",
        lambda cfg: (cfg.speculative_algorithm or "NONE").upper() != "NONE",
        f"leave it out, or {STOCK}",
    ),
    Refusal("--disaggregation-mode", lambda cfg: cfg.disaggregation_mode != "null", f"use null, or {STOCK}"),
    Refusal(
        "--disaggregation-decode-enable-offload-kvcache",
        _is_set("disaggregation_decode_enable_offload_kvcache"),
        "leave it out: the host pool holds every row already",
    ),
    Refusal(
        "--disaggregation-decode-retraction-backup host_pool",
        lambda cfg: cfg.disaggregation_decode_retraction_backup == "host_pool",
        "leave it out: a retracted request finds its rows in the host pool",
    ),
    Refusal("--pp-size", _over_one("pp_size"), "use 1 and raise --tp-size"),
    Refusal("--dcp-size", _over_one("dcp_size"), "use 1"),
    Refusal("--attn-cp-size", _over_one("attn_cp_size"), "use 1"),
    Refusal("--enable-prefill-cp", _is_set("enable_prefill_cp"), "leave it out"),
    Refusal("--enable-dsa-cache-layer-split", _is_set("enable_dsa_cache_layer_split"), "leave it out"),
    Refusal(
        "--enable-hierarchical-cache",
        _is_set("enable_hierarchical_cache"),
        "leave it out: the host pool is the hierarchy, its size is host_to_device_ratio of --hisparse-config",
    ),
    Refusal("--enable-lmcache", _is_set("enable_lmcache"), "leave it out"),
    Refusal("--enable-flexkv", _is_set("enable_flexkv"), "leave it out"),
    Refusal(
        "--enable-unified-cache-external-linker",
        _is_set("enable_unified_cache_external_linker"),
        "leave it out",
    ),
    Refusal(
        "--radix-cache-backend",
        lambda cfg: cfg.radix_cache_backend not in (None, BACKEND),
        f"leave it out, the plugin picks {BACKEND!r}",
    ),
    Refusal(
        "--enable-session-radix-cache",
        _is_set("enable_session_radix_cache"),
        "leave it out: prefixes of a session are shared by the radix cache without it",
    ),
    Refusal("--enable-streaming-session", _is_set("enable_streaming_session"), "leave it out"),
    Refusal("--enable-two-batch-overlap", _is_set("enable_two_batch_overlap"), "leave it out"),
    Refusal(
        "--cuda-graph-backend-prefill",
        lambda cfg: cfg.cuda_graph_config.prefill.backend not in ("breakable", "disabled"),
        "use breakable (SGLang's default) or disabled: both run attention outside the graph",
    ),
    Refusal("--enable-torch-compile", _is_set("enable_torch_compile"), "leave it out"),
    Refusal("--enable-pdmux", _is_set("enable_pdmux"), "leave it out"),
    Refusal("--dllm-algorithm", _is_set("dllm_algorithm"), "serve a model that decodes token by token"),
    Refusal("--enable-unified-memory", _is_set("enable_unified_memory"), "leave it out"),
    Refusal("--enable-page-major-kv-layout", _is_set("enable_page_major_kv_layout"), "leave it out"),
    Refusal(
        "--enable-memory-saver",
        _is_set("enable_memory_saver"),
        "leave it out: the pinned host pool and its tables cannot be released and resumed",
    ),
    Refusal("--kv-canary", lambda cfg: cfg.kv_canary != "none", "use audit_every of --hisparse-config"),
    Refusal("--page-size", lambda cfg: cfg.page_size != PAGE_SIZE, f"use {PAGE_SIZE}, or leave it out"),
)


def validate_hisparse(original: Callable[[Any], None], server_args: Any) -> None:
    """Around SGLang's check of the same name: all of it holds, except that the radix cache may stay on.

    Raises:
        SystemExit: this SGLang is not one the plugin was written for, see ``targets``.
        ValueError: a setting that is not served; names the flag, its limit and what to do instead.
    """
    from sglang.srt.arg_groups import hisparse_hook

    cfg = hisparse_hook.resolving_view(server_args)
    if not cfg.enable_hisparse:
        original(server_args)
        return
    targets.check()
    targets.check_applied()
    with _radix_cache_allowed(hisparse_hook):
        original(server_args)
    options = Options.parse(cfg.hisparse_config)
    _check_model(server_args, options)
    _check_platform(cfg)
    for refusal in REFUSALS:
        if refusal.refused(cfg):
            raise ValueError(
                f"{refusal.flag} does not work with --enable-hisparse of hisparse_sgl: {refusal.fix}"
            )
    _select_backend(server_args, cfg)


class _RadixCacheOff:
    """SGLang's view of the settings, in which the radix cache looks switched off."""

    disable_radix_cache = True

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


@contextmanager
def _radix_cache_allowed(hisparse_hook: Any) -> Iterator[None]:
    view = hisparse_hook.resolving_view
    hisparse_hook.resolving_view = lambda server_args: _RadixCacheOff(view(server_args))
    try:
        yield
    finally:
        hisparse_hook.resolving_view = view


def _check_model(server_args: Any, options: Options) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.model_config import (
        get_dsa_index_kpool,
        is_deepseek_dsa,
        uses_kda_attention,
    )

    config = model_config_of(server_args)
    hf_config = config.hf_config
    name = (getattr(hf_config, "architectures", None) or ["unknown"])[0]
    if not is_deepseek_dsa(hf_config):
        raise ValueError(
            f"--model-path is a {name}, the limit of hisparse_sgl is DSA models (DeepSeek V3.2, GLM-5): serve one "
            f"of these, or {STOCK}"
        )
    text_config = config.hf_text_config
    if uses_kda_attention(hf_config) or get_dsa_index_kpool(text_config) > 1:
        raise ValueError(
            f"--model-path is a {name} with linear attention or a pooled indexer, the limit of hisparse_sgl is "
            "DSA in every layer with one index key a token: serve such a model, or leave out --enable-hisparse"
        )
    options.check_model(text_config.index_topk)


def _check_platform(cfg: Any) -> None:
    from sglang.srt.runtime_context import get_platform

    platform = get_platform()
    if cfg.device != "cuda" or platform.is_hip:
        found = "ROCm" if platform.is_hip else cfg.device
        raise ValueError(
            f"--device is {found}, the limit of hisparse_sgl is cuda (NVIDIA): serve on such a GPU, or leave out "
            "--enable-hisparse"
        )


def _select_backend(server_args: Any, cfg: Any) -> None:
    """Imply ``--radix-cache-backend hisparse``, in the settings that SGLang hands to its processes.

    Also with ``--disable-radix-cache``: our factory then builds SGLang's disabled tree. A restarted engine
    validates settings that are published already, and there it is set.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, record_of

    if cfg.radix_cache_backend is None:
        declare_resolution(record_of(server_args), "hisparse_sgl", radix_cache_backend=BACKEND)
