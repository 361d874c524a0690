"""Byte layout of KV rows inside the pages of one layer's buffer. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PART_ALIGN = (16, 8)
WORD_BYTES = 8


@dataclass(frozen=True)
class RowFormat:
    """How the rows of one token lie in a page.

    A layer's buffer is ``uint8 [num_pages, page_bytes]``. Page ``p`` holds the first part of its
    ``page_size`` rows, then the second part of all of them, then padding. With one part and no padding, row
    ``r`` starts at byte ``r * row_bytes``.

    Args:
        parts: bytes of each part of a row: one part, a multiple of 16, or two, the second a multiple of 8.
        page_size: rows a page, a power of two.
        page_bytes: bytes a page, padding included, a multiple of 8.

    Raises:
        ValueError: a field is out of its range.
    """

    parts: tuple[int, ...]
    page_size: int
    page_bytes: int

    def __post_init__(self) -> None:
        if len(self.parts) not in (1, 2):
            raise ValueError(f"parts={self.parts} must have 1 or 2 entries; merge the parts of a row")
        for index, (size, align) in enumerate(zip(self.parts, PART_ALIGN, strict=False)):
            if size <= 0 or size % align:
                raise ValueError(f"parts[{index}]={size} must be a positive multiple of {align}; pad the row")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size={self.page_size} must be a power of two; use 64")
        if self.page_bytes < self.page_size * self.row_bytes or self.page_bytes % WORD_BYTES:
            raise ValueError(
                f"page_bytes={self.page_bytes} must be a multiple of {WORD_BYTES} and at least "
                f"page_size * row_bytes = {self.page_size * self.row_bytes}; use RowFormat.make"
            )

    @classmethod
    def make(cls, parts: tuple[int, ...], page_size: int, align: int = 1) -> RowFormat:
        """The format whose pages are padded to the next multiple of ``align`` bytes."""
        if align < 1:
            raise ValueError(f"align={align} must be at least 1; use 1 for no padding")
        used = page_size * sum(parts)
        return cls(tuple(parts), page_size, -(-used // align) * align)

    @property
    def row_bytes(self) -> int:
        """Payload bytes of a row, all parts."""
        return sum(self.parts)

    def part_start(self, part: int) -> int:
        """Byte inside a page where the rows of ``part`` begin."""
        return self.page_size * sum(self.parts[:part])

    def offset(self, row: int, part: int = 0) -> int:
        """Byte of ``part`` of ``row`` inside a layer's buffer."""
        page, index = divmod(row, self.page_size)
        return page * self.page_bytes + self.part_start(part) + index * self.parts[part]


def row_view(buffer: torch.Tensor, fmt: RowFormat, part: int = 0) -> torch.Tensor:
    """View uint8 [..., num_pages, page_bytes] as [..., num_pages, page_size, parts[part]]. No copy."""
    start = fmt.part_start(part)
    width = fmt.parts[part]
    return buffer[..., start : start + fmt.page_size * width].unflatten(-1, (fmt.page_size, width))
