"""The actions of the model-based test for as long as you like: ``make soak``, or

    python tests/soak.py --steps 1000000 --seed 0

Steps come in chunks of 1,000, each with a pool and a seed of its own (every other one with rows of several
tokens), so a fault is reproduced alone: the
command is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from random import Random

import torch
from driver import Driver
from random_pools import ACTIONS

CHUNK = 1000
PROGRESS_SECONDS = 10.0


def run_chunk(seed: int, steps: int) -> None:
    """A fresh pool, ``steps`` random actions, then the end of all requests and one request alone."""
    driver, rng = Driver(seed, tokens_per_row=(1, 2, 1, 4)[seed % 4]), Random(seed)
    try:
        for _ in range(steps):
            driver.act(rng.choice(ACTIONS), rng.randrange(2**32))
        driver.drain(rng)
        driver.run_alone(rng)
        driver.drain(rng)
    except BaseException:
        print(f"seed {seed}, action {driver.seen['actions']}, {driver.config}", flush=True)
        raise
    finally:
        driver.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Random requests against the pool, checked after each step.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="how many actions (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first chunk; the next has seed + 1")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = last = time.monotonic()
    done, seed = 0, args.seed
    while done < args.steps:
        steps = min(CHUNK, args.steps - done)
        try:
            run_chunk(seed, steps)
        except Exception:
            traceback.print_exc()
            print(f"Reproduce: python tests/soak.py --seed {seed} --steps {steps}", flush=True)
            return 1
        done, seed = done + steps, seed + 1
        now = time.monotonic()
        if now - last > PROGRESS_SECONDS or done == args.steps:
            last = now
            print(
                f"{done:,} of {args.steps:,} steps, {done / (now - start):.0f}/s, next seed {seed}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
