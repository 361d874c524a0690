"""Decode steps select by the top-k kernel that SGLang takes without HiSparse.

That kernel maps positions to rows on the way, which with HiSparse only attention can do, so SGLang falls back
to an older one that takes longer: 14.1 instead of 8.6 us a layer with an indexer (batch 4, one H200). The
newer kernel can answer positions too, and SGLang makes its plan of a step in either case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.ops.attention.dsv4 import topk as kernels
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_memory

logger = logging.getLogger(__name__)

MOST = 2048
"""Positions that the kernel can select."""

_verified: dict[torch.device, bool] = {}


def verify(device: torch.device, top_k: int) -> None:
    """Try the kernel on ``device`` before a graph is captured; ``topk_transform`` takes it if it is right."""
    if not 0 < top_k <= MOST or not envs.SGLANG_OPT_USE_TOPK_V2.get() or not envs.SGLANG_DSA_FUSE_TOPK.get():
        return
    try:
        _verified[device] = _selects_alike(device, top_k)
    except Exception as error:
        logger.warning("hisparse_sgl: SGLang's newer top-k kernel does not run here: %s", error)
        _verified[device] = False
    if not _verified[device]:
        logger.warning("hisparse_sgl: decode steps take SGLang's older top-k kernel")


def topk_transform(
    original: Callable[..., torch.Tensor],
    backend: Any,
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    topk_transform_method: Any,
    attn_metadata: Any,
    cu_seqlens_q_topk: torch.Tensor | None = None,
    topk_indices_offset: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
    batch_idx_list: list[int] | None = None,
    force_unfused_topk: bool = False,
) -> torch.Tensor:
    """Around SGLang's: positions int32 [rows, topk], -1 padded, where it is told not to map them."""
    plan = getattr(attn_metadata, "topk_v2_plan", None)
    rows = logits.shape[0]
    if (
        force_unfused_topk
        and plan is not None
        and plan.shape[0] == rows + 1 == lengths.shape[0] + 1
        and row_starts is None
        and batch_idx_list is None
        and get_memory().enable_hisparse
        and backend.should_use_topk_v2()
        and envs.SGLANG_DSA_FUSE_TOPK.get()
        and 0 < topk <= MOST
        and _verified.get(logits.device, False)
        and _fits(logits)
    ):
        return _positions(logits, lengths, topk, plan)
    return original(
        backend,
        logits,
        lengths,
        topk,
        topk_transform_method,
        attn_metadata,
        cu_seqlens_q_topk=cu_seqlens_q_topk,
        topk_indices_offset=topk_indices_offset,
        row_starts=row_starts,
        batch_idx_list=batch_idx_list,
        force_unfused_topk=force_unfused_topk,
    )


def _fits(logits: torch.Tensor) -> bool:
    """What the kernel expects of the scores: rows of floats that begin at whole 16 bytes."""
    return logits.dtype == torch.float32 and logits.stride(1) == 1 and logits.stride(0) % 4 == 0


def _positions(logits: torch.Tensor, lengths: torch.Tensor, topk: int, plan: torch.Tensor) -> torch.Tensor:
    out = logits.new_empty((logits.shape[0], topk), dtype=torch.int32)
    no_table, page_size = None, 1
    kernels.topk_transform_paged_v2(logits, lengths, no_table, out, page_size, plan)
    return out


def _selects_alike(device: torch.device, top_k: int) -> bool:
    """Whether the kernel selects what torch does: in rows shorter than ``top_k``, as long, and longer."""
    lengths = torch.tensor([0, 1, top_k, top_k + 100, 30 * top_k], dtype=torch.int32, device=device)
    width = 32 * top_k
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randperm(width, generator=generator) for _ in lengths]  # all different: one right answer
    logits = torch.stack(scores).to(device, torch.float32)
    found = _positions(logits, lengths, top_k, kernels.plan_topk_v2(lengths)).sort(dim=1).values
    inside = torch.arange(width, device=device) < lengths[:, None]
    best = logits.masked_fill(~inside, float("-inf")).topk(top_k, dim=1).indices.int()
    counted = torch.arange(top_k, device=device) < lengths[:, None]
    return bool(torch.equal(found, best.masked_fill(~counted, -1).sort(dim=1).values))
