"""What holds for the tree as a whole: imports, layers, symlinks, no trace of the author's machine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "mem_pool", "radix")
LAYERS = {"kernels": 0, "mem_pool": 1, "radix": 2, "hisparse_sgl": 3}
HEAVY = ("torch", "triton", "transformers", "sglang")
TORCH_FREE = [
    "hisparse_sgl.coordinator",
    *(f"hisparse_sgl.mem_pool.{name}" for name in ("allocator", "block_pool", "extents", "layout", "leases")),
    *(f"hisparse_sgl.radix.{path.stem}" for path in sorted((ROOT / "radix").glob("*.py"))),
]
# Joined from halves, so that this file does not hold what it looks for.
FORBIDDEN = (
    *("/wo" + "rk/", "/fa" + "rm/", "/ro" + "ot/"),
    *("py" + "pi.org", "python" + "hosted", "download.py" + "torch"),
)


def run_python(code: str) -> str:
    """Standard output of ``code`` in a new interpreter that finds the package in this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.splitlines()


def product_files() -> list[Path]:
    return sorted(path for folder in LAYERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in FOLDERS:
        parts = ("hisparse_sgl", *parts)
    return ".".join(parts).removesuffix(".__init__")


def imports(source: str, name: str) -> Iterator[str]:
    """Modules that ``source`` imports, absolute, whether at its top, in a function or for type checkers only.

    ``from a import b`` yields ``a.b``, which covers a submodule ``b`` as well as a name ``b`` of ``a``.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(name.split(".")[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def layer_violations(source: str, name: str) -> list[str]:
    """Imports of ``source`` (module ``name``) that point to a layer above its own, or around the package."""
    own = name.split(".")[1] if name.count(".") else "hisparse_sgl"
    wrong = []
    for target in imports(source, name):
        top, *rest = target.split(".")
        part = rest[0] if rest and rest[0] in FOLDERS else "hisparse_sgl"
        upwards = top == "hisparse_sgl" and LAYERS[part] > LAYERS.get(own, LAYERS["hisparse_sgl"])
        if upwards or top in FOLDERS:
            wrong.append(f"{name} imports {target}")
    return wrong


def readme_block(language: str) -> str:
    """The first fenced block of that language in the README."""
    block = re.search(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None
    return block[1]


def test_import_of_the_package_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import hisparse_sgl; print(time.perf_counter() - t)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.2


@pytest.mark.parametrize("module", ["hisparse_sgl", *TORCH_FREE])
def test_import_leaves_heavy_packages_out(module: str) -> None:
    loaded = run_python(f"import sys, {module}; print(*(m for m in {HEAVY} if m in sys.modules))")
    assert loaded == ""


def test_every_module_imports_without_triton_sglang_and_transformers() -> None:
    modules = [module_name(path) for path in product_files() if "integrations" not in path.parts]
    assert any(name.startswith("hisparse_sgl.kernels.") for name in modules)
    run_python(
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['triton', 'sglang', 'transformers']))\n"
        "from importlib import import_module\n"
        f"for name in {modules}: import_module(name)"
    )


def test_public_names_resolve_lazily() -> None:
    code = "import hisparse_sgl as h; print(*(getattr(h, name).__name__ for name in h.__all__))"
    assert run_python(code).split() == run_python("import hisparse_sgl as h; print(*h.__all__)").split()
    run_python(
        "import hisparse_sgl\n"
        "try: hisparse_sgl.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit('an unknown name resolved')"
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_top_level_folder_is_a_committed_symlink_without_init(folder: str) -> None:
    (entry,) = git("ls-files", "-s", f"hisparse_sgl/{folder}")
    assert entry.startswith("120000 ")
    assert os.readlink(ROOT / "hisparse_sgl" / folder) == f"../{folder}"
    assert not (ROOT / folder / "__init__.py").exists()
    assert git("ls-files", folder)


def test_tracked_files_name_no_machine_and_no_registry() -> None:
    found = []
    for name in git("ls-files"):
        path = ROOT / name
        if not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [f"{name}: {word}" for word in FORBIDDEN if word in text]
    assert found == []


def test_imports_point_down_only() -> None:
    wrong = [row for path in product_files() for row in layer_violations(path.read_text(), module_name(path))]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("hisparse_sgl.kernels.gather", "from hisparse_sgl.mem_pool.layout import KVLayout"),
        ("hisparse_sgl.kernels.gather", "from ..mem_pool import layout"),
        ("hisparse_sgl.mem_pool.leases", "def f():\n    import hisparse_sgl.radix.tree"),
        ("hisparse_sgl.radix.tree", "from hisparse_sgl import HiSparsePool"),
        ("hisparse_sgl.radix.tree", "from hisparse_sgl.coordinator import Deferred"),
        ("hisparse_sgl.pool", "from kernels.gather import gather"),
    ],
)
def test_the_layer_check_sees_an_upward_import(name: str, source: str) -> None:
    assert layer_violations(source, name) != []


def test_the_layer_check_allows_a_downward_import() -> None:
    source = "from hisparse_sgl.kernels import gather\nfrom hisparse_sgl.mem_pool.layout import KVLayout"
    assert layer_violations(source, "hisparse_sgl.radix.tree") == []


def test_readme_begins_with_the_two_commands() -> None:
    commands = [line.split("#")[0].strip() for line in readme_block("bash").splitlines()]
    assert commands[:2] == ["make demo", "make test"]


def test_readme_example_runs() -> None:
    assert run_python(readme_block("python")) == "Admission(cached_tokens=32, resident_tokens=32, hot=False)"
