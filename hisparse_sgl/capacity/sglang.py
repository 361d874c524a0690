"""How SGLang 0.5.23 sizes HiSparse pools, and the flags that ask it for a plan.

Sources in that release: ``model_executor/pool_configurator.py`` (bytes of a token),
``mem_cache/pool_host/base.py`` (host pool, and the 10 GiB it leaves free), ``mem_cache/sparsity/factory.py``
(fields of --hisparse-config). Under HiSparse it keeps indexer rows in every layer, also in those that reuse a
top-k, and one host pool for each GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from hisparse_sgl.capacity.costs import Costs
from hisparse_sgl.capacity.inputs import Machine, Workload
from hisparse_sgl.capacity.model import PAGE_ROWS, ModelShape

MIN_RATIO = 2  # 1 gives no more tokens than no HiSparse at all
MAX_RATIO = 256
MAX_BLOCK_SIZE = 1024
KV_CACHE_DTYPES = {"fp8": "fp8_e4m3", "bf16": "bfloat16"}


@dataclass(frozen=True)
class SGLangPlan:
    """The pools of SGLang 0.5.23 at the smallest ``ratio`` that serves the workload; ratio 0: none does."""

    ratio: int
    device_tokens: int
    host_tokens: int
    device_bytes: int
    host_bytes: int

    @classmethod
    def of(
        cls,
        model: ModelShape,
        machine: Machine,
        workload: Workload,
        costs: Costs,
        kv_bytes: int,
        requests: int,
    ) -> SGLangPlan:
        budget = machine.host_budget(machine.gpus)
        context = costs.context_pages * costs.page_tokens
        hot = (costs.hot_rows + PAGE_ROWS) * model.tokens_per_row
        available = kv_bytes - requests * costs.kept_bytes
        for ratio in range(MIN_RATIO, MAX_RATIO + 1):
            tokens = device_tokens(model, costs, available, ratio)
            pools = pools_at(model, costs, tokens, ratio)
            holds = pools.host_tokens - costs.page_tokens >= requests * context
            if holds and pools.host_bytes <= budget and tokens >= requests * hot + context:
                return pools
        return cls(0, 0, 0, 0, 0)


def index_bytes(model: ModelShape, costs: Costs) -> int:
    """Device bytes of one page of tokens besides its rows: indexer rows of every layer, and the rest."""
    return model.num_layers * PAGE_ROWS * model.index_row_bytes + costs.page_other_bytes


def device_tokens(model: ModelShape, costs: Costs, available: int, ratio: int) -> int:
    """Tokens of the device pool in ``available`` bytes, with indexer rows for ``ratio`` times as many."""
    cell = costs.page_rows_bytes + ratio * index_bytes(model, costs)
    return max(available // cell, 0) * costs.page_tokens


def pools_at(model: ModelShape, costs: Costs, tokens: int, ratio: int) -> SGLangPlan:
    """Both pools for a device pool of ``tokens``; the host pool has one page more."""
    host_tokens = (tokens * ratio // costs.page_tokens + 1) * costs.page_tokens
    pages = tokens // costs.page_tokens
    return SGLangPlan(
        ratio=ratio,
        device_tokens=tokens,
        host_tokens=host_tokens,
        device_bytes=pages * (costs.page_rows_bytes + ratio * index_bytes(model, costs)),
        host_bytes=host_tokens // costs.page_tokens * costs.page_rows_bytes,
    )


def hisparse_config(model: ModelShape, costs: Costs, ratio: int, block_size: int) -> str:
    """The value of --hisparse-config: the four fields that SGLang 0.5.23 reads, without a blank."""
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"--swap-in-block-size is {block_size}, it must be in 1..{MAX_BLOCK_SIZE}: use 960, the default"
        )
    fields = {
        "top_k": model.top_k,
        "device_buffer_size": costs.hot_rows,
        "host_to_device_ratio": ratio,
        "swap_in_block_size": block_size,
    }
    return json.dumps(fields, separators=(",", ":"))


def launch_flags(model: ModelShape, machine: Machine, workload: Workload, requests: int, config: str) -> str:
    """Flags for one engine, in one line that a shell may split at its blanks."""
    flags = [
        "--enable-hisparse",
        "--disable-radix-cache",
        f"--hisparse-config {config}",
        f"--tp-size {machine.tp}",
        f"--page-size {model.page_tokens}",
        f"--kv-cache-dtype {KV_CACHE_DTYPES[workload.kv_dtype]}",
        f"--context-length {workload.context}",
        f"--max-running-requests {requests}",
        f"--mem-fraction-static {machine.mem_fraction:g}",
    ]
    return " ".join(flags)
