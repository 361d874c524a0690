"""The command as a user meets it: output, exit codes, one-line errors, plots and the report."""

from __future__ import annotations

import gzip
import json
import os
import pty
import resource
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hisparse_sgl.cli import run
from hisparse_sgl.replay.generator import generate, write_jsonl
from hisparse_sgl.replay.setup import Setup
from hisparse_sgl.replay.sweep import Sweeps

pytest.importorskip("typer", reason="the command line needs the extra tools")

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "small.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(write_jsonl(generate(120, 3, requests_per_second=10.0)))))
    return str(path)


def test_json_is_equal_byte_for_byte_and_silent_on_stderr(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for _ in range(2):
        assert run(["replay", trace, "--device-pages", "200", "--format", "json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        printed.append(captured.out)
    assert printed[0] == printed[1]
    outcome = json.loads(printed[0])
    assert outcome["trace"]["requests"] == outcome["result"]["completed_requests"] == 120
    assert outcome["trace"]["name"] == "small.jsonl.gz"
    assert 0 < outcome["result"]["token_hit_rate"] <= outcome["trace"]["token_hit_rate_ceiling"]


def test_table_shows_the_figures_of_the_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", trace, "--device-pages", "200", "--sweep-device", "200,400"]
    assert run([*arguments, "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert run(arguments) == 0
    table = capsys.readouterr().out
    for text in (f"{100 * result['token_hit_rate']:.2f} %", "200 pages", "sweep: device", "TTFT p50"):
        assert text in table


def test_an_unlimited_device_needs_no_clock_unless_asked(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, timed in ([], False), (["--clock"], True):
        assert run(["replay", trace, "--device-pages", "unlimited", "--format", "json", *option]) == 0
        assert ("ttft_seconds" in json.loads(capsys.readouterr().out)["result"]) is timed


def test_demo_runs_and_shows_all_residencies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--demo", "--limit", "300", "--device-gib", "6", "--format", "json"]) == 0
    shares = json.loads(capsys.readouterr().out)["result"]["decode_time_share"]
    assert all(share > 0 for share in shares.values())


def test_a_request_that_never_fits_is_a_finding(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", trace, "--device-pages", "30", "--format", "json"]) == 1
    captured = capsys.readouterr()
    refused = json.loads(captured.out)["result"]["refused_requests"]
    assert refused > 0 and f"{refused} requests do not fit" in captured.err


class Report(HTMLParser):
    """Collects what a page refers to, and checks that its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.targets += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_sweeps_write_a_png_each_and_a_report_without_links(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra tools")
    plots, html = tmp_path / "plots", tmp_path / "report.html"
    sweeps = ["--sweep-host-gib", "16,8", "--sweep-device", "100,400", "--sweep-policy", "lru,lfu"]
    assert (
        run(["replay", trace, *sweeps, "--plots", str(plots), "--html", str(html), "--format", "json"]) == 0
    )
    outcome = json.loads(capsys.readouterr().out)
    points = outcome["sweeps"]
    assert [(p["policy"], p["host_gib"]) for p in points["host"]] == [
        *[("lru", 8), ("lru", 16)],
        *[("lfu", 8), ("lfu", 16)],
    ]
    assert [p["device_pages"] for p in points["device"]] == [100, 400]
    assert points["policy"][0] == outcome["result"]
    assert sorted(path.name for path in plots.iterdir()) == [
        "concurrency_by_device.png",
        "hit_rate_by_host.png",
        "policies.png",
    ]
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 5000 for path in plots.iterdir())
    report = Report()
    report.feed(html.read_text(encoding="utf-8"))
    assert report.open == [] and len(report.targets) == 3
    assert all(target.startswith("data:image/png;base64,") for target in report.targets)
    assert "http" not in html.read_text(encoding="utf-8")


def test_a_name_from_the_command_line_is_escaped_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "<b>&.jsonl"
    path.write_bytes(b"".join(write_jsonl(generate(5))))
    html = tmp_path / "report.html"
    assert run(["replay", str(path), "--html", str(html), "--format", "json"]) == 0
    assert "&lt;b&gt;&amp;.jsonl" in html.read_text() and "<b>" not in html.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "TRACE is missing"),
        (["missing.jsonl"], "missing.jsonl: No such file"),
        (["TRACE", "--demo"], "both given"),
        (["TRACE", "--host-gib", "0"], "--host-gib: a size of 0 GiB holds nothing"),
        (["TRACE", "--device-gib", "inf"], "--device-gib: a size of inf GiB"),
        (["TRACE", "--host-gib", "nan"], "nan GiB holds nothing"),
        (["TRACE", "--host-gib", "0.1"], "the longest request of the trace has"),
        (["TRACE", "--device-gib", "0.1"], "two hot regions and a tail take"),
        (["TRACE", "--device-pages", "many"], "--device-pages is 'many'"),
        (["TRACE", "--host-pages", "-3"], "--host-pages: a size of -3 pages holds nothing"),
        (["TRACE", "--sweep-host-gib", "8,0"], "--sweep-host-gib: a size of 0 GiB"),
        (["TRACE", "--sweep-device", "0"], "--sweep-device: a size of 0 pages"),
        (["TRACE", "--device-pages", "9" * 20], "the device pool holds 99999999999999999999 pages"),
        (["TRACE", "--host-pages", "9" * 20], "the host pool holds 99999999999999999999 pages"),
        (
            ["TRACE", "--device-pages", "20", "--no-clock"],
            "20 pages, enough for a prompt of 11",
        ),
        (["TRACE", "--sweep-host-gib", "8,,16"], "--sweep-host-gib is '8,,16'"),
        (["TRACE", "--sweep-host-gib", "0.1,64"], "the longest request of the trace has"),
        (["TRACE", "--sweep-device", "1.5"], "--sweep-device is '1.5'"),
        (["TRACE", "--sweep-policy", "fifo"], "--sweep-policy has 'fifo'"),
        (["TRACE", "--sweep-device", "64", "--no-clock"], "without the clock"),
        (["TRACE", "--plots", "TRACE"], "that is a file"),
        (["TRACE", "--plots", "p"], "--plots has nothing to draw"),
        (["TRACE", "--prefill-tokens-per-second", "0"], "prefill_tokens is 0"),
        (["TRACE", "--hot-rows", "100"], "raise hot_rows"),
        (["TRACE", "--hot-rows", "100000"], "the limit is 32768"),
        (["TRACE", "--max-requests", "0"], "max_requests is 0"),
        (["TRACE", "--max-requests", "9" * 20], "the limit is 1048576"),
        (["TRACE", "--slowdown", "0"], "slowdown is 0"),
        (["TRACE", "--limit", "0"], "--limit is 0"),
        (["TRACE", "--block-size", "64"], "hash_ids has"),
        (["TRACE", "--block-size", "0"], "--block-size is 0"),
        (["TRACE", "--dialect", "qwen"], ":1: hash_ids has"),
        (["TRACE", "--html", "no/such/folder/report.html"], "there is no folder no/such/folder"),
        (["TRACE", "--html", "/"], "--html is /: that is a folder"),
        (["TRACE", "--html", "/dev/full"], "/dev/full: No space left"),
        (["TRACE", "--plots", "p" * 300, "--sweep-policy", "lru"], "File name too long"),
        (["TRACE", "--policy", "fifo"], "fifo"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    trace: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(["replay", *(trace if word == "TRACE" else word for word in arguments)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_bad_lines_can_be_skipped_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(write_jsonl(generate(5))) + b'{"timestamp": 99, "input_')
    assert run(["replay", str(path)]) == 2
    assert f"{path}:6: " in capsys.readouterr().err
    assert run(["replay", str(path), "--skip-bad", "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["trace"]["skipped_lines"] == 1
    assert captured.err.startswith("1 bad lines skipped") and f"{path}:6: " in captured.err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--help"]) == 0
    assert "hisparse-sgl replay trace.jsonl.gz" in capsys.readouterr().out


def test_a_narrow_table_folds_its_values_and_cuts_none(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert run(["replay", trace, "--sweep-policy", "lru,lfu"]) == 0
    assert "…" not in capsys.readouterr().out


def test_brackets_in_a_name_are_shown_as_they_are(
    trace: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "[bold]t.gz"
    path.write_bytes(Path(trace).read_bytes())
    assert run(["replay", str(path), "--limit", "2"]) == 0
    assert "[bold]t.gz" in capsys.readouterr().out


def test_the_longest_prompt_that_needs_no_clock(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    longest = max(len(record["hash_ids"]) for record in generate(120, 3, requests_per_second=10.0))
    least = longest + Setup().model.hot_rows // 512 + 1
    for pages, code in ((least, 0), (least - 1, 2)):
        assert run(["replay", trace, "--no-clock", "--device-pages", str(pages)]) == code
        capsys.readouterr()


def test_sweeps_keep_all_else() -> None:
    setup = Setup()
    assert Sweeps().points(setup) == {}
    assert Sweeps(device_pages=(5,)).points(setup)["device"][0].host == setup.host


def test_progress_is_shown_on_a_terminal_and_leaves_stdout_alone(trace: str) -> None:
    master, slave = pty.openpty()
    code = "from hisparse_sgl.cli import main; main()"
    command = [sys.executable, "-c", code, "replay", trace, "--format", "json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, check=True, env=environment)
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert "requests" in shown
    assert json.loads(done.stdout)["trace"]["requests"] == 120


def test_the_command_needs_no_torch() -> None:
    code = "import sys, hisparse_sgl.replay.command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_public_conversation_trace_within_time_and_memory(public_traces: Path) -> None:
    """12,031 requests under 30 s of one core and 1 GiB, in a process of its own, imports included."""
    path = public_traces / "mooncake_conversation.jsonl"
    code = "from hisparse_sgl.cli import main; main()"
    command = [sys.executable, "-c", code, "replay", str(path), "--format", "json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    elapsed = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = json.loads(done.stdout)
    assert outcome["result"]["completed_requests"] == 12031
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30, elapsed
    assert after.ru_maxrss < 1 << 20  # KiB
