"""The ratio and the flags for SGLang 0.5.23."""

from __future__ import annotations

import json

import pytest

from hisparse_sgl.capacity.builtin import BUILT_IN
from hisparse_sgl.capacity.inputs import GIB, Machine, Workload
from hisparse_sgl.capacity.plan import Plan, make_plan
from hisparse_sgl.capacity.sglang import device_tokens, hisparse_config, launch_flags, pools_at


def plan_of(name: str, ram: float, concurrency: int, weights_gib: float = 692) -> Plan:
    model = BUILT_IN[name].shape(name)
    machine = Machine(8, 8, 140, ram)
    return make_plan(model, machine, Workload(131072, concurrency), int(weights_gib * GIB))


@pytest.mark.parametrize("name", ["glm-5.3", "deepseek-v3.2", "deepseek-v4-pro"])
def test_the_ratio_serves_the_requests_and_a_smaller_one_does_not(name: str) -> None:
    plan = plan_of(name, 2048, 16)
    found = plan.sglang
    assert found.ratio >= 2
    assert found.host_tokens - plan.costs.page_tokens >= 16 * 131072
    assert found.device_bytes <= plan.kv_bytes
    assert found.host_bytes * 8 <= (2048 - 10) * GIB
    if found.ratio > 2:
        fewer = device_tokens(plan.model, plan.costs, plan.kv_bytes, found.ratio - 1)
        assert pools_at(plan.model, plan.costs, fewer, found.ratio - 1).host_tokens < 16 * 131072


def test_indexer_rows_of_every_layer_leave_sglang_fewer_requests() -> None:
    plan = plan_of("glm-5.3", 2048, 32)
    assert plan.sglang.ratio == 0 and not plan.findings


def test_too_little_ram_gives_no_ratio() -> None:
    assert plan_of("glm-5.3", 300, 16).sglang.ratio == 0


def test_config_is_what_sglang_parses() -> None:
    plan = plan_of("glm-5.3", 2048, 16)
    value = hisparse_config(plan.model, plan.costs, plan.sglang.ratio, 960)
    assert json.loads(value) == {
        "top_k": 2048,
        "device_buffer_size": 4096,
        "host_to_device_ratio": 9,
        "swap_in_block_size": 960,
    }
    assert not set(value) & set(" \t\n'*?[]$`\\")  # one word of a shell, and no pattern
    with pytest.raises(ValueError, match=r"--swap-in-block-size is 1025"):
        hisparse_config(plan.model, plan.costs, 9, 1025)


def test_flags_split_at_blanks_into_options_and_values() -> None:
    plan = plan_of("glm-5.3", 2048, 16)
    words = launch_flags(plan.model, plan.machine, plan.workload, plan.requests, "{}").split(" ")
    assert words[:4] == ["--enable-hisparse", "--disable-radix-cache", "--hisparse-config", "{}"]
    assert dict(zip(words[4::2], words[5::2], strict=True)) == {
        "--tp-size": "8",
        "--page-size": "64",
        "--kv-cache-dtype": "fp8_e4m3",
        "--context-length": "131072",
        "--max-running-requests": "16",
        "--mem-fraction-static": "0.85",
    }
