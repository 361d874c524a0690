"""Device pages, leased resident or hot, and the rows that every host slot has on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hisparse_sgl.kernels.rows import RowFormat, row_view
from hisparse_sgl.mem_pool.layout import KVLayout

POISON = 0xFF


class DevicePool:
    """The device tensors of the layout's groups.

    `buffer` uint8 [layers, num_pages, page_bytes]: device row r of every layer lies in page r // page_size.
    `index_rows` uint8 [index layers, num_host_pages * page_size, index_row_bytes]: one indexer row a host
    slot, index layers in the order of the layout's index groups (page_size counts rows here).
    `group_pages(name)` uint8 [layers, num_host_pages, page_bytes]: a group without host memory, by host page.

    Args:
        num_pages: device pages, the null page 0 included.
        num_host_pages: host pages, the null page 0 included.
        poison: fill all but the null pages with 0xFF (NaN in every float type) instead of 0, so that a read
            of unwritten memory shows.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        num_host_pages: int,
        device: torch.device | str,
        poison: bool = False,
    ) -> None:
        for name, value in (("num_pages", num_pages), ("num_host_pages", num_host_pages)):
            if value < 2:
                raise ValueError(f"{name} is {value}, the limit is >= 2: page 0 is null, add memory")
        self.layout = layout
        self.num_pages = num_pages
        self.num_host_pages = num_host_pages
        group = layout.host_group
        self._row = group.row
        fill = POISON if poison else 0
        buffer_shape = (group.num_layers, num_pages, group.row.page_bytes)
        index_shape = (len(group.index_groups), num_host_pages * group.row.page_size, group.index_row_bytes)
        buffer = torch.full(buffer_shape, fill, dtype=torch.uint8, device=device)
        index_rows = torch.full(index_shape, fill, dtype=torch.uint8, device=device)
        # Masked reads may land on a null page and are multiplied by zero: NaN would survive that.
        buffer[:, 0] = 0
        index_rows[:, : group.row.page_size] = 0
        self._pages: dict[str, torch.Tensor] = {}
        for other in layout.device_groups:
            shape = (other.num_layers, num_host_pages, other.row.page_bytes)
            self._pages[other.name] = torch.full(shape, fill, dtype=torch.uint8, device=device)
            self._pages[other.name][:, 0] = 0
        self._buffer: torch.Tensor | None = buffer
        self._index_rows: torch.Tensor | None = index_rows

    @property
    def buffer(self) -> torch.Tensor:
        """uint8 [layers, num_pages, page_bytes]. ValueError after `close()`."""
        return _open(self._buffer, "buffer")

    @property
    def index_rows(self) -> torch.Tensor:
        """uint8 [index layers, num_host_pages * page_size, index_row_bytes]. ValueError after `close()`."""
        return _open(self._index_rows, "index_rows")

    def layer(self, layer: int) -> torch.Tensor:
        """uint8 [num_pages, page_bytes], a view of one layer."""
        return self.buffer[layer]

    def rows(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """[num_pages * page_size, row bytes / item size] view of one layer, indexed by device row.

        ValueError for rows in two parts or with page padding (their bytes are not adjacent), and for a dtype
        that does not divide the row.
        """
        return _rows(self.layer(layer), self._row, dtype, "layer()")

    def write_rows(self, layer: int, rows: torch.Tensor, data: torch.Tensor) -> None:
        """Writes `data` uint8 [n, row bytes] to device rows, int64 [n], in each part's place."""
        fmt, start = self._row, 0
        for part, width in enumerate(fmt.parts):
            target = row_view(self.layer(layer), fmt, part)
            target[rows // fmt.page_size, rows % fmt.page_size] = data[:, start : start + width]
            start += width

    def group_pages(self, name: str) -> torch.Tensor:
        """uint8 [layers, num_host_pages, page_bytes] of a group without host memory, else ValueError."""
        _open(self._buffer, "group_pages")
        if name not in self._pages:
            raise ValueError(f"name is {name!r}, the limit is a group on the device: {sorted(self._pages)}")
        return self._pages[name]

    def group_rows(self, name: str, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """[host slots // tokens_per_row, row bytes / item size]: one layer of such a group, by row slot.

        ValueError as for `rows`, and for a layer that the group does not have.
        """
        pages = self.group_pages(name)
        if not 0 <= layer < pages.shape[0]:
            raise ValueError(
                f"layer is {layer}, the limit is 0..{pages.shape[0] - 1}: give a layer of {name}"
            )
        row = next(group.row for group in self.layout.device_groups if group.name == name)
        return _rows(pages[layer], row, dtype, "group_pages()")

    def poison_pages(self, pages: Sequence[int]) -> None:
        """Fills the pages with 0xFF in every layer, so that a read before the next write shows as NaN."""
        outside = [page for page in pages if not 0 < page < self.num_pages]
        if outside:
            raise ValueError(f"pages has {outside}, the limit is 1..{self.num_pages - 1}: give leased pages")
        index = torch.tensor(list(pages), dtype=torch.int64, device=self.buffer.device)
        self.buffer.index_fill_(1, index, POISON)

    def close(self) -> None:
        """Drops the tensors; their memory returns to torch when no view is left. Safe to call again."""
        self._buffer = self._index_rows = None
        self._pages = {}


def _rows(pages: torch.Tensor, row: RowFormat, dtype: torch.dtype, instead: str) -> torch.Tensor:
    row_bytes = row.row_bytes
    if len(row.parts) != 1 or row.page_bytes != row.page_size * row_bytes:
        raise ValueError(
            f"row has parts {row.parts} in pages of {row.page_bytes} bytes, the limit is one part without "
            f"padding: address the bytes of {instead}"
        )
    if row_bytes % dtype.itemsize:
        raise ValueError(f"dtype is {dtype}, the limit is a divisor of {row_bytes} bytes: use torch.uint8")
    return pages.view(-1, row_bytes).view(dtype)


def _open(tensor: torch.Tensor | None, name: str) -> torch.Tensor:
    if tensor is None:
        raise ValueError(f"{name} was read, the limit is before close(): make a new DevicePool")
    return tensor
