"""How the plugin gets into SGLang, and that it stays out where it is not wanted; in new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from launching import write_model

ROOT = Path(__file__).resolve().parents[2]
GROUP = "sglang.srt.plugins"
ENTRY = "hisparse_sgl.integrations.sglang:register"

PRELUDE = f"""
import json, logging, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import hisparse_sgl.integrations.sglang
light = [name for name in ("torch", "sglang", "pydantic") if name in sys.modules]
import conftest  # operators of torchvision
from launching import validate
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

def outcome(**flags):
    try:
        return validate(sys.argv[1], **flags).radix_cache_backend
    except BaseException as error:
        return f"{{type(error).__name__}}: {{error}}"

def hooked():
    return {{target: len(hooks) for target, hooks in HookRegistry._hooks.items()}}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """``sys.path`` entries with this package and, where it is not installed, its entry points."""
    if any(entry.value == ENTRY for entry in entry_points(group=GROUP)):
        return [str(ROOT)]
    folder = tmp_path_factory.mktemp("site")
    info = folder / "hisparse_sgl-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hisparse-sgl\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nhisparse = {ENTRY}\n")
    return [str(ROOT), str(folder)]


def run(path: list[str], model: str, code: str, **environment: str) -> Any:
    """What ``code`` prints last, as JSON, in a new process."""
    inherited = {key: value for key, value in os.environ.items() if key != "HISPARSE_SGL"}
    search = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + code, model],
        env={**inherited, "PYTHONPATH": search, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path, "glm")


def test_the_entry_point_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'[project.entry-points."{GROUP}"]\nhisparse = "{ENTRY}"\n' in text


def test_sglang_loads_the_plugin_once(path: list[str], model: str) -> None:
    found = run(
        path,
        model,
        """
start = time.perf_counter()
load_plugins()
seconds = time.perf_counter() - start
first = hooked()
hisparse_sgl.integrations.sglang.register()
HookRegistry.apply_hooks()
from hisparse_sgl.integrations.sglang import hooks, targets
targets.check_applied()
print(json.dumps({
    "light": light, "seconds": seconds, "first": first, "second": hooked(),
    "ours": [hook.target for hook in (hooks.GATE, *hooks.HOOKS)],
    "applied": sorted(HookRegistry._patched),
    "with": outcome(enable_hisparse=True), "without": outcome(),
}))
""",
    )
    assert found["light"] == []
    assert found["first"] == found["second"] == dict.fromkeys(found["ours"], 1)
    assert found["applied"] == sorted(found["ours"])
    assert found["with"] == "hisparse"
    assert found["without"] is None


def test_the_switch_leaves_sglang_alone(path: list[str], model: str) -> None:
    found = run(
        path,
        model,
        """
load_plugins()
from sglang.srt.managers import hisparse_coordinator
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
print(json.dumps({
    "hooked": hooked(), "backends": registered_radix_cache_backends(),
    "coordinator": hisparse_coordinator.HiSparseCoordinator.__module__,
    "with": outcome(enable_hisparse=True),
    "stock": outcome(enable_hisparse=True, disable_radix_cache=True),
}))
""",
        HISPARSE_SGL="0",
    )
    assert found["hooked"] == {}
    assert "hisparse" not in found["backends"]
    assert found["coordinator"] == "sglang.srt.managers.hisparse_coordinator"
    assert found["with"].startswith(
        "AssertionError: Hierarchical sparse attention currently requires --disable"
    )
    assert found["stock"] is None


def test_a_plugin_that_cannot_load_refuses_hisparse_and_nothing_else(path: list[str], model: str) -> None:
    found = run(
        path,
        model,
        """
logging.disable(logging.CRITICAL)
sys.modules["hisparse_sgl.integrations.sglang.tree"] = None
load_plugins()
from sglang.srt.managers import hisparse_coordinator
print(json.dumps({
    "hooked": hooked(), "coordinator": hisparse_coordinator.HiSparseCoordinator.__module__,
    "with": outcome(enable_hisparse=True), "without": outcome(),
}))
""",
    )
    assert list(found["hooked"]) == ["sglang.srt.arg_groups.hisparse_hook.validate_hisparse"]
    assert found["coordinator"] == "sglang.srt.managers.hisparse_coordinator"
    assert found["with"].startswith("SystemExit: hisparse_sgl does not work with this SGLang")
    assert "hisparse_sgl.integrations.sglang.tree" in found["with"]
    assert found["without"] is None
