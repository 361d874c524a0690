"""Which top-k kernel decode steps take. SGLang's runs on GPUs only: a stand-in in torch takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa import dsa_topk_backend
from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod

from hisparse_sgl.integrations.sglang import topk

CPU = torch.device("cpu")
ROWS, WIDTH, TOP_K = 3, 40, 8
OLDER = torch.full((ROWS, TOP_K), 7, dtype=torch.int32)

pytestmark = pytest.mark.usefixtures("plugin")


def select(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor | None,
    out_page_indices: torch.Tensor,
    page_size: int,
    metadata: torch.Tensor,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """What SGLang says of its kernel, without a page table."""
    assert page_tables is None and out_raw_indices is None and page_size == 1
    assert metadata.shape == (len(seq_lens) + 1, 2)
    for row, length in enumerate(seq_lens.tolist()):
        best = scores[row, :length].topk(min(length, out_page_indices.shape[1])).indices
        out_page_indices[row] = -1
        out_page_indices[row, : len(best)] = best.int()


def plan_of(seq_lens: torch.Tensor, static_threshold: int = -1) -> torch.Tensor:
    return seq_lens.new_zeros(len(seq_lens) + 1, 2)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(topk.kernels, "topk_transform_paged_v2", select)
    monkeypatch.setattr(topk.kernels, "plan_topk_v2", plan_of)
    monkeypatch.setattr(topk, "_verified", {})
    monkeypatch.setattr(topk, "get_memory", lambda: SimpleNamespace(enable_hisparse=True))
    monkeypatch.setattr(DSATopKBackend, "topk_func", lambda *args, **kwargs: OLDER)
    with envs.SGLANG_OPT_USE_TOPK_V2.override(True), envs.SGLANG_DSA_FUSE_TOPK.override(True):
        yield


def off_by_one(*args: Any) -> None:
    select(*args)
    args[3][args[3] > 0] -= 1


def not_padded(*args: Any) -> None:
    select(*args)
    args[3].clamp_(min=0)


def broken(*args: Any) -> None:
    raise RuntimeError("no kernel image")


def test_the_kernel_is_taken_where_it_selects_what_torch_does() -> None:
    topk.verify(CPU, TOP_K)
    assert topk._verified == {CPU: True}


@pytest.mark.parametrize("kernel", [off_by_one, not_padded, broken])
def test_a_kernel_that_is_wrong_or_missing_is_not_taken(
    kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(topk.kernels, "topk_transform_paged_v2", kernel)
    topk.verify(CPU, TOP_K)
    assert topk._verified == {CPU: False} and "older top-k kernel" in caplog.text
    assert ("no kernel image" in caplog.text) == (kernel is broken)
    assert indexer().topk_transform(scores(), TOP_K) is OLDER


def test_what_sglang_would_not_run_is_not_tried() -> None:
    topk.verify(CPU, topk.MOST + 1)
    with envs.SGLANG_OPT_USE_TOPK_V2.override(False):
        topk.verify(CPU, TOP_K)
    with envs.SGLANG_DSA_FUSE_TOPK.override(False):
        topk.verify(CPU, TOP_K)
    assert topk._verified == {}


def scores() -> torch.Tensor:
    return torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def indexer(**fields: Any) -> DSAIndexerMetadata:
    """What SGLang's indexer asks in a decode step with HiSparse."""
    lengths = torch.tensor([5, TOP_K, WIDTH], dtype=torch.int32)
    attention = SimpleNamespace(
        topk_v2_plan=plan_of(lengths),
        dsa_seqlens_expanded=lengths,
        cu_seqlens_q=torch.arange(ROWS + 1),
        topk_indices_offset=None,
        real_page_table=torch.zeros(ROWS, 1),
    )
    given = {"topk_backend": DSATopKBackend.SGL_KERNEL, "force_unfused_topk": True} | fields
    return DSAIndexerMetadata(attention, TopkTransformMethod.PAGED, **given)  # type: ignore[arg-type]


def test_a_decode_step_gets_positions_of_the_newer_kernel() -> None:
    topk.verify(CPU, TOP_K)
    logits = scores()
    found = indexer().topk_transform(logits, TOP_K)
    assert found.dtype == torch.int32 and found.shape == (ROWS, TOP_K)
    assert sorted(found[0].tolist()) == [-1, -1, -1, 0, 1, 2, 3, 4]
    assert sorted(found[1].tolist()) == list(range(TOP_K))
    assert sorted(found[2].tolist()) == sorted(logits[2].topk(TOP_K).indices.tolist())


@pytest.mark.parametrize(
    "case",
    [
        "other kernel",
        "some rows",
        "never fused",
        "fused",
        "prefill",
        "no plan",
        "plan of others",
        "switched off",
        "no HiSparse",
        "float64",
    ],
)
def test_all_else_is_sglangs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topk.verify(CPU, TOP_K)
    logits, wanted, ks = scores(), indexer(), None
    if case == "other kernel":
        wanted = indexer(topk_backend=DSATopKBackend.TORCH)
    elif case == "some rows":
        given = wanted.attn_metadata.dsa_seqlens_expanded, TOP_K, TopkTransformMethod.PAGED
        some: Any = {"batch_idx_list": [0, 1, 2], "force_unfused_topk": True}
        assert wanted.topk_backend.topk_transform(logits, *given, wanted.attn_metadata, **some) is OLDER
        return
    elif case == "fused":
        monkeypatch.setattr(dsa_topk_backend, "_topk_transform_v2_paged", lambda *args: OLDER)
        wanted = indexer(force_unfused_topk=False)
    elif case == "prefill":
        ks = torch.zeros(ROWS, dtype=torch.int32)
    elif case == "no plan":
        wanted.attn_metadata.topk_v2_plan = None
    elif case == "plan of others":
        wanted.attn_metadata.topk_v2_plan = torch.zeros(ROWS, 2, dtype=torch.int32)
    elif case == "no HiSparse":
        monkeypatch.setattr(topk, "get_memory", lambda: SimpleNamespace(enable_hisparse=False))
    elif case == "float64":
        logits = logits.double()
    fuse = envs.SGLANG_DSA_FUSE_TOPK.override(case != "never fused")
    with fuse, envs.SGLANG_OPT_USE_TOPK_V2.override(case != "switched off"):
        assert wanted.topk_transform(logits, TOP_K, ks=ks) is OLDER


def test_a_prefill_keeps_its_fused_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    topk.verify(CPU, TOP_K)
    asked: list[dict[str, Any]] = []

    def original(backend: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(kwargs)
        return OLDER

    wanted, logits, offset = indexer(), scores(), torch.zeros(ROWS)
    lengths = wanted.attn_metadata.dsa_seqlens_expanded
    found = topk.topk_transform(
        original, wanted.topk_backend, logits, lengths, TOP_K, TopkTransformMethod.RAGGED,
        wanted.attn_metadata, topk_indices_offset=offset, row_starts=lengths,
    )  # fmt: skip
    assert found is OLDER and asked[0]["topk_indices_offset"] is offset and asked[0]["row_starts"] is lengths
    assert asked[0]["force_unfused_topk"] is False
