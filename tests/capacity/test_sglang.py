"""The ratio and the flags for SGLang 0.5.23, with the plugin and with its own HiSparse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hisparse_sgl.capacity.builtin import BUILT_IN
from hisparse_sgl.capacity.inputs import GIB, Machine, Workload
from hisparse_sgl.capacity.plan import Plan, make_plan
from hisparse_sgl.capacity.sglang import (
    Cell,
    hisparse_config,
    hot_regions,
    launch_flags,
    plugin_pages_needed,
    plugin_refusal,
)


def plan_of(name: str, ram: float, concurrency: int, weights_gib: float = 692, **changes: Any) -> Plan:
    model = BUILT_IN[name].shape(name)
    machine = Machine(8, 8, 140, ram)
    workload = Workload(**{"context": 131072, "concurrency": concurrency, **changes})
    return make_plan(model, machine, workload, int(weights_gib * GIB))


@pytest.mark.parametrize("name", ["glm-5.3", "deepseek-v3.2", "deepseek-v4-pro"])
def test_the_ratio_of_stock_serves_the_requests_and_a_smaller_one_does_not(name: str) -> None:
    plan = plan_of(name, 2048, 16)
    found = plan.stock
    assert found.ratio >= 2
    assert found.host_tokens - plan.costs.page_tokens >= 16 * 131072
    assert found.device_bytes <= plan.kv_bytes
    assert found.host_bytes * 8 <= (2048 - 10) * GIB
    if found.ratio > 2:
        cell = Cell.stock(plan.model, plan.costs)
        fewer = cell.device_tokens(plan.kv_bytes, found.ratio - 1)
        assert cell.pools(fewer, found.ratio - 1).host_tokens < 16 * 131072


@pytest.mark.parametrize(("name", "ram"), [("glm-5.3", 2048), ("glm-5.3", 1536), ("deepseek-v3.2", 1536)])
def test_the_ratio_of_the_plugin_holds_prefixes_as_far_as_it_can(name: str, ram: float) -> None:
    plan = plan_of(name, ram, 16)
    cell, found, page = Cell.plugin(plan.costs), plan.plugin, plan.costs.page_tokens

    def pools(ratio: int) -> Any:
        return cell.pools(cell.device_tokens(plan.kv_bytes, ratio), ratio)

    def serves(ratio: int) -> bool:
        at = pools(ratio)
        needed = plugin_pages_needed(plan.costs, 16, hot_regions(plan.costs, at, 16))
        return at.host_bytes * 8 <= (ram - 10) * GIB and at.device_tokens // page + 1 >= needed

    assert found == pools(found.ratio) and serves(found.ratio)
    assert found.host_tokens - page >= 16 * 131072
    wanted = 2 * 16 * 131072
    assert found.host_tokens - page >= wanted or not serves(found.ratio + 1)
    assert pools(found.ratio - 1).host_tokens - page < wanted


def test_more_prefixes_take_a_higher_ratio() -> None:
    ratios = [plan_of("glm-5.3", 4096, 16, host_contexts=n).plugin.ratio for n in (1, 1.5, 2)]
    assert ratios == sorted(set(ratios))


def test_indexer_rows_of_every_layer_leave_stock_fewer_requests() -> None:
    plan = plan_of("glm-5.3", 2048, 32)
    assert plan.stock.ratio == 0 and not plan.findings
    assert plan.plugin.host_tokens - 64 >= 32 * 131072
    plain = plan_of("deepseek-v3.2", 2048, 16, host_contexts=1)  # no layer reuses a top-k
    assert plain.plugin == plain.stock


def test_too_little_ram_gives_no_ratio() -> None:
    plan = plan_of("glm-5.3", 300, 16)
    assert plan.stock.ratio == plan.plugin.ratio == 0


def test_regions_are_those_that_5_percent_of_the_device_pool_hold() -> None:
    plan = plan_of("glm-5.3", 4096, 2, context=1 << 18)
    region = plan.costs.hot_state_bytes(plan.costs.context_pages)
    assert region == 21 * (6 * 4096 + 2 * (1 << 18))
    pages = plan.plugin.device_tokens // 64 + 1
    most = pages * 64 * 78 * 656 * 5 // 100 // region
    assert hot_regions(plan.costs, plan.plugin, 1000) == most > 8
    small = plan.plugin._replace(device_tokens=600 * 64)
    assert hot_regions(plan.costs, small, 1000) == 8
    assert hot_regions(plan.costs, small, 3) == 3
    assert hot_regions(plan.costs, small._replace(device_tokens=200 * 64), 1000) == 200 // 64


def test_pages_that_the_plugin_needs() -> None:
    """Contexts of 2,048 pages; a hot request takes 66 and one to grow into, a region is 64 pages."""
    costs = plan_of("glm-5.3", 2048, 16).costs
    assert plugin_pages_needed(costs, 1, 8) == 1 + 2048 + 64 + 1
    assert plugin_pages_needed(costs, 16, 16) == costs.device_pages_needed(16, 2048)
    assert plugin_pages_needed(costs, 16, 8) == 1 + 8 * 67 + 7 * 2049 + 2048 + 2 * 64


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v4-pro", {}, "MODEL is deepseek-v4-pro, the plugin serves DSA models"),
        ("glm-5.3", {"query_rows": 3}, "--query-rows is 3, the plugin serves without drafts"),
    ],
)
def test_what_the_plugin_does_not_serve_has_no_ratio(
    name: str, changes: dict[str, Any], message: str
) -> None:
    plan = plan_of(name, 2048, 4, **changes)
    assert (plugin_refusal(plan.model, plan.workload) or "").startswith(message)
    assert plan.plugin.ratio == 0 < plan.stock.ratio


def test_config_is_what_the_plugin_parses() -> None:
    plan = plan_of("glm-5.3", 2048, 16)
    value = hisparse_config(plan.model, plan.costs, plan.plugin, 16)
    assert json.loads(value) == {
        "top_k": 2048,
        "device_buffer_size": 4096,
        "host_to_device_ratio": plan.plugin.ratio,
        "max_hot_requests": 16,
    }
    assert not set(value) & set(" \t\n'*?[]$`\\")  # one word of a shell, and no pattern


def test_flags_split_at_blanks_into_options_and_values() -> None:
    plan = plan_of("glm-5.3", 2048, 16)
    words = launch_flags(plan.machine, plan.workload, plan.requests, "{}").split(" ")
    assert words[:3] == ["--enable-hisparse", "--hisparse-config", "{}"]
    assert dict(zip(words[3::2], words[4::2], strict=True)) == {
        "--tp-size": "8",
        "--kv-cache-dtype": "fp8_e4m3",
        "--context-length": "131072",
        "--max-running-requests": "16",
        "--mem-fraction-static": "0.85",
    }
