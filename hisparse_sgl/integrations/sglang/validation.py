"""What a server with ``--enable-hisparse`` may combine: the radix cache, and nothing that we do not serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hisparse_sgl.integrations.sglang import targets
from hisparse_sgl.integrations.sglang.hooks import BACKEND
from hisparse_sgl.integrations.sglang.options import PAGE_SIZE, Options

STOCK = "set HISPARSE_SGL=0 and pass --disable-radix-cache for SGLang's own HiSparse"


class Refusal(NamedTuple):
    """A setting that we do not serve. ``found`` gets SGLang's resolved settings and returns what is wrong."""

    flag: str
    found: Callable[[Any], object | None]
    fix: str = "leave it out"


def _set(name: str) -> Callable[[Any], object | None]:
    return lambda cfg: "set" if getattr(cfg, name) else None


def _other(name: str, *served: object) -> Callable[[Any], object | None]:
    return lambda cfg: None if getattr(cfg, name) in served else getattr(cfg, name)


def _prefill_graph(cfg: Any) -> object | None:
    backend = cfg.cuda_graph_config.prefill.backend
    return None if backend in ("breakable", "disabled") else backend


def _decode_graph(cfg: Any) -> object | None:
    """A layer that takes over a top-k waits for an event of its leader; a graph that is broken between the
    two can not."""
    backend = cfg.cuda_graph_config.decode.backend
    return None if backend in ("full", "disabled") else backend


def _equal_lengths(cfg: Any) -> object | None:
    """Backends with which a decode step runs as a prefill while another replica prefills: that reads all
    pages of a request, and one with a hot region does not have them all."""
    from sglang.srt.environ import envs

    backend = cfg.moe_a2a_backend
    forced = backend == "deepep_v2" and envs.SGLANG_DEEPEP_V2_FORCE_MAX_LEN.get()
    return backend if cfg.attn_dp_size > 1 and (backend == "pplx" or forced) else None


def _busy_check(cfg: Any) -> object | None:
    from sglang.srt.environ import envs

    return envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get() or None


# SGLang refuses more with --enable-hisparse: mixed chunks, DCP, KV sharding, unified memory, beam search.
REFUSALS = (
    Refusal(
        "--speculative-algorithm", _other("speculative_algorithm", None, "NONE"), f"leave it out, or {STOCK}"
    ),
    Refusal("--disaggregation-mode", _other("disaggregation_mode", "null"), f"use null, or {STOCK}"),
    Refusal("--pp-size", _other("pp_size", 1), "use 1 and raise --tp-size"),
    Refusal("--enable-prefill-cp", _set("enable_prefill_cp")),
    Refusal("--attn-cp-size", _other("attn_cp_size", 1), "use 1"),
    Refusal(
        "--enable-hierarchical-cache",
        _set("enable_hierarchical_cache"),
        "leave it out: the host pool is the hierarchy, its size is host_to_device_ratio of --hisparse-config",
    ),
    Refusal("--enable-lmcache", _set("enable_lmcache")),
    Refusal("--enable-flexkv", _set("enable_flexkv")),
    Refusal("--enable-unified-cache-external-linker", _set("enable_unified_cache_external_linker")),
    Refusal(
        "--radix-cache-backend",
        _other("radix_cache_backend", None, BACKEND),
        f"leave it out, the plugin picks {BACKEND}",
    ),
    Refusal(
        "--enable-session-radix-cache",
        _set("enable_session_radix_cache"),
        "leave it out: the turns of a session share their prefix without it",
    ),
    Refusal("--enable-streaming-session", _set("enable_streaming_session")),
    Refusal("--enable-two-batch-overlap", _set("enable_two_batch_overlap")),
    Refusal(
        "--cuda-graph-backend-prefill",
        _prefill_graph,
        "use breakable (SGLang's default) or disabled: both run attention outside the graph",
    ),
    Refusal(
        "--cuda-graph-backend-decode", _decode_graph, "use full (SGLang's default), whose layers share events"
    ),
    Refusal("--enable-torch-compile", _set("enable_torch_compile")),
    Refusal("--enable-pdmux", _set("enable_pdmux")),
    Refusal(
        "--enable-memory-saver",
        _set("enable_memory_saver"),
        "leave it out: it takes device pages away while copies may still read them",
    ),
    Refusal("--kv-canary", _other("kv_canary", "none"), "use audit_every of --hisparse-config"),
    Refusal(
        "--moe-a2a-backend",
        _equal_lengths,
        "with --attn-dp-size use another, and leave SGLANG_DEEPEP_V2_FORCE_MAX_LEN unset",
    ),
    Refusal("--page-size", _other("page_size", PAGE_SIZE), f"use {PAGE_SIZE}, or leave it out"),
    Refusal(
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
        _busy_check,
        "unset it: it takes pages that are promised or being copied for lost, and ends the server",
    ),
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
        if cfg.radix_cache_backend == BACKEND:
            raise ValueError(
                f"--radix-cache-backend is {BACKEND}, the limit is a server with --enable-hisparse: pass "
                "that flag alone, or neither"
            )
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
        found = refusal.found(cfg)
        if found is not None:
            raise ValueError(
                f"{refusal.flag} is {found}, not served with --enable-hisparse by hisparse_sgl: {refusal.fix}"
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
            f"--model-path is a {name}, the limit of hisparse_sgl is DSA models (DeepSeek V3.2, GLM-5): "
            f"serve one of these, or {STOCK}"
        )
    text_config = config.hf_text_config
    if uses_kda_attention(hf_config) or get_dsa_index_kpool(text_config) > 1:
        raise ValueError(
            f"--model-path is a {name} with linear attention or a pooled indexer, the limit of hisparse_sgl "
            "is DSA in every layer, one index key a token: serve such a model, or leave out --enable-hisparse"
        )
    options.check_model(text_config.index_topk)


def _check_platform(cfg: Any) -> None:
    from sglang.srt.runtime_context import get_platform

    platform = get_platform()
    if cfg.device != "cuda" or platform.is_hip:
        found = "ROCm" if platform.is_hip else cfg.device
        raise ValueError(
            f"--device is {found}, the limit of hisparse_sgl is cuda (NVIDIA): serve on such a GPU, or leave "
            "out --enable-hisparse"
        )


def _select_backend(server_args: Any, cfg: Any) -> None:
    """Imply ``--radix-cache-backend hisparse``, in the settings that SGLang hands to its processes.

    Also with ``--disable-radix-cache``: our factory then builds SGLang's disabled tree. A restarted engine
    validates settings that are published already, and there it is set.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, record_of

    if cfg.radix_cache_backend is None:
        declare_resolution(record_of(server_args), "hisparse_sgl", radix_cache_backend=BACKEND)
