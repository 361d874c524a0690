"""Tests of the SGLang plugin, against a real SGLang: the folder is skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

# This folder is called sglang too: without SGLang it is found as a namespace package, which has no file.
_spec = importlib.util.find_spec("sglang")
HAS_SGLANG = _spec is not None and _spec.origin is not None

sys.path.insert(0, str(Path(__file__).parent))  # the helper modules of this folder

if HAS_SGLANG:
    # torchvision is built for CUDA. Its Python part registers fakes of two operators that it lacks on a CPU.
    _torchvision = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, _name):
            _torchvision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _SkippedModule(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("SGLang is not installed: see docs/sglang.md", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """A stand-in for each module of this folder that is not even imported without SGLang."""
    return None if HAS_SGLANG else _SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def plugin() -> None:
    """The hooks of the plugin, applied to the SGLang of this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from hisparse_sgl.integrations.sglang import register

    register()
    HookRegistry.apply_hooks()
