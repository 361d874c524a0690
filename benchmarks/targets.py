"""The swap-in results against the figures the kernels were written to reach.

python -m benchmarks.targets benchmarks/results/swap_in.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

WHOLE_US = {(1, 190): 14, (1, 930): 25, (16, 190): 55, (64, 190): 188, (64, 930): 860}
PLAN_US = 8
RESIDENT_US = 4
OVERHEAD_US = 3
COPY_OF_MEMCPY = 0.83


class Target(NamedTuple):
    """A figure of a case and its limit; ``least`` tells on which side of it the figure has to be."""

    cell: str
    what: str
    value: float
    limit: float
    least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit


def targets(line: dict[str, Any]) -> Iterator[Target]:
    """The targets that a case has. Those of the whole swap-in hold for 656-byte rows, a 4 GiB pool with
    scattered pages, one layer and one query row."""
    cell, plan = line["cell"], line["plan_us"]["p50"]
    if line["resident"]:
        yield Target(cell, "plan, us", plan, RESIDENT_US)
        return
    yield Target(cell, "plan, us", plan, PLAN_US)
    copy, whole = line["copy_us"]["p50"], line["whole_us"]["p50"]
    yield Target(cell, "whole - plan - copy, us", round(whole - plan - copy, 2), OVERHEAD_US)
    if line["batch"] == 64 and line["misses"] in (190, 930):
        yield Target(cell, "copy of memcpy", line["copy_of_memcpy"], COPY_OF_MEMCPY, least=True)
    plain = line["parts"] == [656] and line["pool_gib"] == 4 and line["query_rows"] == 1
    plain &= line.get("layers", 1) == 1  # the results before them had one
    if plain and line["placement"] == "scattered" and (line["batch"], line["misses"]) in WHOLE_US:
        yield Target(cell, "whole, us", whole, WHOLE_US[line["batch"], line["misses"]])
    for block, peer in line.get("sglang", {}).items():
        yield Target(cell, f"whole against SGLang's block {block}, us", whole, peer["whole_us"]["p50"])


def summary(path: Path) -> str:
    """How many targets are met, and each that is not."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    found = [target for line in lines for target in targets(line)]
    missed = [target for target in found if not target.met]
    head = f"{len(found) - len(missed)} of {len(found)} targets met"
    return "\n".join([head, *(f"  {t.cell}: {t.what}: {t.value:g}, limit {t.limit:g}" for t in missed)])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.targets benchmarks/results/swap_in.jsonl")
    print(summary(Path(sys.argv[1])))
