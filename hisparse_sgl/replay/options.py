"""The options of ``replay``, as typer reads them. This module and ``command`` need typer."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Dialect(str, Enum):
    auto = "auto"
    mooncake = "mooncake"
    qwen = "qwen"
    kvcache_simulator = "kvcache-simulator"


class Policy(str, Enum):
    lru = "lru"
    lfu = "lfu"


class Format(str, Enum):
    table = "table"
    json = "json"


def _option(text: str, *names: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text)


TraceFile = Annotated[
    str | None, typer.Argument(metavar="TRACE", help="JSONL file, plain or gzip; - reads standard input")
]
Demo = Annotated[bool, _option("replay a generated trace instead of a file", "--demo")]
DialectName = Annotated[Dialect, _option("format of the trace; auto: that of its first good line")]
BlockSize = Annotated[int | None, _option("tokens a block, where the records do not say it")]
SkipBad = Annotated[bool, _option("pass over bad lines and count them", "--skip-bad")]
Limit = Annotated[int | None, _option("read only so many requests")]

HostGib = Annotated[float, _option("host pool of one GPU's engine, GiB")]
HostPages = Annotated[str | None, _option("host pool in pages (blocks of the trace), or unlimited")]
DeviceGib = Annotated[float, _option("device pages of one GPU, GiB")]
DevicePages = Annotated[str | None, _option("device pool in pages (blocks of the trace), or unlimited")]
PolicyName = Annotated[Policy, _option("which prefix leaves the host pool first")]
MaxRequests = Annotated[int, _option("most requests at one time")]
UseClock = Annotated[
    bool | None,
    _option(
        "time every step, or let prompts through one by one without answers; default: the clock, unless the "
        "device pool is unlimited",
        "--clock/--no-clock",
    ),
]
Slowdown = Annotated[float, _option("stretch the time between arrivals by this factor")]

Layers = Annotated[int, _option("layers with KV rows")]
RowBytes = Annotated[int, _option("bytes of one token in one layer")]
TopK = Annotated[int, _option("rows that one decode step selects")]
HotRows = Annotated[int, _option("rows of one hot region")]

PrefillTokens = Annotated[float, _option("prompt tokens a second", "--prefill-tokens-per-second")]
PrefillChunk = Annotated[int, _option("most prompt tokens in one step")]
DecodeStepMs = Annotated[float, _option("decode step of an empty batch, ms")]
DecodeRequestMs = Annotated[float, _option("what each request adds to it, ms")]
SwapStepMs = Annotated[float, _option("what the swap-in kernels add to it, ms")]
GatherRate = Annotated[float, _option("gather of scattered rows from host memory, GB/s", "--gather-gb-s")]
ToDeviceRate = Annotated[float, _option("copies to the device, GB/s", "--to-device-gb-s")]
ToHostRate = Annotated[float, _option("copies to the host, GB/s", "--to-host-gb-s")]
CopyUs = Annotated[float, _option("fixed cost of one copy, microseconds; a page takes one a layer")]
HotHitRate = Annotated[float, _option("share of the rows not resident that the hot region still holds")]

SweepHost = Annotated[str | None, _option("host sizes in GiB, such as 64,256,1024", "--sweep-host-gib")]
SweepDevice = Annotated[str | None, _option("device sizes in pages, such as 512,1024")]
SweepPolicy = Annotated[str | None, _option("policies, such as lru,lfu")]
Plots = Annotated[Path | None, _option("folder for one PNG a sweep")]
Html = Annotated[Path | None, _option("file for the report as one HTML page")]
OutputFormat = Annotated[Format, _option("how to print the figures", "--format")]
