"""Choice of the implementation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch

from hisparse_sgl.kernels import backend

CPU = torch.zeros(1)


def test_cpu_takes_the_interpreter_only_when_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(backend, "INTERPRETED", True)
    assert backend.choose(CPU) == "interpreter"
    assert backend.choose(CPU, "reference") == "reference"
    monkeypatch.setattr(backend, "INTERPRETED", False)
    assert backend.choose(CPU) == "reference"


@pytest.mark.parametrize(
    ("wanted", "has_triton", "interpreted"),
    [("triton", True, False), ("triton", False, False), ("interpreter", True, False), ("cuda", True, True)],
)
def test_impossible_choices_are_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: str, has_triton: bool, interpreted: bool
) -> None:
    monkeypatch.setattr(backend, "HAS_TRITON", has_triton)
    monkeypatch.setattr(backend, "INTERPRETED", interpreted)
    with pytest.raises(ValueError, match=f"backend='{wanted}'"):
        backend.choose(CPU, wanted)


def test_check_tensor_names_what_is_wrong() -> None:
    backend.check_tensor("x", CPU, (torch.int32, torch.float32), (None,), CPU.device)
    with pytest.raises(ValueError, match=r"x\.dtype"):
        backend.check_tensor("x", CPU, torch.int32, (1,))
    with pytest.raises(ValueError, match=r"x\.shape"):
        backend.check_tensor("x", CPU, torch.float32, (2,))
    with pytest.raises(ValueError, match=r"x\.shape"):
        backend.check_tensor("x", CPU, torch.float32, (1, 1))
    with pytest.raises(ValueError, match=r"x\.device"):
        backend.check_tensor("x", CPU, torch.float32, (1,), torch.device("meta"))


def test_power_of_two() -> None:
    assert [backend.power_of_two(value) for value in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


def test_package_works_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from hisparse_sgl.kernels import gather, invalidate, resolve, scatter, translate
rows = translate.translate(torch.tensor([64, 1]), torch.tensor([0, 3], dtype=torch.int32), 64)
sys.exit(rows.tolist() != [192, 1])
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_launch_changes_the_device_only_where_it_has_to(monkeypatch: pytest.MonkeyPatch) -> None:
    current, seen = [0], []

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index or 0
        yield
        current[0] = before

    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    contexts = Mock(side_effect=entered)
    monkeypatch.setattr(torch.cuda, "device", contexts)
    kernel = {(7,): lambda *args, **meta: seen.append((current[0], args, meta))}
    backend.launch(kernel, (7,), torch.device("cuda", 0), 1, x=2)
    assert not contexts.called
    backend.launch(kernel, (7,), torch.device("cuda", 1), 3)
    assert seen == [(0, (1,), {"x": 2}), (1, (3,), {})] and contexts.call_count == 1
