"""Random engines and traffic through SGLang's scheduler for as long as you like:

    python tests/sglang/soak_scheduler.py --runs 1000 --seed 0

Each run has an engine and a seed of its own, so a fault is reproduced alone: the command is printed, and the
exit status is 1. ``--scenario`` picks a named engine instead.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

import conftest  # noqa: E402, F401  declares the operators that SGLang's imports need
from drive import run  # noqa: E402

COUNTED = (
    "decode rows read",
    "prefill rows read",
    "host rows read",
    "retractions",
    "pages_restored",
    "hot_hits",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Random traffic through SGLang's scheduler, checked each step."
    )
    parser.add_argument("--runs", type=int, default=100, help="how many engines (default 100)")
    parser.add_argument("--steps", type=int, default=300, help="steps of traffic in each run (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; the next has seed + 1")
    parser.add_argument("--scenario", default="", help="a name of scenarios.py; none: a random engine a run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    start, seen = time.monotonic(), Counter[str]()
    for done in range(args.runs):
        try:
            seen += run(args.scenario, args.seed + done, args.steps)
        except Exception:
            traceback.print_exc()
            return 1
        counts = ", ".join(f"{seen[name]:,} {name}" for name in COUNTED)
        print(f"{done + 1} runs in {time.monotonic() - start:.0f} s: {counts}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
