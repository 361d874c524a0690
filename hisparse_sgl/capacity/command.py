"""The commands ``plan`` and ``config``. This module needs typer; no other one of the package does."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from hisparse_sgl.capacity.builtin import ALIASES, BUILT_IN, find_built_in
from hisparse_sgl.capacity.config_file import model_shape, read_config
from hisparse_sgl.capacity.inputs import GIB, Machine, Workload, check_positive
from hisparse_sgl.capacity.model import ModelShape
from hisparse_sgl.capacity.plan import Plan, make_plan
from hisparse_sgl.capacity.render import as_json, as_table
from hisparse_sgl.capacity.sglang import hisparse_config, launch_flags, plugin_refusal

FINDING = 1


class KVDtype(str, Enum):
    fp8 = "fp8"
    bf16 = "bf16"


class WeightsDtype(str, Enum):
    bf16 = "bf16"
    fp8 = "fp8"
    fp4 = "fp4"


class PlanFormat(str, Enum):
    table = "table"
    json = "json"


class ConfigFormat(str, Enum):
    flags = "flags"
    json = "json"


def _option(help_text: str, *names: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help_text, show_default=True)


Model = Annotated[str, typer.Argument(help=f"path of a config.json or its folder, or {', '.join(BUILT_IN)}")]
HostRam = Annotated[float, _option("RAM of the machine, GiB")]
Gpus = Annotated[int, _option("GPUs of the machine")]
Tp = Annotated[int | None, _option("GPUs of one engine (tensor parallel); default: all")]
Hbm = Annotated[float, _option("memory of one GPU, GiB")]
MemFraction = Annotated[float, _option("share of it for weights and cache")]
Weights = Annotated[float | None, _option("all weights, GiB; default: counted")]
WeightsType = Annotated[WeightsDtype | None, _option("dtype to count them in; default: the model's")]
HostReserve = Annotated[float, _option("RAM to leave free, GiB")]
Shared = Annotated[bool, _option("one host pool for all GPUs of an engine", "--shared-host-pool")]
Context = Annotated[int, _option("tokens of a request, prompt and answer")]
Concurrency = Annotated[int, _option("requests at one time on the whole machine")]
KV = Annotated[KVDtype, _option("dtype of the KV rows")]
HotRows = Annotated[int | None, _option("rows of a hot region; default: twice what a step selects")]
QueryRows = Annotated[int, _option("query rows of a request in a step: drafts + 1")]
HitRate = Annotated[float, _option("share of the selected rows found in the hot region")]
StepMs = Annotated[float, _option("decode step that PCIe has to keep up with, ms")]
HostContexts = Annotated[
    float, _option("size of the host pool in contexts of all requests; over 1: prefixes")
]
Pcie = Annotated[float, _option("host to device rate of one GPU, GB/s")]
PinRate = Annotated[float, _option("rate at which host memory is pinned, GiB/s")]


def plan(
    model: Model,
    host_ram_gib: HostRam,
    gpus: Gpus = 8,
    tp: Tp = None,
    hbm_gib: Hbm = 140.0,
    mem_fraction: MemFraction = 0.85,
    weights_gib: Weights = None,
    weights_dtype: WeightsType = None,
    host_reserve_gib: HostReserve = 10.0,
    shared_host_pool: Shared = False,
    context: Context = 131072,
    concurrency: Concurrency = 32,
    kv_dtype: KV = KVDtype.fp8,
    hot_rows: HotRows = None,
    query_rows: QueryRows = 1,
    hit_rate: HitRate = 0.85,
    step_ms: StepMs = 50.0,
    host_contexts: HostContexts = 2.0,
    pcie_gb_s: Pcie = 45.0,
    pin_gib_s: PinRate = 20.8,
    output: Annotated[PlanFormat, typer.Option("--format", help="how to print it")] = PlanFormat.table,
) -> None:
    """What fits: bytes, pages, requests, the limit and the next one.

    Exit code 1: the wanted requests do not fit; standard error says why.

    \b
    Example:
      hisparse-sgl plan glm-5.3 --host-ram-gib 2048 --context 131072 --concurrency 32
    """
    machine = Machine(
        gpus,
        gpus if tp is None else tp,
        hbm_gib,
        host_ram_gib,
        mem_fraction,
        host_reserve_gib,
        shared_host_pool,
        pcie_gb_s,
        pin_gib_s,
    )
    workload = Workload(
        context, concurrency, kv_dtype.value, hot_rows, query_rows, hit_rate, step_ms, host_contexts
    )
    made = _plan(model, machine, workload, weights_gib, weights_dtype)
    if output is PlanFormat.json:
        print(as_json(made))
    else:
        from rich.console import Console

        Console(highlight=False).print(as_table(made))
    _report(made.findings)


def config(
    model: Model,
    host_ram_gib: HostRam,
    gpus: Gpus = 8,
    tp: Tp = None,
    hbm_gib: Hbm = 140.0,
    mem_fraction: MemFraction = 0.85,
    weights_gib: Weights = None,
    weights_dtype: WeightsType = None,
    host_reserve_gib: HostReserve = 10.0,
    context: Context = 131072,
    concurrency: Concurrency = 32,
    kv_dtype: KV = KVDtype.fp8,
    hot_rows: HotRows = None,
    host_contexts: HostContexts = 2.0,
    output: Annotated[
        ConfigFormat, typer.Option("--format", help="all flags, or the value of --hisparse-config alone")
    ] = ConfigFormat.flags,
) -> None:
    """The launch flags of SGLang 0.5.23 with the plugin for a plan, ready for $(...).

    Exit code 1, and nothing on standard output: no ratio serves the wanted requests.

    \b
    Example:
      sglang serve --model-path zai-org/GLM-5.3 $(hisparse-sgl config glm-5.3 --host-ram-gib 2048)
    """
    machine = Machine(gpus, gpus if tp is None else tp, hbm_gib, host_ram_gib, mem_fraction, host_reserve_gib)
    workload = Workload(context, concurrency, kv_dtype.value, hot_rows, host_contexts=host_contexts)
    made = _plan(model, machine, workload, weights_gib, weights_dtype)
    refusal = plugin_refusal(made.model, workload)
    if refusal:
        raise ValueError(refusal)
    if not made.plugin.ratio:
        _report(
            made.findings or (f"no host_to_device_ratio serves {made.requests} requests: {NO_RATIO_FIX}",)
        )
    value = hisparse_config(made.model, made.costs, made.plugin, made.requests)
    if output is ConfigFormat.json:
        print(value)
    else:
        print(launch_flags(machine, workload, made.requests, value))


NO_RATIO_FIX = (
    "the device keeps indexer rows of the whole host pool and each GPU has a host pool of its own; "
    "lower --context or --concurrency"
)


def load_model(name: str) -> ModelShape:
    """A built-in model, or the one that a config.json describes."""
    key = find_built_in(name)
    if key:
        return BUILT_IN[key].shape(key)
    path = Path(name)
    if not path.suffix and not os.path.exists(path):  # Path.exists raises for a name that is too long
        known = ", ".join(sorted([*BUILT_IN, *ALIASES]))
        raise ValueError(
            f"MODEL is {name}: no file and no built-in model; give a config.json or one of {known}"
        )
    values = read_config(path)
    folder = path if path.is_dir() else path.parent
    return model_shape(values, folder.resolve().name or name, name)


def _plan(
    name: str, machine: Machine, workload: Workload, weights_gib: float | None, dtype: WeightsDtype | None
) -> Plan:
    shape = load_model(name)
    if weights_gib is not None:
        check_positive("--weights-gib", weights_gib)
    weights = round(weights_gib * GIB) if weights_gib else shape.weight_bytes(dtype.value if dtype else None)
    return make_plan(shape, machine, workload, weights)


def _report(findings: tuple[str, ...]) -> None:
    """Print what does not fit on standard error; leave with the exit code of a finding if there is one."""
    for finding in findings:
        print(f"hisparse-sgl: finding: {finding}", file=sys.stderr)
    if findings:
        raise typer.Exit(FINDING)
