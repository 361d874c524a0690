"""Two CUDA graphs for decode steps of one size: with swap-in, and without it while every row is resident.

A step's graph has to serve whatever batch comes. With swap-in it resolves, and launches a copy in each layer,
also where nothing is read through a hot region; that takes a few microseconds a layer. SGLang can capture
variants of a graph, and asks before each step which one to replay. Here that depends on whether any request
holds a hot region.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.runtime_context import get_memory

from hisparse_sgl.integrations.sglang.options import Options

RESIDENT = "hisparse_resident"
SWAP_IN = "hisparse_swap_in"


@dataclass(frozen=True)
class ResidencyVariants:
    """What SGLang captures. The coordinator says which one a step takes (``resolve_attention_variant``)."""

    # The smaller graph first: they share a memory pool.
    capture_labels: ClassVar[tuple[str, ...]] = (RESIDENT, SWAP_IN)

    def select(self, forward_batch: Any) -> str:
        """The one that serves every batch."""
        return SWAP_IN


def create_attention_graph_variants(original: Callable[..., Any], hf_config: Any) -> Any:
    """Around SGLang's choice of variants, which has none for these models on NVIDIA GPUs."""
    variants, memory = original(hf_config), get_memory()
    if variants is not None or not memory.enable_hisparse:
        return variants
    return ResidencyVariants() if Options.parse(memory.hisparse_config).resident_graphs else None


def resolve_attention_variant(
    original: Callable[..., Any], runner: Any, forward_batch: Any, capture_batch_size: int
) -> Any:
    """Around SGLang's question which variant a step takes. ``before_forward`` was called: what the device
    tables hold now is what the coordinator knows."""
    if isinstance(runner.attention_graph_variants, ResidencyVariants):
        return runner.model_runner.hisparse_coordinator.graph_variant()
    return original(runner, forward_batch, capture_batch_size)


def without_swap_in() -> bool:
    """Whether what runs is captured for steps whose rows are all resident."""
    return capture_mode.get_capture_attention_variant() == RESIDENT
