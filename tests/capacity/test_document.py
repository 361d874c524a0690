"""docs/capacity.md against the code: each worked example is evaluated and compared with its plan."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hisparse_sgl.capacity.builtin import ALIASES, BUILT_IN
from hisparse_sgl.capacity.inputs import Machine, Workload
from hisparse_sgl.capacity.model import ModelShape
from hisparse_sgl.capacity.plan import make_plan
from hisparse_sgl.capacity.render import as_json

DOCUMENT = (Path(__file__).parents[2] / "docs" / "capacity.md").read_text()
NAMES = {"floor": math.floor, "ceil": math.ceil, "min": min, "round": round}
COUNTS = {
    "model.host_layers",
    "model.index_layers",
    "model.top_k",
}  # sizes of the model, not figures of the plan


def example() -> dict[str, Any]:
    """The plan of the command in the document."""
    assert "hisparse-sgl plan glm-5.3 --host-ram-gib 2048 --context 131072 --concurrency 16" in DOCUMENT
    model: ModelShape = BUILT_IN["glm-5.3"].shape("glm-5.3")
    machine = Machine(gpus=8, tp=8, hbm_gib=140, host_ram_gib=2048)
    plan = make_plan(model, machine, Workload(131072, 16), model.weight_bytes(None))
    return json.loads(as_json(plan))


def numbers(value: Any, path: str = "") -> dict[str, float]:
    """Every number of the figures by its key; a limit by the name of its resource."""
    if isinstance(value, dict):
        if "resource" in value:
            return {f"{path}.{value['resource']}": value["requests"]}
        parts = [numbers(inner, f"{path}.{key}".lstrip(".")) for key, inner in value.items()]
        return {key: number for part in parts for key, number in part.items()}
    if isinstance(value, list):
        return {key: number for inner in value for key, number in numbers(inner, path).items()}
    return {path: value} if isinstance(value, (int, float)) else {}


def worked_examples() -> list[tuple[str, str, str]]:
    """First cell, expression and result of each table row that ends in a worked example."""
    rows = re.findall(r"^\| (.+?) \|.*\| `([^`|]+) = ([\d,.]+)` \|$", DOCUMENT, flags=re.MULTILINE)
    return [(name.strip("`"), expression, result.replace(",", "")) for name, expression, result in rows]


def test_every_worked_example_is_right() -> None:
    rows = worked_examples()
    assert len(rows) > 40
    for name, expression, result in rows:
        value = eval(expression, {"__builtins__": {}}, NAMES)
        digits = len(result.partition(".")[2])
        assert round(value, digits) == pytest.approx(float(result), abs=1e-9), name


def test_every_figure_of_the_plan_has_its_worked_example() -> None:
    found = numbers(example())
    documented = {
        name: float(result) for name, _, result in worked_examples() if "." in name and " of " not in name
    }
    assert documented.keys() == found.keys() - COUNTS
    wrong = {name: (found[name], value) for name, value in documented.items() if found[name] != value}
    assert wrong == {}


def test_the_comparison_sees_a_changed_figure() -> None:
    changed = example()
    changed["device"]["pages"] += 1
    assert numbers(changed) != numbers(example())


def test_built_in_models_are_listed_with_their_source() -> None:
    for name, entry in BUILT_IN.items():
        row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}`"))
        assert entry.source_url in row and entry.retrieved in row and entry.label in row
    assert all(f"`{alias}`" in DOCUMENT for alias in ALIASES)
