"""Runs the sessions of the documents: what they print must be what the code prints, number for number."""

from __future__ import annotations

import doctest
import io
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


def sessions(text: str) -> str:
    """The ```pycon blocks of a document; other lines are blank, so line numbers are those of the file."""
    lines, inside = [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```pycon" if fence else inside
    return "\n".join(lines)


def run(text: str, name: str) -> tuple[doctest.TestResults, str]:
    test = doctest.DocTestParser().get_doctest(sessions(text), {}, name, name, 0)
    report = io.StringIO()
    results = doctest.DocTestRunner(verbose=False).run(test, out=report.write)
    return results, report.getvalue()


@pytest.mark.parametrize(
    ("name", "least"), [("design.md", 40), ("api.md", 6), ("kernels.md", 15), ("deepseek_v4.md", 40)]
)
def test_the_sessions_of_the_documents(name: str, least: int) -> None:
    results, report = run((DOCS / name).read_text(), name)
    assert results.failed == 0, report
    assert results.attempted >= least


@pytest.mark.parametrize(
    ("shown", "changed"),
    [
        ("slots [28], device rows [5, 20]", "slots [28], device rows [5, 24]"),
        ("        2  durable             -     0", "        2  durable             2     0"),
        ("keys [9, 10, -1, -1] order [2, 3, 1, 0]", "keys [9, 10, -1, -1] order [2, 3, 0, 1]"),
        ("cached_tokens=8, resident_tokens=4", "cached_tokens=8, resident_tokens=8"),
    ],
)
def test_a_changed_number_is_noticed(shown: str, changed: str) -> None:
    text = (DOCS / "design.md").read_text()
    assert shown in text
    results, _ = run(text.replace(shown, changed), "design.md")
    assert results.failed > 0


@pytest.mark.parametrize(
    ("shown", "changed"),
    [
        ("[0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4]", "[0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 5]"),
        ("device rows [2, 4] hold [2, 4] [2, 4]", "device rows [2, 4] hold [2, 4] [2, 5]"),
        ("\n64\n", "\n88\n"),
        ("shortened_tokens=8)", "shortened_tokens=0)"),
        ("c128: device, reuse by pages, 135 a token", "c128: device, reuse by pages, 91.25 a token"),
    ],
)
def test_a_changed_number_of_the_compressed_example_is_noticed(shown: str, changed: str) -> None:
    text = (DOCS / "deepseek_v4.md").read_text()
    assert shown in text
    results, _ = run(text.replace(shown, changed), "deepseek_v4.md")
    assert results.failed > 0
