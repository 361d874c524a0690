"""The plan: pools of one engine, the requests they hold, what limits them. Formulas: docs/capacity.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hisparse_sgl.capacity.costs import Costs
from hisparse_sgl.capacity.inputs import GB, GIB, Machine, Workload, check_fit
from hisparse_sgl.capacity.limits import (
    Limit,
    device_limit,
    host_limit,
    last_true,
    longest_context,
    pcie_limit,
)
from hisparse_sgl.capacity.model import ModelShape
from hisparse_sgl.capacity.sglang import SGLangPools, plugin_pools, stock_pools
from hisparse_sgl.mem_pool.layout import GroupBytes


@dataclass(frozen=True)
class Pools:
    """Pages of one engine. ``host_capped_by``: what keeps the host pool from being larger."""

    host_pages: int
    device_pages: int
    host_capped_by: str


@dataclass(frozen=True)
class Mix:
    """How ``requests`` that run at one time lie on the device."""

    resident: int
    hot: int


@dataclass(frozen=True)
class Plan:
    """All figures of one plan; sizes are for one engine's rank (one GPU) unless a name says otherwise."""

    model: ModelShape
    machine: Machine
    workload: Workload
    costs: Costs
    weights_bytes: int
    kv_bytes: int
    requests: int
    pools: Pools
    full_residency: int
    all_hot: int
    mix: Mix
    limits: tuple[Limit, ...]
    longest_single: int
    longest_at_concurrency: int
    step_bytes: int
    plugin: SGLangPools
    stock: SGLangPools

    @property
    def groups(self) -> list[GroupBytes]:
        """What each cache group of the model costs."""
        return self.model.layout(self.workload.kv_dtype).bytes_by_group()

    @property
    def step_ms(self) -> float:
        """The shortest decode step that the link allows at the wanted concurrency."""
        return self.step_bytes / (self.machine.pcie_gb_s * GB) * 1e3

    @property
    def host_bytes_total(self) -> int:
        """RAM of all host pools on the machine."""
        return self.pools.host_pages * self.costs.page_rows_bytes * self.machine.host_pools

    @property
    def startup_s(self) -> float:
        """Seconds to allocate and pin all host pools."""
        return self.host_bytes_total / (self.machine.pin_gib_s * GIB)

    @property
    def findings(self) -> tuple[str, ...]:
        """What of the wanted work does not fit; empty: all fits."""
        if self.kv_bytes <= 0:
            taken, given = self.weights_bytes / GIB, self.machine.hbm_gib * self.machine.mem_fraction
            return (
                f"the weights take {taken:.1f} GiB of a GPU, --hbm-gib x --mem-fraction is {given:.1f} GiB: "
                "raise --tp or --mem-fraction, or use a smaller --weights-dtype",
            )
        return tuple(
            f"{limit.resource}: {limit.requests} requests of {self.workload.context} tokens fit into an "
            f"engine, {self.requests} are wanted: {limit.fix}"
            for limit in self.limits
            if limit.requests < self.requests
        )


