"""Device pages, leased resident or hot, and the indexer rows of every host slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hisparse_sgl.mem_pool.layout import KVLayout

POISON = 0xFF


class DevicePool:
    """The device tensors of the layout's host-backed group.

    `buffer` uint8 [layers, num_pages, page_bytes]: device row r of every layer lies in page r // page_size.
    `index_rows` uint8 [index layers, num_host_pages * page_size, index_row_bytes]: one indexer row a host
    slot, index layers in the order of the layout's index groups (page_size counts rows here).

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
        row_bytes = self._row.row_bytes
        if len(self._row.parts) != 1 or self._row.page_bytes != self._row.page_size * row_bytes:
            raise ValueError(
                f"row has parts {self._row.parts} in pages of {self._row.page_bytes} bytes, the limit is one "
                "part without padding: address the bytes of layer()"
            )
        if row_bytes % dtype.itemsize:
            raise ValueError(
                f"dtype is {dtype}, the limit is a divisor of {row_bytes} bytes: use torch.uint8"
            )
        return self.layer(layer).view(-1, row_bytes).view(dtype)

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


def _open(tensor: torch.Tensor | None, name: str) -> torch.Tensor:
    if tensor is None:
        raise ValueError(f"{name} was read, the limit is before close(): make a new DevicePool")
    return tensor
