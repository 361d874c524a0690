"""SGLang's own scheduler on a CPU, as the tests build it, for measurements of its process."""

from __future__ import annotations

import argparse
import logging
import platform
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "sglang"), str(ROOT / "tests")]

import_module("conftest")  # declares the operators that SGLang's imports need
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from benchmarks import report  # noqa: E402
from hisparse_sgl import transfers  # noqa: E402

engine: Any = import_module("engine")  # of tests/sglang
traffic: Any = import_module("traffic")


def build_engine(stack: ExitStack, settings: Any, context: int) -> Any:
    """An engine of the tests for contexts of that length; ``stack`` closes it.

    Copies are issued as on a GPU, in place of the tests' late ones, and nothing is poisoned. Each token that
    is sampled is 5.
    """
    stack.enter_context(patch.object(engine, "CONTEXT", context))
    stack.enter_context(patch.dict(engine.MODEL, max_position_embeddings=context))
    with patch.object(engine, "StreamTransfers", transfers.Transfers):
        built = engine.Engine(settings, seed=0)
    stack.callback(built.close)
    built.forwards.sample = lambda batch: torch.full((len(batch.rids),), 5)
    if coordinator := built.scheduler.hisparse_coordinator:
        coordinator.lifecycle.pages.on_lease = None
    return built


def request(rid: str, prompt: Iterable[int], new_tokens: int) -> TokenizedGenerateReqInput:
    """A request for exactly ``new_tokens``."""
    params = SamplingParams(max_new_tokens=new_tokens, temperature=1.0, ignore_eos=True)
    params.normalize(None)
    return traffic.tokenized(rid, prompt, params, stream=False)


def common_arguments(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--label", default="", help="a word for this state of the code")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the result file")
    return parser


def open_results(name: str, arguments: argparse.Namespace) -> report.Report:
    """The result file ``name``. torch takes one thread from now on, and logs are silent."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    results = report.Report(arguments.out / name, torch.device("cpu"))
    results.environment |= {"sglang": version("sglang"), "cpu": cpu_name()}
    return results


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
