"""A free list that keeps the blocks of one request inside few 2 MiB extents."""

from __future__ import annotations

EXTENT_BYTES = 2 << 20


def extent_pages(page_bytes: int) -> int:
    """Pages in one extent: `page_bytes` is the size in bytes of one page in one layer.

    A GPU maps host memory in units of up to 2 MiB, and the number of such units that a scattered read touches
    bounds its speed.
    """
    if page_bytes < 1:
        raise ValueError(f"page_bytes is {page_bytes}, the limit is >= 1: give a page's bytes in one layer")
    return max(1, EXTENT_BYTES // page_bytes)


class Extents:
    """A `FreeQueue` over blocks 1..num_blocks-1 in extents of `extent_blocks` consecutive ids.

    Sets of small integers are the bits of Python ints. All ties go to the lowest id, so ranks that make the
    same calls get the same blocks. One call costs a fixed number of operations on ints of `extent_blocks` or
    `num_blocks / extent_blocks` bits.
    """

    def __init__(self, num_blocks: int, extent_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, the limit is >= 1: add memory")
        if extent_blocks < 1:
            raise ValueError(f"extent_blocks is {extent_blocks}, the limit is >= 1: use extent_pages()")
        self.num_blocks = num_blocks
        self.extent_blocks = extent_blocks
        num_extents = -(-num_blocks // extent_blocks)
        self._all = [(1 << extent_blocks) - 1] * num_extents
        self._all[-1] = (1 << (num_blocks - (num_extents - 1) * extent_blocks)) - 1
        self._all[0] &= ~1
        self._free = list(self._all)
        self._counts = [blocks.bit_count() for blocks in self._free]
        # Entirely free extents apart, the others by free count: their capacities differ at both ends.
        self._whole = sum(1 << extent for extent, blocks in enumerate(self._all) if blocks)
        self._buckets = [0] * extent_blocks
        self._used_buckets = 0
        self._len = num_blocks - 1

    def pop(self, near: int | None) -> int:
        """Takes out the best free block for a request whose last block is `near` (None: it has none yet).

        Order: the next one after `near` in its extent, any other one there, an entirely free extent, the
        extent with the most free blocks.
        """
        assert self._len, "no free block"
        if near is not None and self._free[near // self.extent_blocks]:
            extent, offset = divmod(near, self.extent_blocks)
            after = self._free[extent] >> offset
            bit = offset + _lowest(after) if after else _lowest(self._free[extent])
        else:
            extent = self._best_extent()
            bit = _lowest(self._free[extent])
        self._update(extent, self._free[extent] ^ (1 << bit), -1)
        return extent * self.extent_blocks + bit

    def push(self, block: int) -> None:
        """Puts a block back; it must not be free already."""
        assert 0 < block < self.num_blocks and block not in self, f"block {block} cannot become free"
        extent, bit = divmod(block, self.extent_blocks)
        self._update(extent, self._free[extent] | (1 << bit), 1)

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block: int) -> bool:
        extent, bit = divmod(block, self.extent_blocks)
        return bool(self._free[extent] >> bit & 1)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless counts, buckets and length agree with the free bits."""
        for extent, free in enumerate(self._free):
            count = free.bit_count()
            if free & ~self._all[extent] or count != self._counts[extent]:
                raise RuntimeError(f"extent {extent}: {count} free {free:#x}, counted {self._counts[extent]}")
            whole = bool(free) and free == self._all[extent]
            buckets = [n for n, members in enumerate(self._buckets) if members >> extent & 1]
            wanted = [count] if free and not whole else []
            if bool(self._whole >> extent & 1) != whole or buckets != wanted:
                raise RuntimeError(f"extent {extent} with {count} free: whole {whole}, in buckets {buckets}")
        used = sum(1 << n for n, members in enumerate(self._buckets) if members)
        if used != self._used_buckets:
            raise RuntimeError(f"buckets in use {used:#x}, marked {self._used_buckets:#x}")
        if sum(self._counts) != self._len:
            raise RuntimeError(f"{sum(self._counts)} free blocks in extents, {self._len} counted")

    def _best_extent(self) -> int:
        if self._whole:
            return _lowest(self._whole)
        return _lowest(self._buckets[self._used_buckets.bit_length() - 1])

    def _update(self, extent: int, free: int, change: int) -> None:
        self._toggle_membership(extent)
        self._free[extent] = free
        self._counts[extent] += change
        self._len += change
        self._toggle_membership(extent)

    def _toggle_membership(self, extent: int) -> None:
        count = self._counts[extent]
        if self._free[extent] == self._all[extent]:
            self._whole ^= 1 << extent
        elif count:
            self._buckets[count] ^= 1 << extent
            if self._buckets[count]:
                self._used_buckets |= 1 << count
            else:
                self._used_buckets &= ~(1 << count)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
