"""Command line of the examples. Imports neither torch nor Triton, so that it can choose how Triton runs."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import NoReturn

from conversations import LARGEST_CONTEXT

TOP_K = 16
SPARE_PAGES = 4  # the null page, and the pages that a running request grows into


@dataclass(frozen=True)
class Options:
    """What the user chose; every value is checked."""

    device_pages: int
    hot_rows: int
    page_size: int
    requests: int
    seed: int
    dtype: str
    kernels: str
    device: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends with one line on stderr and exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parse(description: str | None, argv: list[str] | None = None) -> Options:
    """Reads the options, and sets TRITON_INTERPRET as the chosen kernels need it.

    Call it before torch or transformers is imported: their model classes import triton.language, which reads
    the variable only once.
    """
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument("--device-pages", type=int, default=48, help="pages of the device pool")
    parser.add_argument("--hot-rows", type=int, default=48, help="rows of the hot region of a request")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page")
    parser.add_argument("--requests", type=int, default=24, help="requests, two turns a conversation")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the conversations")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--kernels", choices=("reference", "interpreter"), help="CPU only; default reference")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen = parser.parse_args(argv)
    problem = _problem(chosen)
    if problem:
        parser.error(problem)
    if chosen.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1" if chosen.kernels == "interpreter" else "0"
    kernels = chosen.kernels or ("reference" if chosen.device == "cpu" else "auto")
    return Options(**{**vars(chosen), "kernels": kernels})


def _problem(chosen: argparse.Namespace) -> str | None:
    """One line about the first value that cannot work: option, value, limit and fix."""
    page_size, hot_rows = chosen.page_size, chosen.hot_rows
    if not 4 <= page_size <= 64 or page_size & (page_size - 1):
        return f"--page-size is {page_size}, the limit is a power of two from 4 to 64; use 16"
    if hot_rows < TOP_K or hot_rows > LARGEST_CONTEXT or hot_rows % page_size:
        least = -(-TOP_K // page_size) * page_size
        return (
            f"--hot-rows is {hot_rows}, the limit is a multiple of --page-size {page_size} from {least} to "
            f"{LARGEST_CONTEXT}; use {3 * least}"
        )
    least = 2 * hot_rows // page_size + SPARE_PAGES
    if not least <= chosen.device_pages <= 100_000:
        return (
            f"--device-pages is {chosen.device_pages}, the limit is {least} to 100000 (two hot regions and a "
            "tail); use 48 for contexts that lie on the device while they are prefilled"
        )
    if not 6 <= chosen.requests <= 1000:
        return f"--requests is {chosen.requests}, the limit is 6 to 1000; use 24"
    if not 0 <= chosen.seed < 2**63:
        return f"--seed is {chosen.seed}, the limit is 0 to 2**63 - 1; use 0"
    if chosen.kernels and chosen.device == "cuda":
        return f"--kernels is {chosen.kernels}, the limit is --device cpu; leave --kernels out"
    return None
