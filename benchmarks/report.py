"""Where results go: one JSON line a case, with the card, the versions, the date and the command."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import torch

from hisparse_sgl.kernels.backend import HAS_TRITON, triton

RESULTS = Path(__file__).parent / "results"


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cpu_count": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__ if HAS_TRITON else None,
        "python": sys.version.split()[0],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


class Report:
    """Writes lines as they come, so that a run cut short keeps what it has."""

    def __init__(self, path: Path, device: torch.device) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.environment = environment(device)
        self.file: TextIO = path.open("w")

    def write(self, values: dict[str, Any]) -> None:
        self.file.write(json.dumps(values | {"environment": self.environment}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class Budget:
    """Seconds that a run may take."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def common_arguments(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have; results go to ``benchmarks/results/NAME.jsonl`` by default."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a size that a CPU can run: checks, no figures")
    parser.add_argument("--budget-seconds", type=float, default=540, help="start nothing after this time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    return parser


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns aligned to the right, the first to the left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
