"""Indexer rows only in the layers that run an indexer, as SGLang has them without HiSparse.

With HiSparse SGLang gives every layer rows for every host slot, also a layer that takes over the top-k of the
one before it and never reads them. In an IndexShare model most layers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.configs.model_config import dsa_layer_skips_topk
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.model_executor.pool_configurator import _get_dsa_cache_layer_ids
from sglang.srt.runtime_context import get_memory


def should_elide_dsa_index_k(original: Callable[..., bool], *, is_draft_worker: bool) -> bool:
    """Around SGLang's answer to whether layers that share a top-k get a buffer of 0 rows."""
    memory = get_memory()
    if not memory.enable_hisparse:
        return original(is_draft_worker=is_draft_worker)
    return not is_draft_worker and not memory.enable_unified_cache_external_linker


def compute_dsa_indexer_cell_size(
    original: Callable[..., int],
    self: Any,
    *,
    kvc: Any,
    num_layers: int,
    allocate_all_layers: bool = False,
) -> int:
    """Around SGLang's bytes of indexer rows a device token, which under HiSparse count all ``num_layers``."""
    elide = kv_cache_configurator._should_elide_dsa_index_k
    if (
        get_memory().enable_hisparse
        and not allocate_all_layers
        and elide(is_draft_worker=kvc.is_draft_worker)
    ):
        layers = _get_dsa_cache_layer_ids(kvc, num_layers)
        num_layers = sum(not dsa_layer_skips_topk(kvc.model_config.hf_config, layer) for layer in layers)
        allocate_all_layers = True  # all of these
    return original(self, kvc=kvc, num_layers=num_layers, allocate_all_layers=allocate_all_layers)
