"""Reference-counted blocks; an unpinned block counts as free and stays readable until it is handed out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol


class FreeQueue(Protocol):
    """The truly free blocks, and the order in which they are handed out."""

    def pop(self, near: int | None) -> int:
        """Takes a block out, close to block `near` if the queue cares. Never called when empty."""
        ...

    def push(self, block: int) -> None: ...

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...


class FifoQueue:
    """Hands out the block that has been free the longest; ignores `near`."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    def pop(self, near: int | None) -> int:
        return self._blocks.popitem(last=False)[0]

    def push(self, block: int) -> None:
        self._blocks[block] = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks


class BlockPool:
    """Blocks 1..num_blocks-1 by reference count; block 0 is the null block and is never handed out.

    A block is referenced, truly free or unpinned. An unpinned block has no reference, counts as free and
    keeps its content until `get_new_blocks` takes it back, which first calls the block's `on_reuse`. Every
    operation is O(1) a block (given an O(1) `free` queue) and depends only on the calls before it, so ranks
    agree.
    """

    def __init__(self, num_blocks: int, free: FreeQueue | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, the limit is >= 2: block 0 is null, add memory")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.free: FreeQueue = FifoQueue(num_blocks) if free is None else free
        self.unpinned: OrderedDict[int, Callable[[int], None]] = OrderedDict()
        self.num_reused = 0
        self.num_adopted = 0
        assert len(self.free) == num_blocks - 1, f"{len(self.free)} free blocks of {num_blocks - 1}"

    @property
    def num_free(self) -> int:
        """Blocks that `get_new_blocks` can hand out now: truly free and unpinned."""
        return len(self.free) + len(self.unpinned)

    @property
    def num_truly_free(self) -> int:
        return len(self.free)

    @property
    def num_unpinned(self) -> int:
        return len(self.unpinned)

    def get_new_blocks(self, n: int, near: int | None = None) -> list[int]:
        """Hands out `n` blocks with one reference each: truly free ones, then unpinned ones, oldest first.

        Args:
            n: number of blocks, at most `num_free` (asserted before anything changes).
            near: block next to which the first one should lie; each later one follows the one before it.

        Calls `on_reuse(block)` of an unpinned block just before it is handed out. The callback must not raise
        and must not call this pool.
        """
        assert 0 <= n <= self.num_free, f"{n} blocks wanted, {self.num_free} free"
        blocks = []
        for _ in range(n):
            if len(self.free):
                block = near = self.free.pop(near)
            else:
                block, on_reuse = self.unpinned.popitem(last=False)
                on_reuse(block)
                self.num_reused += 1
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def pin_blocks(self, blocks: Sequence[int]) -> int:
        """Adds a reference to each block; an unpinned one leaves the queue and its `on_reuse` is dropped.

        Returns how many came back from the unpinned queue (adopted: they no longer count as free).
        """
        adopted, counts = 0, self.ref_counts
        for block in blocks:
            if counts[block] == 0:
                assert block in self.unpinned, f"block {block} is free, its content is gone"
                del self.unpinned[block]
                adopted += 1
            counts[block] += 1
        self.num_adopted += adopted
        return adopted

    def free_blocks(self, blocks: Sequence[int]) -> list[int]:
        """Drops a reference of each block; at zero the block is truly free and its content is gone.

        Returns these blocks.
        """
        freed = self._drop_references(blocks)
        for block in freed:
            self.free.push(block)
        return freed

    def unpin_blocks(self, blocks: Sequence[int], on_reuse: Callable[[int], None]) -> list[int]:
        """Drops a reference of each block; at zero it joins the tail of the unpinned queue.

        It then counts as free and stays readable until `on_reuse(block)` has been called. Returns the blocks
        that joined.
        """
        idle = self._drop_references(blocks)
        for block in idle:
            self.unpinned[block] = on_reuse
        return idle

    def discard_blocks(self, blocks: Sequence[int]) -> None:
        """Makes unpinned blocks truly free without `on_reuse`: the caller knows that their content died."""
        for block in blocks:
            assert block in self.unpinned, (
                f"block {block} is not unpinned ({self.ref_counts[block]} references)"
            )
            del self.unpinned[block]
            self.free.push(block)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block is exactly one of null, truly free, unpinned, referenced."""
        if self.ref_counts[0] or 0 in self.free or 0 in self.unpinned:
            raise RuntimeError(f"null block 0 is in use: {self.ref_counts[0]} references")
        referenced = 0
        for block in range(1, self.num_blocks):
            states = (self.ref_counts[block] > 0, block in self.free, block in self.unpinned)
            if sum(states) != 1 or self.ref_counts[block] < 0:
                raise RuntimeError(
                    f"block {block}: {self.ref_counts[block]} refs, free {states[1]}, unpinned {states[2]}"
                )
            referenced += states[0]
        total = referenced + len(self.free) + len(self.unpinned)
        if total != self.num_blocks - 1:
            raise RuntimeError(
                f"{referenced} referenced + {len(self.free)} free + {len(self.unpinned)} unpinned "
                f"!= {self.num_blocks - 1} blocks"
            )

    def _drop_references(self, blocks: Sequence[int]) -> list[int]:
        counts, unreferenced = self.ref_counts, []
        for block in blocks:
            count = counts[block] - 1
            assert count >= 0, f"block {block} has no reference to drop"
            counts[block] = count
            if not count:
                unreferenced.append(block)
        return unreferenced
