"""The table of what is hooked where, and its registration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from hisparse_sgl.integrations.sglang import targets
from hisparse_sgl.integrations.sglang.signatures import (
    ALLOCATOR,
    BATCH,
    COORDINATOR,
    GRAPH_RUNNER,
    GRAPH_VARIANTS,
    KV_CONFIGURATOR,
    MODEL_RUNNER,
    OBSERVER,
    POOL,
    POOL_CONFIGURATOR,
    SCHEDULER,
    TOPK,
)

logger = logging.getLogger(__name__)

BACKEND = "hisparse"
"""Name of our prefix cache in SGLang's registry of ``--radix-cache-backend``."""


class Hook(NamedTuple):
    """One hook. ``kind`` is that of SGLang's ``HookType``; ``home`` is the module here that has ``name``."""

    target: str
    kind: str
    home: str
    name: str


GATE = Hook(
    "sglang.srt.arg_groups.hisparse_hook.validate_hisparse", "around", "validation", "validate_hisparse"
)
"""Decides whether a server that wants HiSparse may start; in place even where nothing else fits."""

HOOKS = (
    Hook(POOL, "replace", "kv_pool", "KVPool"),
    Hook(ALLOCATOR, "replace", "allocator", "Allocator"),
    Hook(COORDINATOR, "replace", "coordinator", "Coordinator"),
    Hook(f"{KV_CONFIGURATOR}._should_elide_dsa_index_k", "around", "indexer", "should_elide_dsa_index_k"),
    Hook(
        f"{POOL_CONFIGURATOR}.DefaultPoolConfigurator._compute_dsa_indexer_cell_size",
        "around",
        "indexer",
        "compute_dsa_indexer_cell_size",
    ),
    Hook(f"{TOPK}.topk_transform", "around", "topk", "topk_transform"),
    Hook(
        f"{GRAPH_VARIANTS}.create_attention_graph_variants",
        "around",
        "graphs",
        "create_attention_graph_variants",
    ),
    Hook(f"{GRAPH_RUNNER}._resolve_attention_variant", "around", "graphs", "resolve_attention_variant"),
    Hook(f"{SCHEDULER}.init_model_worker", "around", "scheduling", "init_model_worker"),
    Hook(f"{SCHEDULER}.get_prefill_adder_class", "around", "scheduling", "get_prefill_adder_class"),
    Hook(f"{SCHEDULER}.get_next_batch_to_run", "around", "scheduling", "get_next_batch_to_run"),
    Hook(f"{BATCH}.prepare_for_decode", "around", "scheduling", "prepare_for_decode"),
    Hook(f"{MODEL_RUNNER}._forward_raw", "around", "scheduling", "forward_raw"),
    Hook(f"{SCHEDULER}.init_metrics_collector", "around", "prometheus", "init_metrics_collector"),
    Hook(f"{OBSERVER}.get_pool_stats", "around", "stats", "get_pool_stats"),
)


def register() -> None:
    """Register the gate, then everything else or nothing: in another SGLang than ours the gate alone."""
    _apply(GATE, _load(GATE))
    if targets.wrong_version():
        return
    try:
        loaded = [(hook, _load(hook)) for hook in HOOKS]
        _register_tree()
    except Exception as error:
        logger.warning("hisparse_sgl: --enable-hisparse will be refused", exc_info=True)
        targets.note_failure(f"import: expected to load, found {type(error).__name__}: {error}")
        return
    for hook, function in loaded:
        _apply(hook, function)


def _load(hook: Hook) -> Callable[..., Any]:
    return getattr(import_module(f"hisparse_sgl.integrations.sglang.{hook.home}"), hook.name)


def _apply(hook: Hook, function: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if any(entry[1] is function for entry in HookRegistry._hooks.get(hook.target, ())):
        return
    targets.expect(hook.target, function)
    HookRegistry.register(hook.target, function, HookType(hook.kind))


def _register_tree() -> None:
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(BACKEND) is None:
        tree = import_module("hisparse_sgl.integrations.sglang.tree")
        register_radix_cache_backend(BACKEND, tree.make_tree)
