"""One whole run of an example, on few requests."""

from __future__ import annotations

import pytest
import serving
from options import Options
from tiny_models import deepseek_config

OPTIONS = Options(
    device_pages=56,
    hot_rows=48,
    page_size=16,
    requests=6,
    seed=0,
    dtype="float64",
    kernels="reference",
    device="cpu",
)


def test_an_example_shows_everything_and_every_answer_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.serve(deepseek_config(), OPTIONS) == 0
    shown = capsys.readouterr().out
    assert "yes (6 of 6)" in shown
    assert "reference on cpu, float64" in shown


def test_a_difference_ends_with_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "generate_alone", lambda model, prompt, num_tokens: [0] * num_tokens)
    monkeypatch.setattr(serving, "PREFILL_CHUNK", 512)
    assert serving.serve(deepseek_config(), OPTIONS) == 1
    assert "differ: c" in capsys.readouterr().out
