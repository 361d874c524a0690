"""The tables of the documents list exactly what the code has."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout
from hisparse_sgl.metrics import Metric
from hisparse_sgl.pages import PageState
from hisparse_sgl.pool import HiSparsePool

DOCS = Path(__file__).resolve().parents[1] / "docs"


def table_rows(name: str, section: str = "") -> list[list[str]]:
    """Cells of every table row of a document, or of one of its sections, without headings and rulers."""
    text = (DOCS / name).read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("|--")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    return [row for row in cells if "`" in row[0]]


def make_pool() -> HiSparsePool:
    layout = KVLayout.single(1, (16,), 4, (IndexGroup(0),), 8)
    return HiSparsePool(layout, HiSparseConfig(top_k=2, context_len=16, host_pages=10, device_pages=8))


def test_configuration_lists_every_field_with_its_default() -> None:
    listed = {row[0].strip("`"): row[1].strip("`") for row in table_rows("configuration.md")}
    defaults = {f.name: "-" if f.default is MISSING else repr(f.default) for f in fields(HiSparseConfig)}
    assert {name: default.replace('"', "'") for name, default in listed.items()} == defaults


@pytest.mark.parametrize(
    ("section", "kind"), [("Counters", "counter"), ("Gauges", "gauge"), ("Histograms", "histogram")]
)
def test_metrics_lists_every_series(section: str, kind: str) -> None:
    with make_pool() as pool:
        series = {metric.name for metric in pool.metrics() if metric.kind == kind}
    listed = [row[0].strip("`") for row in table_rows("metrics.md", section)]
    assert sorted(listed) == sorted(series)


def test_metrics_lists_every_label() -> None:
    with make_pool() as pool:
        gauges = [metric for metric in pool.metrics() if metric.kind == "gauge"]
    for name, label, values in table_rows("metrics.md", "Gauges"):
        labels = [metric.labels for metric in gauges if metric.name == name.strip("`")]
        names = {key for entry in labels for key in entry}
        assert names == set(re.findall(r"`(\w+)`", label))
        assert {value for entry in labels for value in entry.values()} <= set(re.findall(r"`(\w+)`", values))


def test_the_gauges_of_pages_add_up() -> None:
    with make_pool() as pool:
        pool.admit("r", list(range(10)))
        slots = pool.extend("r", 10)
        assert isinstance(slots, torch.Tensor)

        def total(metrics: list[Metric], name: str) -> int:
            return sum(m.value for m in metrics if m.name == name and isinstance(m.value, int))

        for _ in range(3):
            pool.begin_step(["r"])
            pool.step_done()
            assert total(pool.metrics(), "hisparse:device_pages") == 7
            assert total(pool.metrics(), "hisparse:host_pages") == 9


def test_api_lists_every_public_name_of_the_pool() -> None:
    listed = {name for row in table_rows("api.md", "Calls") for name in re.findall(r"`(\w+)[(`]", row[0])}
    members = {name for name, _ in inspect.getmembers(HiSparsePool) if not name.startswith("_")}
    properties = {"device", "num_rows", "num_slots", "peak_device_pages", "peak_host_pages"}
    assert listed == members - properties


def test_api_shows_the_arguments_as_they_are() -> None:
    for row in table_rows("api.md", "Calls"):
        for name, arguments in re.findall(r"`(\w+)\(([^)]*)\)`", row[0]):
            parameters = list(inspect.signature(getattr(HiSparsePool, name)).parameters.values())[1:]
            written = [word.split("=")[0] for word in arguments.split(", ") if word]
            assert written == [("leader" if p.name == "group" else p.name) for p in parameters], name


def test_api_lists_every_reason_to_defer() -> None:
    sources = ("admission.py", "coordinator.py")
    source = "".join((DOCS.parent / "hisparse_sgl" / name).read_text() for name in sources)
    reasons = set(re.findall(r"return (?:None if .+ else )?\"([a-z ]+)\"", source))
    assert {row[0].strip("`") for row in table_rows("api.md", "Deferred")} == reasons


def test_design_lists_every_page_state() -> None:
    listed = {
        name for row in table_rows("design.md", "Life of a page") for name in re.findall(r"`(\w+)`", row[0])
    }
    assert listed >= {state.name for state in PageState}


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", path.read_text()):
            assert not target or (path.parent / target).exists(), f"{path.name}: {target}"
