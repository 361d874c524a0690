"""The cases of the swap-in benchmark, most important first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

PAGE_SIZE = 64
PLACEMENTS = ("scattered", "extents", "contiguous")
PARTS_ALIGN = 576
"""Bytes a page of two-part rows is padded to (DeepSeek V4)."""


@dataclass(frozen=True)
class Cell:
    """One case: a batch of requests that each miss exactly ``misses`` selected rows a step.

    ``parts`` bytes of a host row, ``context`` tokens a request, ``pool_gib`` size of a layer of the host
    pool, ``layers`` that the steps read in turn, ``placement`` how a request's pages lie in each. With
    ``resident`` all pages are on the device: nothing is looked up or copied. The ``query_rows`` rows of a
    request are windows on one list, each moved on by a quarter of top-k, so neighbours share three quarters.
    """

    batch: int
    misses: int
    parts: tuple[int, ...] = (656,)
    context: int = 65536
    pool_gib: float = 4
    layers: int = 1
    placement: str = "scattered"
    query_rows: int = 1
    hot_rows: int = 4096
    top_k: int = 2048
    resident: bool = False

    @property
    def name(self) -> str:
        """Unique in the list; `select` matches it."""
        tags = [f"b{self.batch}", "resident" if self.resident else f"m{self.misses}"]
        tags.append("r" + "+".join(map(str, self.parts)))
        tags.append(f"c{self.context // 1024}k")
        tags.append(f"p{self.pool_gib:g}g")
        tags.append(self.placement)
        if self.layers > 1:
            tags.append(f"l{self.layers}")
        if self.query_rows > 1:
            tags.append(f"q{self.query_rows}")
        return "-".join(tags)

    @property
    def row_bytes(self) -> int:
        return sum(self.parts)

    @property
    def selected(self) -> int:
        """Different positions that one request selects in a step."""
        return self.top_k + (self.query_rows - 1) * (self.top_k // 4)

    @property
    def bytes_per_step(self) -> int:
        """Bytes that a step copies from the host."""
        return 0 if self.resident else self.batch * self.misses * self.row_bytes

    @property
    def pool(self) -> tuple[tuple[int, ...], float, int]:
        """Cells with an equal value can share a host pool."""
        return self.parts, self.pool_gib, self.layers


def cells() -> list[Cell]:
    """About 50 cells, ordered so that a run cut short has the most telling ones, and few pools are built."""
    grid = [Cell(batch, misses) for misses in (190, 930) for batch in (1, 64, 16)]
    grid += [Cell(batch, 0, resident=True) for batch in (64, 1, 4, 16)]
    grid += [Cell(64, misses, placement="extents") for misses in (190, 930)]
    grid += [Cell(batch, misses) for misses in (2048, 0) for batch in (1, 4, 16, 64)]
    grid += [Cell(4, misses) for misses in (190, 930)]
    pairs = [(batch, misses) for batch in (1, 64) for misses in (190, 930)]
    grid += [Cell(batch, misses, query_rows=4, hot_rows=10240) for batch, misses in pairs]
    grid += [Cell(batch, misses, parts=(1152,), pool_gib=5) for batch, misses in pairs]
    grid += [Cell(batch, misses, parts=(576, 8)) for batch, misses in pairs]
    large = [Cell(64, misses, pool_gib=48) for misses in (190, 930)]
    large += [Cell(64, misses, pool_gib=48, placement="extents") for misses in (190, 930)]
    large += [Cell(1, misses, pool_gib=48) for misses in (190, 930)]
    large += [Cell(batch, misses, pool_gib=48, context=524288) for batch, misses in pairs]
    turns = [Cell(batch, misses, layers=6) for batch in (64, 16) for misses in (190, 930)]
    turns += [Cell(64, misses, layers=6, placement="extents") for misses in (190, 930)]
    turns += [Cell(1, 190, layers=6)]
    return grid + turns + large


def tiny(cell: Cell) -> Cell:
    """The cell shrunk to a size that the reference and the interpreter can run."""
    top_k = 32
    hot_rows = PAGE_SIZE * -(-2 * cell.query_rows * top_k // PAGE_SIZE)
    return replace(
        cell,
        batch=min(cell.batch, 2),
        misses=cell.misses * top_k // cell.top_k,
        context=2048,
        pool_gib=1 / 64,
        hot_rows=hot_rows,
        top_k=top_k,
    )


def select(available: Sequence[Cell], patterns: Sequence[str]) -> Iterator[Cell]:
    """The cells whose name matches one of ``patterns`` (shell style); all cells without a pattern.

    Raises:
        ValueError: a pattern matches no cell.
    """
    for pattern in patterns:
        if not any(fnmatch(cell.name, pattern) for cell in available):
            names = ", ".join(cell.name for cell in available)
            raise ValueError(f"--cells has {pattern!r}, which matches none of: {names}; correct it")
    for cell in available:
        if not patterns or any(fnmatch(cell.name, pattern) for pattern in patterns):
            yield cell
