"""The pools of an SGLang 0.5.23 server with HiSparse, and the flags that ask for them.

SGLang sizes the device pool by the bytes of a token: its rows, and the indexer rows of as many tokens as
``host_to_device_ratio`` says. Stock HiSparse keeps indexer rows in every layer, our plugin where an indexer
runs. The host pool is the ratio times the device pool, one for each GPU. Sources in that release:
``model_executor/pool_configurator.py`` (bytes of a token) and ``mem_cache/pool_host/base.py`` (host pool, and
the 10 GiB it leaves free).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from hisparse_sgl.capacity.costs import Costs
from hisparse_sgl.capacity.inputs import Machine, Workload
from hisparse_sgl.capacity.model import PAGE_ROWS, ModelShape
from hisparse_sgl.config import hot_requests_within

MIN_RATIO = 2  # 1 gives no more tokens than no HiSparse at all
MAX_RATIO = 256
KV_CACHE_DTYPES = {"fp8": "fp8_e4m3", "bf16": "bfloat16"}


class SGLangPools(NamedTuple):
    """The pools of one GPU at a ratio; ratio 0: none serves the workload."""

    ratio: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Cell:
    """Device bytes of one page of tokens: ``rows``, and ``slots`` for each unit of the ratio."""

    page_tokens: int
    rows: int
    slots: int

    @classmethod
    def stock(cls, model: ModelShape, costs: Costs) -> Cell:
        """SGLang's own HiSparse: indexer rows in every layer."""
        index = model.num_layers * PAGE_ROWS * model.index_row_bytes
        return cls(costs.page_tokens, costs.page_rows_bytes, index + costs.page_other_bytes)

    @classmethod
    def plugin(cls, costs: Costs) -> Cell:
        return cls(costs.page_tokens, costs.page_rows_bytes, costs.page_device_bytes)

    def page_bytes(self, ratio: int) -> int:
        return self.rows + ratio * self.slots

    def device_tokens(self, available: int, ratio: int) -> int:
        """Tokens of the device pool in ``available`` bytes."""
        return max(available // self.page_bytes(ratio), 0) * self.page_tokens

    def pools(self, device_tokens: int, ratio: int) -> SGLangPools:
        """Both pools; the host pool has one page more."""
        pages = device_tokens // self.page_tokens
        host_pages = device_tokens * ratio // self.page_tokens + 1
        return SGLangPools(
            ratio=ratio,
            device_tokens=device_tokens,
            host_tokens=host_pages * self.page_tokens,
            device_bytes=pages * self.page_bytes(ratio),
            host_bytes=host_pages * self.rows,
        )


def stock_pools(
    model: ModelShape, machine: Machine, costs: Costs, kv_bytes: int, requests: int
) -> SGLangPools:
    """Pools of SGLang's own HiSparse, at the smallest ratio with which the host holds all contexts.

    The device must hold a hot region and a page for each request beside one whole prompt.
    """
    cell = Cell.stock(model, costs)
    context = costs.context_pages * costs.page_tokens
    hot = (costs.hot_rows + PAGE_ROWS) * model.tokens_per_row
    available = kv_bytes - requests * costs.kept_bytes
    for ratio in range(MIN_RATIO, MAX_RATIO + 1):
        pools = cell.pools(cell.device_tokens(available, ratio), ratio)
        holds = pools.host_tokens - costs.page_tokens >= requests * context
        fits = pools.host_bytes <= machine.host_budget(machine.gpus)
        if holds and fits and pools.device_tokens >= requests * hot + context:
            return pools
    return SGLangPools()


def plugin_pools(
    model: ModelShape, machine: Machine, workload: Workload, costs: Costs, kv_bytes: int, requests: int
) -> SGLangPools:
    """Pools with our plugin, at the smallest ratio whose host pool holds the contexts and prefixes wanted.

    Where RAM or the device pool do not allow that: at the largest they allow, if it holds the contexts.
    """
    best = SGLangPools()
    if plugin_refusal(model, workload):
        return best
    cell = Cell.plugin(costs)
    contexts = requests * costs.context_pages * costs.page_tokens
    for ratio in range(MIN_RATIO, MAX_RATIO + 1):
        pools = cell.pools(cell.device_tokens(kv_bytes, ratio), ratio)
        pages = pools.device_tokens // costs.page_tokens + 1
        needed = plugin_pages_needed(costs, requests, hot_regions(costs, pools, requests))
        if pages < needed or pools.host_bytes > machine.host_budget(machine.gpus):
            break  # both get worse with the ratio
        slots = pools.host_tokens - costs.page_tokens
        if slots >= contexts:
            best = pools
        if slots >= contexts * workload.host_contexts:
            break
    return best


def hot_regions(costs: Costs, pools: SGLangPools, requests: int) -> int:
    """Hot regions that the plugin gives by default: its ``max_hot_requests``."""
    pages = pools.device_tokens // costs.page_tokens + 1
    region = costs.hot_state_bytes(costs.context_pages)
    most = hot_requests_within(pages * costs.page_rows_bytes, region)
    return min(most, costs.hot_regions(requests, pages))


def plugin_pages_needed(costs: Costs, requests: int, regions: int) -> int:
    """Device pages with which ``requests`` can be admitted one by one, ``regions`` of them hot by then.

    The newest prompt is whole, beside one hot region, or two while some other request has none.
    """
    context = costs.context_pages
    hot = min(requests - 1, regions)
    whole = requests - 1 - hot
    others = hot * (costs.small_pages(context) + 1) + whole * (context + 1)
    return 1 + max(others, 1) + context + costs.hot_pages * (2 if whole else 1)


def plugin_refusal(model: ModelShape, workload: Workload) -> str | None:
    """Why the plugin does not serve this at all."""
    if model.is_v4:
        return f"MODEL is {model.name}, the plugin serves DSA models (DeepSeek V3.2, GLM-5): use one of these"
    if workload.query_rows > 1:
        return f"--query-rows is {workload.query_rows}, the plugin serves without drafts: use 1"
    return None


def hisparse_config(model: ModelShape, costs: Costs, pools: SGLangPools, requests: int) -> str:
    """The value of --hisparse-config for our plugin, without a blank."""
    fields = {
        "top_k": model.top_k,
        "device_buffer_size": costs.hot_rows,
        "host_to_device_ratio": pools.ratio,
        "max_hot_requests": hot_regions(costs, pools, requests),
    }
    return json.dumps(fields, separators=(",", ":"))


def launch_flags(machine: Machine, workload: Workload, requests: int, config: str) -> str:
    """Flags for one engine, in one line that a shell may split at its blanks."""
    flags = [
        "--enable-hisparse",
        f"--hisparse-config {config}",
        f"--tp-size {machine.tp}",
        f"--kv-cache-dtype {KV_CACHE_DTYPES[workload.kv_dtype]}",
        f"--context-length {workload.context}",
        f"--max-running-requests {requests}",
        f"--mem-fraction-static {machine.mem_fraction:g}",
    ]
    return " ".join(flags)
