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
class Shape:
    """What a kind of model allows, and the defaults for it. A hot region has rows, a page tokens."""

    context: int = LARGEST_CONTEXT  # tokens of the longest request
    tokens_per_row: int = 1
    page_sizes: tuple[int, int] = (4, 64)
    page_size: int = 16
    hot_rows: int = 48
    device_pages: int = 48


DSA = Shape()
V4 = Shape(1024, tokens_per_row=4, page_sizes=(128, 256), page_size=128, hot_rows=32, device_pages=17)


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
    shape: Shape = DSA


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends with one line on stderr and exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parse(description: str | None, argv: list[str] | None = None, shape: Shape = DSA) -> Options:
    """Reads the options, and sets TRITON_INTERPRET as the chosen kernels need it.

    Call it before torch or transformers is imported: their model classes import triton.language, which reads
    the variable only once.
    """
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument("--device-pages", type=int, default=shape.device_pages, help="device pool")
    parser.add_argument("--hot-rows", type=int, default=shape.hot_rows, help="rows of a hot region")
    parser.add_argument("--page-size", type=int, default=shape.page_size, help="tokens in a page")
    parser.add_argument("--requests", type=int, default=24, help="requests, two turns a conversation")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the conversations")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--kernels", choices=("reference", "interpreter"), help="CPU only; default reference")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen = parser.parse_args(argv)
    problem = _problem(chosen, shape)
    if problem:
        parser.error(problem)
    if chosen.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1" if chosen.kernels == "interpreter" else "0"
    kernels = chosen.kernels or ("reference" if chosen.device == "cpu" else "auto")
    return Options(**{**vars(chosen), "kernels": kernels, "shape": shape})


def _problem(chosen: argparse.Namespace, shape: Shape) -> str | None:
    """One line about the first value that cannot work: option, value, limit and fix."""
    page_size, hot_rows = chosen.page_size, chosen.hot_rows
    lowest, highest = shape.page_sizes
    if not lowest <= page_size <= highest or page_size & (page_size - 1):
        return (
            f"--page-size is {page_size}, the limit is a power of two from {lowest} to {highest}; "
            f"use {shape.page_size}"
        )
    page_rows, most = page_size // shape.tokens_per_row, shape.context // shape.tokens_per_row
    if hot_rows < TOP_K or hot_rows > most or hot_rows % page_rows:
        least = -(-TOP_K // page_rows) * page_rows
        rows = f"{page_rows} (rows of a page)" if shape.tokens_per_row > 1 else f"--page-size {page_size}"
        return (
            f"--hot-rows is {hot_rows}, the limit is a multiple of {rows} from {least} to {most}; "
            f"use {3 * least}"
        )
    least = 2 * hot_rows // page_rows + SPARE_PAGES
    if not least <= chosen.device_pages <= 100_000:
        return (
            f"--device-pages is {chosen.device_pages}, the limit is {least} to 100000 (two hot regions and a "
            f"tail); use {shape.device_pages} for contexts that lie on the device while they are prefilled"
        )
    if not 6 <= chosen.requests <= 1000:
        return f"--requests is {chosen.requests}, the limit is 6 to 1000; use 24"
    if not 0 <= chosen.seed < 2**63:
        return f"--seed is {chosen.seed}, the limit is 0 to 2**63 - 1; use 0"
    if chosen.kernels and chosen.device == "cuda":
        return f"--kernels is {chosen.kernels}, the limit is --device cpu; leave --kernels out"
    return None
