"""Slots for the tokens of a request, in whole host pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hisparse_sgl.mem_pool.block_pool import BlockPool
from hisparse_sgl.mem_pool.extents import Extents


class TokenToKVAllocator:
    """Hands out host pages and the slots in them: slot = page * page_size + offset.

    The caller owns each request's record: `pages` (its host pages in order) and `num_tokens` (its slots in
    use). Page 0 (slots 0..page_size-1) is null. A page lives until every reference to it is dropped.
    """

    def __init__(self, num_host_pages: int, page_size: int, extent_pages: int = 1) -> None:
        if num_host_pages < 2:
            raise ValueError(
                f"num_host_pages is {num_host_pages}, the limit is >= 2: page 0 is null, add host memory"
            )
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size is {page_size}, the limit is a power of two: use one such as 64")
        if num_host_pages * page_size > 2**31:
            raise ValueError(
                f"num_host_pages is {num_host_pages}, the limit is {2**31 // page_size} for page_size "
                f"{page_size} (slots are int32): give less host memory"
            )
        self.num_host_pages = num_host_pages
        self.page_size = page_size
        self.extents = Extents(num_host_pages, extent_pages)
        self.pool = BlockPool(num_host_pages, self.extents)

    @property
    def num_free(self) -> int:
        """Host pages that can be handed out now."""
        return self.pool.num_free

    def pages_needed(self, num_tokens: int, n: int, page_count: int) -> int:
        """New pages for `n` tokens after `num_tokens` ones, in a request that holds `page_count` pages."""
        return max(0, -(-(num_tokens + n) // self.page_size) - page_count)

    def extend(self, pages: list[int], num_tokens: int, n: int) -> list[int] | None:
        """Slots for positions num_tokens .. num_tokens+n-1, in order.

        Appends the new pages to `pages`, near its last one. None, and nothing changed, when host pages are
        missing.
        """
        if not self.grow(pages, num_tokens + n):
            return None
        return self.slots(pages, num_tokens, num_tokens + n).tolist()

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Append the new pages that `num_tokens` tokens need to `pages`, near its last one.

        False, and nothing changed, when host pages are missing.
        """
        needed = self.pages_needed(num_tokens, 0, len(pages))
        if needed > self.pool.num_free:
            return False
        pages += self.pool.get_new_blocks(needed, near=pages[-1] if pages else None)
        return True

    def slots(self, pages: Sequence[int], start: int, end: int) -> np.ndarray:
        """Slots int64 [end - start] of positions start .. end-1 of a request with these pages."""
        size = self.page_size
        first, last = start // size, -(-end // size)
        table = np.array(pages[first:last], dtype=np.int64)[:, None] * size + np.arange(size)
        return table.reshape(-1)[start - first * size : end - first * size]

    def decode(self, batch: Sequence[tuple[list[int], int]]) -> list[int] | None:
        """One slot for each (pages, num_tokens) of the batch, at position num_tokens.

        Appends a new page to `pages` where one is needed. None, and nothing changed for any request, when
        host pages are missing.
        """
        needed = sum(self.pages_needed(num_tokens, 1, len(pages)) for pages, num_tokens in batch)
        if needed > self.pool.num_free:
            return None
        slots = []
        for pages, num_tokens in batch:
            if self.pages_needed(num_tokens, 1, len(pages)):
                pages += self.pool.get_new_blocks(1, near=pages[-1] if pages else None)
            index, offset = divmod(num_tokens, self.page_size)
            slots.append(pages[index] * self.page_size + offset)
        return slots

    def share(self, pages: Sequence[int]) -> None:
        """Adds one reference to each page; each must be in use."""
        self.pool.pin_blocks(pages)

    def free(self, pages: Sequence[int]) -> list[int]:
        """Drops one reference to each page; returns those that have none now and can be handed out again."""
        return self.pool.free_blocks(pages)

    def check_integrity(self) -> None:
        """Raises RuntimeError if the pool or its extents disagree with themselves."""
        self.pool.check_integrity()
        self.extents.check_integrity()
        if self.pool.num_unpinned:
            raise RuntimeError(f"{self.pool.num_unpinned} host pages are unpinned: only device pages can be")