def make_plan(model: ModelShape, machine: Machine, workload: Workload, weights_bytes: int) -> Plan:
    """The plan for ``weights_bytes`` of weights in all. ``ValueError`` where inputs contradict each other."""
    check_fit(model, machine, workload)
    costs = Costs.of(model, workload)
    weights = -(-weights_bytes // machine.tp)
    kv_bytes = int(machine.hbm_gib * GIB * machine.mem_fraction) - weights
    requests = -(-workload.concurrency // machine.engines)
    ram_pages = max(machine.host_budget(machine.host_pools) // costs.page_rows_bytes, 0)
    limits = [device_limit(costs, kv_bytes), host_limit(costs, ram_pages)]
    sized_for = min(requests, *(limit.requests for limit in limits))
    wanted_pages = 1 + math.ceil(workload.host_contexts * requests * costs.context_pages)
    pools = _pools(costs, kv_bytes, sized_for, {"wanted size": wanted_pages, "host RAM": ram_pages})
    full = _full_residency(costs, pools)
    hot_budget = _hot_requests_in(costs, machine, workload)
    limits.append(pcie_limit(hot_budget, lambda n: _mix(costs, pools, n).hot))
    mix = _mix(costs, pools, requests)
    return Plan(
        model=model,
        machine=machine,
        workload=workload,
        costs=costs,
        weights_bytes=weights,
        kv_bytes=kv_bytes,
        requests=requests,
        pools=pools,
        full_residency=full,
        all_hot=_all_hot(costs, pools),
        mix=mix,
        limits=tuple(sorted(limits, key=lambda limit: limit.requests)),
        longest_single=longest_context(costs, kv_bytes, ram_pages, 1, model.max_context),
        longest_at_concurrency=longest_context(costs, kv_bytes, ram_pages, requests, model.max_context),
        step_bytes=round(mix.hot * costs.step_row_bytes * (1 - workload.hit_rate)),
        plugin=plugin_pools(model, machine, workload, costs, kv_bytes, requests),
        stock=stock_pools(model, machine, costs, kv_bytes, requests),
    )


def _pools(costs: Costs, kv_bytes: int, requests: int, caps: dict[str, int]) -> Pools:
    """Host pages up to the least of ``caps`` while the device keeps what ``requests`` need."""
    if kv_bytes <= 0:
        return Pools(0, 0, "HBM")
    if requests:
        slots = costs.page_device_bytes * (1 + requests * costs.context_pages)
        spare = kv_bytes - costs.device_bytes_needed(requests, costs.context_pages) + slots
        hbm_pages = spare // costs.page_device_bytes
    else:
        hbm_pages = kv_bytes // (costs.page_rows_bytes + costs.page_device_bytes)
    capped_by, host_pages = min([*caps.items(), ("indexer rows", hbm_pages)], key=lambda cap: cap[1])
    room = kv_bytes - host_pages * costs.page_device_bytes

    def fits(pages: int) -> bool:
        state = costs.state_bytes(max(requests, 1), pages, costs.context_pages)
        return pages * costs.page_rows_bytes + state <= room

    return Pools(host_pages, last_true(fits, max(room // costs.page_rows_bytes, 0)), capped_by)


def _watermark(costs: Costs, pools: Pools) -> int:
    return max(costs.hot_pages, pools.device_pages // 10)


def _full_residency(costs: Costs, pools: Pools) -> int:
    """Requests that run without a hot region: above the watermark, and room to admit the last of them."""
    context = costs.context_pages
    kept = (pools.device_pages - 1 - _watermark(costs, pools)) // context
    admitted = (pools.device_pages - costs.hot_pages) // (context + 1)
    return max(min(kept, admitted, (pools.host_pages - 1) // context), 0)


def _all_hot(costs: Costs, pools: Pools) -> int:
    """Most requests, all but the newest with hot regions."""
    context = costs.context_pages
    room = pools.device_pages - 1 - context - costs.hot_pages
    if room < 0:
        return 0
    return max(min(1 + room // (costs.small_pages(context) + 1), (pools.host_pages - 1) // context), 0)


def _mix(costs: Costs, pools: Pools, requests: int) -> Mix:
    """How many of ``requests`` stay whole on the device while the others read through hot regions."""
    small = costs.small_pages(costs.context_pages)
    room = pools.device_pages - 1 - _watermark(costs, pools) - requests * small
    grown = costs.context_pages - small
    resident = requests if not grown else min(max(room // grown, 0), requests)
    return Mix(resident, requests - resident)


def _hot_requests_in(costs: Costs, machine: Machine, workload: Workload) -> int | None:
    """Requests with hot regions whose misses the link carries in one step; None: any number."""
    missed = costs.step_row_bytes * (1 - workload.hit_rate)
    return int(machine.pcie_gb_s * GB * workload.step_ms / 1e3 / missed) if missed > 0 else None
