"""The sums of a plan: they agree with the pool's own layout and sizes, and move the right way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_sgl.capacity.builtin import BUILT_IN
from hisparse_sgl.capacity.inputs import GIB, Machine, Workload
from hisparse_sgl.capacity.model import ModelShape
from hisparse_sgl.capacity.plan import Plan, make_plan
from hisparse_sgl.config import HiSparseConfig, Sizes
from hisparse_sgl.kernels.state import HotState
from hisparse_sgl.mem_pool.layout import KVLayout

MODELS: dict[str, ModelShape] = {name: entry.shape(name) for name, entry in BUILT_IN.items()}


def plan_of(
    name: str = "glm-5.3", ram: float = 2048, weights_gib: float | None = None, **changes: Any
) -> Plan:
    machine_fields = Machine.__dataclass_fields__
    machine = {key: changes.pop(key) for key in list(changes) if key in machine_fields}
    machine = {"gpus": 8, "tp": 8, "hbm_gib": 140.0, "host_ram_gib": ram, **machine}
    workload = Workload(**{"context": 131072, "concurrency": 16, **changes})
    model = MODELS[name]
    weights = model.weight_bytes(None) if weights_gib is None else int(weights_gib * GIB)
    return make_plan(model, Machine(**machine), workload, weights)


def requests_of(plan: Plan) -> dict[str, int]:
    return {limit.resource: limit.requests for limit in plan.limits}


@pytest.mark.parametrize("name", MODELS)
def test_the_pools_fit_into_the_memory_they_are_made_for(name: str) -> None:
    plan = plan_of(name, weights_gib=400)
    costs, pools = plan.costs, plan.pools
    used = pools.device_pages * costs.page_rows_bytes + pools.host_pages * costs.page_device_bytes
    used += costs.state_bytes(plan.requests, pools.device_pages, costs.context_pages)
    assert used <= plan.kv_bytes < used + costs.page_rows_bytes
    assert plan.host_bytes_total <= (2048 - 10) * GIB
    assert not plan.findings


def test_the_pool_accepts_the_sizes_of_a_plan() -> None:
    plan = plan_of()
    config = HiSparseConfig(
        top_k=2048,
        context_len=131072,
        host_pages=plan.pools.host_pages,
        device_pages=plan.pools.device_pages,
        max_requests=plan.requests,
    )
    sizes = Sizes.of(config, 64)
    assert (sizes.hot_rows, sizes.hot_pages, sizes.context_pages) == (4096, 64, 2048)
    assert sizes.transition_watermark == plan.pools.device_pages // 10
    layout = KVLayout((plan.model.cache_group("fp8"),), 64)
    device = layout.device_bytes(plan.pools.device_pages, plan.pools.host_pages)
    state = plan.costs.state_bytes(plan.requests, plan.pools.device_pages, plan.costs.context_pages)
    assert device + state <= plan.kv_bytes
    assert sizes.hot_regions == plan.costs.hot_regions(plan.requests, plan.pools.device_pages)
    assert layout.host_bytes(plan.pools.host_pages) * 8 == plan.host_bytes_total


def test_the_first_limit_is_exact() -> None:
    """As many requests as the limits say fit, one more does not."""
    plan = plan_of(weights_gib=692, host_contexts=1)
    most = plan.limits[0].requests
    fits, fails = (plan_of(weights_gib=692, host_contexts=1, concurrency=n) for n in (most, most + 1))
    assert not fits.findings and fits.all_hot >= most
    assert len(fails.findings) == 1 and plan.limits[0].resource in fails.findings[0]


@pytest.mark.parametrize(("ram", "resource"), [(512, "host RAM"), (8192, "indexer rows (HBM)")])
def test_the_limit_moves_when_its_resource_grows(ram: float, resource: str) -> None:
    assert plan_of(ram=ram).limits[0].resource == resource


def test_short_contexts_are_limited_by_hot_regions() -> None:
    assert plan_of(ram=8192, context=8192, step_ms=1000).limits[0].resource == "hot regions (HBM)"


def test_hot_state_is_counted_by_region_and_not_by_request() -> None:
    """Many short requests: regions fit for some of them only, and only those cost hot state."""
    plan = plan_of(context=1024, concurrency=500)
    costs, pools = plan.costs, plan.pools
    regions = (pools.device_pages - 1) // costs.hot_pages
    assert 0 < regions < plan.requests == 500 and not plan.findings
    state = costs.state_bytes(500, pools.device_pages, costs.context_pages)
    assert state == regions * (21 * (6 * 4096 + 2 * 1024)) + 500 * 21 * 12 * 2048
    pages = pools.device_pages * costs.page_rows_bytes + pools.host_pages * costs.page_device_bytes
    assert pages + state <= plan.kv_bytes
    more = costs.state_bytes(500, pools.device_pages + 1, costs.context_pages)
    assert pages + costs.page_rows_bytes + more > plan.kv_bytes


def test_the_state_of_a_region_is_what_the_pool_allocates() -> None:
    costs = plan_of().costs
    hot = HotState.empty(1, costs.hot_rows, 131072, groups=21)
    assert sum(tensor.numel() * tensor.element_size() for tensor in hot) == costs.hot_state_bytes(2048)


def test_pcie_limits_only_requests_that_are_hot() -> None:
    slow = plan_of(pcie_gb_s=1.0)
    assert slow.limits[0].resource == "PCIe" and "PCIe" in slow.findings[0]
    few = plan_of(pcie_gb_s=1.0, concurrency=2)  # both stay resident
    assert few.mix.hot == 0 and few.step_bytes == 0 and not few.findings
    assert slow.step_ms > 50
    assert plan_of(hit_rate=1.0).limits[-1].requests == 10**9


def test_the_longest_context_is_exact() -> None:
    plan = plan_of()
    assert not plan_of(context=plan.longest_at_concurrency).findings
    assert plan_of(context=plan.longest_at_concurrency + 64).findings
    assert not plan_of(context=plan.longest_single, concurrency=1).findings
    assert plan_of(context=plan.longest_single + 64, concurrency=1).findings


def test_engines_share_the_machine() -> None:
    one = plan_of("glm-5.3", weights_gib=200, tp=8, concurrency=8)
    two = plan_of("glm-5.3", weights_gib=200, tp=4, concurrency=8)
    assert (one.requests, two.requests) == (8, 4)
    assert two.weights_bytes == 2 * one.weights_bytes
    shared = plan_of("glm-5.3", weights_gib=200, tp=4, concurrency=8, shared_host_pool=True)
    assert (two.machine.host_pools, shared.machine.host_pools) == (8, 2)
    assert requests_of(shared)["host RAM"] >= 4 * requests_of(two)["host RAM"]


def test_weights_that_do_not_fit_are_the_only_finding() -> None:
    plan = plan_of("glm-5")
    assert len(plan.findings) == 1 and plan.findings[0].startswith("the weights take 173.2 GiB of a GPU")
    assert plan.pools.device_pages == plan.pools.host_pages == plan.longest_single == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ram": 0}, "--host-ram-gib is 0"),
        ({"ram": float("nan")}, "--host-ram-gib is nan"),
        ({"ram": 8}, "--host-reserve-gib is 10.0, it must be at least 0 and less than --host-ram-gib 8"),
        ({"tp": 3}, "--tp is 3, it must divide --gpus 8: use 1, 2, 4, 8"),
        (
            {"gpus": 24, "tp": 24},
            "--tp is 24, it must divide the 64 attention heads of glm-5.3: use 1, 2, 4, 8",
        ),
        ({"gpus": 0}, "--gpus is 0"),
        ({"hbm_gib": -1}, "--hbm-gib is -1"),
        ({"hbm_gib": 1e-308}, "--hbm-gib is 1e-308, it must be in 0.000001..1000000000"),
        ({"mem_fraction": 1.5}, "--mem-fraction is 1.5"),
        ({"mem_fraction": float("nan")}, "--mem-fraction is nan"),
        ({"context": 0}, "--context is 0"),
        ({"context": 2**21}, "--context is 2097152, the limit of glm-5.3 is 1048576"),
        ({"concurrency": -3}, "--concurrency is -3"),
        ({"kv_dtype": "fp4"}, "--kv-dtype is fp4"),
        ({"hot_rows": 4000}, "--hot-rows is 4000, it must be a multiple of 64 in 2048..32768"),
        ({"hot_rows": 1024}, "--hot-rows is 1024"),
        ({"query_rows": 17}, "--hot-rows is 69632"),
        ({"hit_rate": 1.1}, "--hit-rate is 1.1"),
        ({"step_ms": 0}, "--step-ms is 0"),
        ({"host_contexts": 0.5}, "--host-contexts is 0.5"),
        ({"name": "deepseek-v4-flash", "kv_dtype": "bf16"}, "--kv-dtype is bf16"),
        ({"name": "deepseek-v4-flash", "query_rows": 2}, "--query-rows is 2"),
    ],
)
def test_bad_input_names_the_option(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        plan_of(**changes)
    assert message in str(error.value)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    ram=st.floats(11, 10**5),
    hbm=st.floats(1, 1000),
    weights=st.floats(0.1, 2000),
    context=st.integers(1, 163840),
    concurrency=st.integers(1, 10**5),
    contexts=st.floats(1, 100),
    hit=st.floats(0, 1),
)
def test_any_plan_is_consistent(
    name: str,
    ram: float,
    hbm: float,
    weights: float,
    context: int,
    concurrency: int,
    contexts: float,
    hit: float,
) -> None:
    plan = plan_of(
        name,
        ram,
        weights,
        hbm_gib=hbm,
        context=context,
        concurrency=concurrency,
        host_contexts=contexts,
        hit_rate=hit,
    )
    assert min(plan.pools.host_pages, plan.pools.device_pages, plan.full_residency, plan.all_hot) >= 0
    assert plan.mix.resident + plan.mix.hot == plan.requests
    assert plan.host_bytes_total <= ram * GIB
    if not plan.findings:
        assert plan.all_hot >= plan.requests
        assert plan.longest_at_concurrency >= context
    used = plan.pools.device_pages * plan.costs.page_rows_bytes
    assert used + plan.pools.host_pages * plan.costs.page_device_bytes <= max(plan.kv_bytes, 0)
