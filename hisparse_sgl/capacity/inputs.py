"""What a plan is made for, checked: the machine and the work it is to do. Errors name the option."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hisparse_sgl.capacity.model import KV_DTYPES, ModelShape

GIB = 1 << 30
GB = 10**9
MAX_COUNT = 10**9
MIN_AMOUNT = 1e-6


@dataclass(frozen=True)
class Machine:
    """GPUs, memory and links. The figures of PCIe and pinning are those measured on one H200."""

    gpus: int
    tp: int
    hbm_gib: float
    host_ram_gib: float
    mem_fraction: float = 0.85
    host_reserve_gib: float = 10.0
    shared_host_pool: bool = False
    pcie_gb_s: float = 45.0
    pin_gib_s: float = 20.8

    def __post_init__(self) -> None:
        check_whole("--gpus", self.gpus)
        check_whole("--tp", self.tp)
        if self.gpus % self.tp:
            raise ValueError(
                f"--tp is {self.tp}, it must divide --gpus {self.gpus}: use {_divisors(self.gpus)}"
            )
        for option in ("hbm_gib", "host_ram_gib", "pcie_gb_s", "pin_gib_s"):
            check_positive("--" + option.replace("_", "-"), getattr(self, option))
        if not 0 < self.mem_fraction <= 1:
            raise ValueError(
                f"--mem-fraction is {self.mem_fraction}, it must be over 0 and at most 1: use 0.85"
            )
        if not 0 <= self.host_reserve_gib < self.host_ram_gib:
            raise ValueError(
                f"--host-reserve-gib is {self.host_reserve_gib}, it must be at least 0 and less than "
                f"--host-ram-gib {self.host_ram_gib}: raise --host-ram-gib or lower the reserve"
            )

    @property
    def engines(self) -> int:
        """Copies of the model, one for each ``tp`` GPUs."""
        return self.gpus // self.tp

    @property
    def host_pools(self) -> int:
        """Host pools of all engines: one a GPU, or one an engine where its ranks share it."""
        return self.engines if self.shared_host_pool else self.gpus

    def host_budget(self, pools: int) -> int:
        """Bytes that each of ``pools`` equal host pools may take."""
        return int((self.host_ram_gib - self.host_reserve_gib) * GIB) // pools


@dataclass(frozen=True)
class Workload:
    """Requests that are to run at one time and how a decode step reads their rows.

    ``host_contexts``: wanted size of the host pool, in contexts of all these requests. 1 holds the requests
    alone; what is over 1 holds prefixes that no request uses.
    """

    context: int
    concurrency: int
    kv_dtype: str = "fp8"
    hot_rows: int | None = None
    query_rows: int = 1
    hit_rate: float = 0.85
    step_ms: float = 50.0
    host_contexts: float = 2.0

    def __post_init__(self) -> None:
        check_whole("--context", self.context)
        check_whole("--concurrency", self.concurrency)
        check_whole("--query-rows", self.query_rows)
        if self.hot_rows is not None:
            check_whole("--hot-rows", self.hot_rows)
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"--kv-dtype is {self.kv_dtype}, it must be one of {', '.join(KV_DTYPES)}")
        if not 0 <= self.hit_rate <= 1:
            raise ValueError(
                f"--hit-rate is {self.hit_rate}, it must be between 0 and 1: use a share such as 0.85"
            )
        check_positive("--step-ms", self.step_ms)
        if not 1 <= self.host_contexts <= MAX_COUNT:
            raise ValueError(f"--host-contexts is {self.host_contexts}, it must be at least 1: use 2")


def check_fit(model: ModelShape, machine: Machine, workload: Workload) -> None:
    """Raise ``ValueError`` where the three contradict each other."""
    if model.num_heads is not None and model.num_heads % machine.tp:
        raise ValueError(
            f"--tp is {machine.tp}, it must divide the {model.num_heads} attention heads of {model.name}: "
            f"use {_divisors(math.gcd(machine.gpus, model.num_heads))}"
        )
    if workload.context > model.max_context:
        raise ValueError(
            f"--context is {workload.context}, the limit of {model.name} is {model.max_context} "
            "(max_position_embeddings): lower --context"
        )
    if model.is_v4 and workload.query_rows > 1:
        raise ValueError(
            f"--query-rows is {workload.query_rows}, drafts with HiSparse are for DSA models only: use 1"
        )


def check_whole(option: str, value: int) -> None:
    if not 1 <= value <= MAX_COUNT:
        raise ValueError(f"{option} is {value}, it must be a whole number in 1..{MAX_COUNT}: correct it")


def check_positive(option: str, value: float) -> None:
    if not MIN_AMOUNT <= value <= MAX_COUNT:
        raise ValueError(f"{option} is {value}, it must be in {MIN_AMOUNT:f}..{MAX_COUNT}: correct it")


def _divisors(number: int) -> str:
    most = [n for n in range(1, min(number, 64) + 1) if number % n == 0]
    return ", ".join(map(str, most))
