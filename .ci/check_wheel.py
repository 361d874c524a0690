"""Check an installed wheel: it holds every product module of this checkout, and they import without extras.

Run it with ``python -I``, so that the checkout is not on ``sys.path``.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("matplotlib", "prometheus_client", "rich", "sglang", "transformers", "triton", "typer")
sys.modules.update(dict.fromkeys(EXTRAS))  # None: importing one of them fails

import hisparse_sgl  # noqa: E402


def expected_files() -> set[str]:
    """Paths inside the wheel of the tracked modules; the three linked folders lie under the package there."""
    command = ["git", "ls-files", "*.py"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = ("kernels/", "mem_pool/", "radix/")
    linked = {f"hisparse_sgl/{name}" for name in tracked if name.startswith(folders)}
    return linked | {name for name in tracked if name.startswith("hisparse_sgl/")}


def main() -> None:
    home = Path(hisparse_sgl.__file__).parent
    if home == ROOT / "hisparse_sgl":
        raise SystemExit(f"hisparse_sgl comes from the checkout ({home}), not from the wheel")
    packed = {str(path) for path in files("hisparse-sgl") or ()}
    missing = sorted((expected_files() | {"hisparse_sgl/py.typed"}) - packed)
    if missing:
        raise SystemExit(f"the wheel lacks {', '.join(missing)}")
    needs_extra = ("/integrations/", "/replay/", "/capacity/command.py")
    modules = sorted(
        name for name in packed if name.endswith(".py") and not any(part in name for part in needs_extra)
    )
    for name in modules:
        import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    for name in hisparse_sgl.__all__:
        getattr(hisparse_sgl, name)
    print(f"hisparse_sgl {hisparse_sgl.__version__}: {len(modules)} modules import without extras")


main()
