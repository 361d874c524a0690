"""Figures that others published, computed with the code of the plan."""

from __future__ import annotations

import dataclasses

import pytest

from hisparse_sgl.capacity.builtin import BUILT_IN
from hisparse_sgl.capacity.config_file import model_shape
from hisparse_sgl.capacity.costs import Costs
from hisparse_sgl.capacity.inputs import Workload
from hisparse_sgl.capacity.sglang import Cell

GLM = BUILT_IN["glm-5"].config


def costs_of(layers: int, kv_dtype: str, **changes: object) -> tuple[object, Costs]:
    model = model_shape({**GLM, "num_hidden_layers": layers, **changes}, "test", "test")
    return model, Costs.of(model, Workload(100_000, 1, kv_dtype))


def test_pools_that_sglang_logged() -> None:
    """Stock SGLang 0.5.23, 6-layer bf16 GLM-DSA that shares indexers. It logs GiB of device, GB of host."""
    model, costs = costs_of(6, "bf16", index_topk_pattern="FFSSFS")
    cell = Cell.stock(model, costs)
    pools = cell.pools(1_550_528, 2)
    assert pools.host_tokens == 3_101_120
    assert f"{pools.device_bytes / 2**30:.2f}" == "12.27"
    assert f"{pools.host_bytes / 10**9:.2f}" == "21.43"
    assert cell.device_tokens(pools.device_bytes, 2) == 1_550_528


def test_account_of_vllms_hybrid_hisparse() -> None:
    """100,000 tokens x 656 B x 60 layers, hot region of twice top-k."""
    model, costs = costs_of(60, "fp8")
    page = costs.page_rows_bytes
    assert page * 100_000 // 64 == 3_936_000_000
    assert costs.hot_region_bytes / 2**20 == 153.75
    assert model.index_row_bytes == 132


@pytest.mark.parametrize(
    ("name", "billions", "error"),
    [("glm-5", 744, 0.001), ("glm-5.3", 744, 0.001), ("deepseek-v3.2", 671, 0.002)],
)
def test_counted_parameters_are_those_published(name: str, billions: int, error: float) -> None:
    assert BUILT_IN[name].shape(name).parameters == pytest.approx(billions * 1e9, rel=error)


def test_glm_5_3_shares_indexers_as_published() -> None:
    """21 full and 57 shared layers: FFFSSSFSSS... ."""
    groups = BUILT_IN["glm-5.3"].shape("glm-5.3").index_groups
    assert [group.leader for group in groups] == [0, 1, *range(2, 78, 4)]
    assert sum(len(group.followers) for group in groups) == 57


def test_v4_pages_are_those_of_sglang() -> None:
    """64 rows of 584 B padded to a multiple of 576: 37,440 B a layer."""
    model = BUILT_IN["deepseek-v4-flash"].shape("deepseek-v4-flash")
    costs = Costs.of(model, Workload(1024, 1))
    assert (model.num_layers, model.c128_layers, model.window_layers) == (21, 20, 43)
    assert costs.page_rows_bytes == 21 * 37_440
    assert costs.page_tokens == 256
    assert costs.page_index_bytes == 21 * 64 * 132
    assert costs.page_other_bytes == 20 * 1728  # two rows of 584 B, padded
    assert costs.window_bytes == 43 * 2 * 149_760


def test_v4_compressor_states_are_those_of_sglang() -> None:
    """float32 keys and gates: C4 a ring of 8 for each page of the window, C128 128 rows for each request."""
    model = BUILT_IN["deepseek-v4-flash"].shape("deepseek-v4-flash")
    costs = Costs.of(model, Workload(1024, 1))
    c4 = 8 * 2 * (1 + 1) * (512 + 128) * 4
    assert costs.compressor_bytes == 21 * 2 * c4 + 20 * 128 * 2 * 512 * 4
    assert costs.kept_bytes == costs.window_bytes + costs.compressor_bytes
    groups = {group.name: group for group in model.layout("fp8").bytes_by_group()}
    assert list(groups) == ["c4", "c4 indexer", "c128", "sliding window", "compressor state"]
    assert groups["compressor state"].boundary_bytes == 21 * c4
    assert [group.reuse for group in groups.values()] == ["pages", "pages", "pages", "state", "state"]


def test_drafts_keep_a_dense_layer_on_the_device() -> None:
    model, _ = costs_of(6, "fp8")
    plain, drafts = (Costs.of(model, Workload(4096, 1, query_rows=rows)) for rows in (1, 3))
    assert drafts.page_other_bytes - plain.page_other_bytes == 64 * (656 + 132)
    assert drafts.hot_rows == 3 * plain.hot_rows
    assert dataclasses.replace(drafts, page_other_bytes=0).page_device_bytes == plain.page_device_bytes
