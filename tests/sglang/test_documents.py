"""docs/sglang.md and the launch scripts say what the code does."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from launching import hopper, validate, write_model
from sglang.srt.server_args import prepare_server_args

from hisparse_sgl.capacity.builtin import BUILT_IN
from hisparse_sgl.capacity.inputs import Machine, Workload
from hisparse_sgl.capacity.plan import Plan, make_plan
from hisparse_sgl.capacity.sglang import Cell, hisparse_config, launch_flags
from hisparse_sgl.integrations.sglang import targets
from hisparse_sgl.integrations.sglang.options import Options
from hisparse_sgl.integrations.sglang.validation import REFUSALS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "sglang.md").read_text()


def rows(section: str) -> list[list[str]]:
    """Cells of the rows of the first table of a section, without its head."""
    text = DOCUMENT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_options_are_listed_with_their_defaults() -> None:
    listed = {row[0].strip("`"): json.loads(row[1].strip("`")) for row in rows("Options")}
    assert listed == {name: field.default for name, field in Options.model_fields.items()}


def test_refusals_are_listed() -> None:
    assert [row[0].strip("`") for row in rows("What is refused")] == [refusal.flag for refusal in REFUSALS]


def test_the_version_range_is_stated() -> None:
    assert f"`sglang{targets.SUPPORTED}`" in DOCUMENT


def test_messages_are_those_of_the_code() -> None:
    import sglang

    sources = [*(ROOT / "hisparse_sgl").rglob("*.py"), *(ROOT / "mem_pool").glob("*.py")]
    sources.append(Path(str(sglang.__file__)).parent / "srt" / "arg_groups" / "hisparse_hook.py")
    text = "".join(path.read_text() for path in sources)
    for message, *_ in rows("Troubleshooting"):
        assert message.strip("`") in text, message


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("script", "model", "builtin"),
    [("sglang_glm5.sh", "glm", "glm-5.3"), ("sglang_deepseek_v32.sh", "deepseek_v32", "deepseek-v3.2")],
)
def test_launch_scripts_start_and_state_their_sizes(
    tmp_path: Path, script: str, model: str, builtin: str
) -> None:
    path = ROOT / "examples" / script
    environment = {**os.environ, "PYTHON": "echo", "MODEL": write_model(tmp_path, model)}
    done = subprocess.run([path], env=environment, capture_output=True, text=True, check=True)
    module, config = re.match(r"-m (\S+) .*--hisparse-config (\{.*?\})", done.stdout).groups()  # type: ignore[union-attr]
    assert module == "sglang.launch_server"
    arguments = done.stdout.replace(config, "CONFIG").split()[2:]
    with hopper():
        settings: Any = prepare_server_args([config if word == "CONFIG" else word for word in arguments])
        settings.device = "cuda"
        settings.resolve_once()
        settings.check_server_args()
    assert settings.enable_hisparse and not settings.disable_radix_cache
    plan = planned(builtin, path.read_text())
    assert stated(path.read_text()) == expected(plan)
    # The launch line leaves out what is so by default: top-k, hot rows, and as many regions as requests.
    given = Options.parse(config)
    printed = Options.parse(hisparse_config(plan.model, plan.costs, plan.plugin, plan.requests))
    assert given.host_to_device_ratio == printed.host_to_device_ratio
    assert given.hot_rows(plan.model.top_k) == printed.hot_rows(plan.model.top_k)
    assert printed.max_hot_requests == plan.requests
    flags = launch_flags(plan.machine, plan.workload, plan.requests, "CONFIG").split()
    assert set(zip(flags[1::2], flags[2::2], strict=True)) <= set(itertools.pairwise(arguments))


def offline() -> ModuleType:
    """The example as a module; it imports neither torch nor SGLang at its top."""
    spec = importlib.util.spec_from_file_location("sglang_offline", ROOT / "examples" / "sglang_offline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("plugin")
def test_settings_of_the_offline_example_are_accepted(tmp_path: Path) -> None:
    example = offline()
    settings = example.engine_settings(write_model(tmp_path, "glm", **example.MODEL), 32768)
    resolved = validate(settings.pop("model_path"), **settings)
    assert resolved.radix_cache_backend == "hisparse"


def test_offline_example_checks_its_conversations() -> None:
    """Second turns begin with the prompt and the answer of the first, after one shared system prompt."""
    example = offline()
    asked: list[list[list[int]]] = []

    class Engine:
        def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[Any]:
            asked.append(input_ids)
            return [{"output_ids": [7, 8], "meta_info": {"cached_tokens": 64}} for _ in input_ids]

    turns = example.converse(Engine(), Random(0), 3)
    first, second = asked
    assert [prompt[: len(start) + 2] for prompt, start in zip(second, first, strict=True)] == [
        [*start, 7, 8] for start in first
    ]
    assert len({tuple(prompt[: example.SHARED_TOKENS]) for prompt in first}) == 1
    assert turns == [(len(prompt), 64) for prompt in second]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine could run it")
def test_offline_example_says_that_it_needs_a_gpu() -> None:
    command = [sys.executable, ROOT / "examples" / "sglang_offline.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs an NVIDIA GPU" in done.stderr


def stated(text: str) -> dict[str, int]:
    """Figures in the comments of a launch script."""
    number = r"([\d,]+)"
    found = {
        "cell": rf"= {number} B$",
        "device": rf"device pool +{number} tokens",
        "host": rf"host pool +{number} tokens",
    }
    return {
        key: int(re.search(pattern, text, re.MULTILINE)[1].replace(",", ""))  # type: ignore[index]
        for key, pattern in found.items()
    }


def planned(builtin: str, text: str) -> Plan:
    """The plan of the command in the comments of a launch script."""
    command = (
        rf"hisparse-sgl config {builtin} --host-ram-gib (\d+) --host-reserve-gib (\d+) --concurrency (\d+)$"
    )
    found = re.search(command, text, re.MULTILINE)
    assert found is not None
    ram, reserve, concurrency = map(int, found.groups())
    model = BUILT_IN[builtin].shape(builtin)
    machine = Machine(8, 8, 140, ram, host_reserve_gib=reserve)
    return make_plan(model, machine, Workload(131072, concurrency), model.weight_bytes(None))


def expected(plan: Plan) -> dict[str, int]:
    """The same figures from the plan."""
    cell, pools = Cell.plugin(plan.costs), plan.plugin
    tokens = pools.device_tokens
    page = cell.page_bytes(pools.ratio)
    return {"cell": page // cell.page_tokens, "device": tokens, "host": tokens * pools.ratio}
