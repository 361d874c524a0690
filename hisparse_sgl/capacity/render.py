"""A plan as JSON and as a table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hisparse_sgl.capacity.builtin import BUILT_IN
from hisparse_sgl.capacity.inputs import GB, GIB
from hisparse_sgl.capacity.limits import NO_LIMIT
from hisparse_sgl.capacity.plan import Plan
from hisparse_sgl.capacity.sglang import SGLangPools, hot_regions, plugin_refusal
from hisparse_sgl.mem_pool.layout import GroupBytes

if TYPE_CHECKING:
    from rich.table import Table

MIB = 1 << 20
DIGITS = 4


def figures(plan: Plan) -> dict[str, Any]:
    """Every figure of a plan by section. Sizes are whole bytes, rates and times rounded to 4 digits."""
    return {
        "model": _model(plan),
        "groups": {group.name: _group(group) for group in plan.groups},
        **_bytes(plan),
        **_pools(plan),
        **_requests(plan),
        "sglang": {"plugin": _plugin(plan), "stock": _sglang(plan.stock)},
        "findings": list(plan.findings),
    }


def _model(plan: Plan) -> dict[str, Any]:
    model = plan.model
    entry = BUILT_IN.get(model.name)
    return {
        "name": entry.label if entry else model.name,
        "model_type": model.model_type,
        "host_layers": model.num_layers,
        "index_layers": len(model.index_groups),
        "top_k": model.top_k,
        "parameters": model.parameters,
        "source_url": entry.source_url if entry else None,
        "retrieved": entry.retrieved if entry else None,
        "weights_note": entry.weights_note if entry else None,
    }


def _group(group: GroupBytes) -> dict[str, Any]:
    """Where a group lies, what a prefix hit finds of it, and its bytes: of a token, or of a request."""
    if group.place != "request":
        sizes = {"bytes_per_token": _round(group.bytes_per_token)}
    else:
        sizes = {"bytes_per_request": group.bytes_per_request, "boundary_bytes": group.boundary_bytes}
    return {"place": group.place, "reuse": group.reuse, **sizes}


def _sglang(pools: SGLangPools) -> dict[str, Any]:
    return {
        "host_to_device_ratio": pools.ratio or None,
        "device_tokens": pools.device_tokens,
        "device_bytes": pools.device_bytes,
        "host_tokens": pools.host_tokens,
        "host_bytes_per_gpu": pools.host_bytes,
    }


def _plugin(plan: Plan) -> dict[str, Any]:
    costs, pools = plan.costs, plan.plugin
    regions = hot_regions(costs, pools, plan.requests) if pools.ratio else 0
    state = regions * costs.hot_state_bytes(costs.context_pages)
    return {**_sglang(pools), "hot_regions": regions, "hot_state_bytes": state}


def _bytes(plan: Plan) -> dict[str, Any]:
    costs, tokens = plan.costs, plan.costs.page_tokens
    return {
        "bytes_per_token": {
            "kv_rows": _round(costs.page_rows_bytes / tokens),
            "index_rows": _round(costs.page_index_bytes / tokens),
            "other_device": _round(costs.page_other_bytes / tokens),
        },
        "page": {
            "tokens": tokens,
            "kv_row_bytes": costs.page_rows_bytes,
            "device_bytes_per_host_page": costs.page_device_bytes,
        },
        "request": {
            "context_pages": costs.context_pages,
            "hot_rows": costs.hot_rows,
            "hot_region_bytes": costs.hot_region_bytes,
            "hot_state_bytes": costs.hot_state_bytes(costs.context_pages),
            "step_state_bytes": costs.step_state_bytes,
            "window_bytes": costs.window_bytes,
            "compressor_bytes": costs.compressor_bytes,
            "index_bytes": costs.context_pages * costs.page_index_bytes,
            "full_residency_bytes": costs.context_pages * costs.page_rows_bytes,
        },
    }


def _pools(plan: Plan) -> dict[str, Any]:
    costs, pools = plan.costs, plan.pools
    return {
        "device": {
            "weights_bytes": plan.weights_bytes,
            "kv_bytes": plan.kv_bytes,
            "host_slot_bytes": pools.host_pages * costs.page_device_bytes,
            "pages": pools.device_pages,
            "hot_regions": costs.hot_regions(max(plan.requests, 1), pools.device_pages),
            "tokens": max(pools.device_pages - 1, 0) * costs.page_tokens,
        },
        "host": {
            "pools": plan.machine.host_pools,
            "pages": pools.host_pages,
            "tokens": max(pools.host_pages - 1, 0) * costs.page_tokens,
            "bytes_total": plan.host_bytes_total,
            "startup_s": _round(plan.startup_s),
            "capped_by": pools.host_capped_by,
        },
    }


def _requests(plan: Plan) -> dict[str, Any]:
    return {
        "requests": {
            "engines": plan.machine.engines,
            "wanted_per_engine": plan.requests,
            "full_residency": plan.full_residency,
            "all_hot": plan.all_hot,
            "resident_at_wanted": plan.mix.resident,
            "hot_at_wanted": plan.mix.hot,
        },
        "longest_context": {
            "one_request": plan.longest_single,
            "at_wanted_concurrency": plan.longest_at_concurrency,
        },
        "pcie": {
            "bytes_per_step": plan.step_bytes,
            "step_ms": _round(plan.step_ms),
        },
        "limits": [
            {"resource": limit.resource, "requests": None if limit.requests == NO_LIMIT else limit.requests}
            for limit in plan.limits
        ],
    }


def as_json(plan: Plan) -> str:
    """The figures as JSON text, the same bytes for the same plan."""
    return json.dumps(figures(plan), indent=2, ensure_ascii=True, allow_nan=False)


def as_table(plan: Plan) -> Table:
    """The figures as a table for people."""
    from rich.markup import escape
    from rich.table import Table

    data = figures(plan)
    table = Table(
        title=f"{escape(data['model']['name'])}: one engine of {plan.machine.tp} GPUs, figures a GPU"
    )
    table.add_column("figure")
    table.add_column("value", justify="right")
    for section, rows in (
        ("Bytes of a token", _token_rows(data)),
        ("One request", _request_rows(data)),
        ("Memory", _memory_rows(data)),
        ("Requests an engine", _concurrency_rows(data)),
        ("What limits", _limit_rows(data)),
        ("SGLang 0.5.23 with the plugin", _plugin_rows(plan, data["sglang"]["plugin"])),
        ("SGLang 0.5.23's own HiSparse", _sglang_rows(data["sglang"]["stock"])),
    ):
        table.add_row(f"[bold]{section}[/bold]", "")
        for name, value in rows:
            table.add_row(f"  {name}", value)
        table.add_section()
    return table


def _token_rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    parts = data["bytes_per_token"]
    rows = [
        ("KV rows (host, and device pages)", f"{parts['kv_rows']:,} B"),
        ("indexer rows (device, for every host slot)", f"{parts['index_rows']:,} B"),
    ]
    if parts["other_device"]:
        rows.append(("C128 or draft rows (device)", f"{parts['other_device']:,} B"))
    return rows


def _request_rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    request = data["request"]
    rows = [
        ("KV rows, fully resident", _size(request["full_residency_bytes"])),
        (f"hot region of {request['hot_rows']:,} rows", _size(request["hot_region_bytes"])),
        ("state of a hot region", _size(request["hot_state_bytes"])),
        ("plan and answer of a step", _size(request["step_state_bytes"])),
        ("indexer rows", _size(request["index_bytes"])),
    ]
    if request["window_bytes"]:
        rows.append(("sliding window", _size(request["window_bytes"])))
        rows.append(("compressor state", _size(request["compressor_bytes"])))
    return rows


def _memory_rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    device, host = data["device"], data["host"]
    return [
        ("weights", _size(device["weights_bytes"])),
        ("left for the cache", _size(device["kv_bytes"])),
        ("indexer rows of the host pool", _size(device["host_slot_bytes"])),
        ("device pages", f"{device['pages']:,} = {device['tokens']:,} tokens"),
        ("hot regions, up to", f"{device['hot_regions']:,}"),
        ("host pages", f"{host['pages']:,} = {host['tokens']:,} tokens"),
        ("host pool is capped by", host["capped_by"]),
        (f"RAM of {host['pools']} host pools", _size(host["bytes_total"])),
        ("start-up: pinning", f"{host['startup_s']:,.1f} s"),
    ]


def _concurrency_rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    requests, longest, pcie = data["requests"], data["longest_context"], data["pcie"]
    return [
        ("wanted", f"{requests['wanted_per_engine']:,}"),
        ("all fully resident, up to", f"{requests['full_residency']:,}"),
        ("with hot regions, up to", f"{requests['all_hot']:,}"),
        ("wanted: resident + hot", f"{requests['resident_at_wanted']:,} + {requests['hot_at_wanted']:,}"),
        ("longest context, one request", f"{longest['one_request']:,} tokens"),
        ("longest context, wanted requests", f"{longest['at_wanted_concurrency']:,} tokens"),
        ("PCIe a decode step", f"{pcie['bytes_per_step'] / MIB:,.1f} MiB"),
        ("decode step it allows", f"{pcie['step_ms']:,.2f} ms"),
    ]


def _limit_rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    names = ("first", "next", "then")
    return [
        (
            f"{name}: {limit['resource']}",
            "no limit" if limit["requests"] is None else f"{limit['requests']:,} requests",
        )
        for name, limit in zip(names, data["limits"], strict=True)
    ]


def _plugin_rows(plan: Plan, found: dict[str, Any]) -> list[tuple[str, str]]:
    refusal = plugin_refusal(plan.model, plan.workload)
    if refusal or not found["host_to_device_ratio"]:
        return [("host_to_device_ratio", "not served" if refusal else "none serves this")]
    state = f"{found['hot_regions']:,}, state {_size(found['hot_state_bytes'])}"
    return [*_sglang_rows(found), ("hot regions, up to", state)]


def _sglang_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    if found["host_to_device_ratio"] is None:
        return [("host_to_device_ratio", "none serves this")]
    return [
        ("host_to_device_ratio", str(found["host_to_device_ratio"])),
        ("device pool", f"{found['device_tokens']:,} tokens, {found['device_bytes'] / GIB:,.2f} GiB"),
        ("host pool a GPU", f"{found['host_tokens']:,} tokens, {found['host_bytes_per_gpu'] / GB:,.2f} GB"),
    ]


def _size(count: int) -> str:
    return f"{count / GIB:,.2f} GiB" if abs(count) >= GIB else f"{count / MIB:,.2f} MiB"


def _round(value: float) -> float | int:
    rounded = round(value, DIGITS)
    return int(rounded) if rounded == int(rounded) else rounded
