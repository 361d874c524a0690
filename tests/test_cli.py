"""The command line: exit codes, what goes to which stream, one line for bad input."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse_sgl.capacity.builtin import BUILT_IN
from hisparse_sgl.cli import run

ROOT = Path(__file__).resolve().parents[1]
FITS = ["glm-5.3", "--host-ram-gib", "2048", "--concurrency", "16"]


def test_a_plan_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *FITS]) == 0
    out, err = capsys.readouterr()
    assert "51,168 B" in out and "first: host RAM" in out and err == ""


def test_json_is_the_same_bytes_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert run(["plan", *FITS, "--format", "json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["findings"] == []


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_model_can_be_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", name.upper(), "--gpus", "16", "--host-ram-gib", "4096", "--concurrency", "4"]) == 0
    assert BUILT_IN[name].label in capsys.readouterr().out


def test_a_finding_is_exit_code_1_and_the_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "glm-5.3", "--host-ram-gib", "64", "--format", "json"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("hisparse-sgl: finding: host RAM: 1 requests of 131072 tokens fit")
    assert len(json.loads(out)["findings"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "glm-5.3"], "--host-ram-gib"),
        (["plan"], "model"),
        (["plan", "glm-5.3", "--host-ram-gib", "0"], "--host-ram-gib is 0.0"),
        (["plan", "glm-5.3", "--host-ram-gib", "much"], "--host-ram-gib"),
        (["plan", "glm-5.3", "--host-ram-gib", "1024", "--tp", "3"], "--tp is 3"),
        (["plan", "glm-5.3", "--host-ram-gib", "1024", "--tp", "0"], "--tp is 0"),
        (["plan", "glm-5.3", "--host-ram-gib", "1024", "--weights-gib", "0"], "--weights-gib is 0"),
        (["plan", "glm-5.3", "--host-ram-gib", "1024", "--kv-dtype", "int3"], "--kv-dtype"),
        (["plan", "no/such/config.json", "--host-ram-gib", "1024"], "no/such/config.json: No such file"),
        (
            ["config", "deepseek-v4-pro", "--host-ram-gib", "2048"],
            "MODEL is deepseek-v4-pro, the plugin serves DSA models",
        ),
        (["nothing"], "nothing"),
        (["plan", "--nothing"], "--nothing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("hisparse-sgl: error: ")
    assert message.lower() in err.lower()


def test_config_is_ready_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", *FITS]) == 0
    line = capsys.readouterr().out
    assert run(["config", *FITS, "--format", "json"]) == 0
    value = capsys.readouterr().out.strip()
    echoed = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' $(printf '%s' {shlex.quote(line)})"],
        capture_output=True,
        text=True,
        check=True,
    )
    words = echoed.stdout.splitlines()
    assert words == line.split()
    assert words[words.index("--hisparse-config") + 1] == value
    assert json.loads(value)["host_to_device_ratio"] == 10


def test_config_prints_no_flags_that_do_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "glm-5.3", "--host-ram-gib", "2048", "--concurrency", "40"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hisparse-sgl: finding: no host_to_device_ratio serves 40 requests")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["plan", "--help"], ["config", "--help"]])
def test_help_shows_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert ("Example:" in out and "hisparse-sgl" in out) if len(arguments) == 2 else "config" in out


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_names_the_fix(missing: str) -> None:
    hide = f"import sys; sys.modules[{missing!r}] = None; "
    done = run_python(hide + "from hisparse_sgl.cli import main; main(['plan', 'glm-5.3'])")
    assert (done.returncode, done.stdout) == (2, "")
    advice = f"pip install {missing}, or '.[tools]' in the checkout"
    assert done.stderr == f"hisparse-sgl: error: {missing} is missing: {advice}\n"


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys; from hisparse_sgl.cli import run; "
        "code = run(['plan', 'glm-5.3', '--host-ram-gib', '2048', '--concurrency', '16']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_standard_output_that_cannot_be_written_is_bad_input() -> None:
    code = "from hisparse_sgl.cli import main; main()"
    command = [sys.executable, "-c", code, "config", *FITS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"hisparse-sgl: error: standard output: No space left on device")
    assert done.stderr.count(b"\n") == 1


def test_a_reader_that_leaves_early_sees_no_traceback() -> None:
    code = "from hisparse_sgl.cli import main; main()"
    command = [sys.executable, "-c", code, "config", *FITS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writer)
    assert done.stderr == b""


def test_brackets_in_the_name_of_a_model_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "[b]m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BUILT_IN["glm-5.3"].config))
    assert run(["plan", str(folder), *FITS[1:]]) == 0
    assert "[b]m: one engine" in capsys.readouterr().out
