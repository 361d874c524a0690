"""docs/replay.md names every option, every default rate and every figure."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from hisparse_sgl.cli import build_app, run
from hisparse_sgl.replay.clock import Rates
from hisparse_sgl.replay.setup import Setup

typer = pytest.importorskip("typer", reason="the command line needs the extra tools")

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "replay.md").read_text()


def options() -> dict[str, str]:
    """Parameter name -> option, of the command as typer built it."""
    command = typer.main.get_command(build_app()).commands["replay"]  # type: ignore[attr-defined]
    return {p.name: p.opts[0] for p in command.params if p.opts[0].startswith("--")}


def test_every_option_is_described() -> None:
    described = set(re.findall(r"`(--[a-z-]+)`", TEXT))
    assert set(options().values()) - {"--help"} <= described
    assert described <= {*options().values(), "--no-clock"}


def test_default_rates_are_those_of_the_code() -> None:
    names = options()
    for field in fields(Rates):
        row = re.search(rf"\| `{names[field.name]}` \| ([\d.,]+) \|", TEXT)
        assert row is not None, field.name
        assert float(row[1].replace(",", "")) == field.default


def test_default_sizes_are_those_of_the_code() -> None:
    setup = Setup()
    assert f"`--host-pages` | {setup.host.gib:g} GiB |" in TEXT
    assert f"`--device-pages` | {setup.device.gib:g} GiB |" in TEXT
    model = setup.model
    assert f"| {model.layers}, {model.row_bytes}, {model.top_k:,}, {model.hot_rows:,} |" in TEXT


def test_every_figure_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--demo", "--limit", "20", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    sizes = {"policy", "host_pages", "host_gib", "device_pages", "device_gib"}
    missing = [key for key in result.keys() - sizes if f"`{key}`" not in TEXT]
    assert missing == []
