"""Order in which pages leave the prefix tree."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol


class Usage(Protocol):
    """What a policy looks at: the clock of the last use, and the number of uses."""

    last_use: int
    uses: int


POLICIES: dict[str, Callable[[Usage], tuple[int, int]]] = {
    "lru": lambda node: (node.last_use, 0),
    "lfu": lambda node: (node.uses, node.last_use),
}


class EvictionHeap:
    """The evictable leaves of a tree, least valuable first.

    `policy` is "lru" (oldest use first) or "lfu" (fewest uses first, then oldest).
    `live` maps each leaf to its current heap entry; an entry of the heap that is not the live one is stale
    and skipped when it comes up. The heap is rebuilt when it holds more than twice the live entries, so its
    memory is bounded and each operation stays O(log n) amortised.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is unknown; use one of {sorted(POLICIES)}")
        self.key = POLICIES[policy]
        self.heap: list[tuple[tuple[int, int], int, Usage]] = []
        self.live: dict[Usage, tuple[tuple[int, int], int, Usage]] = {}
        self._entries_made = 0

    def __len__(self) -> int:
        return len(self.live)

    def __contains__(self, leaf: Usage) -> bool:
        return leaf in self.live

    def add(self, leaf: Usage) -> None:
        """Add a leaf, or move one that is there to the place of its present key."""
        self._entries_made += 1
        # The serial number breaks ties in order of arrival, so that leaves themselves are never compared.
        entry = (self.key(leaf), self._entries_made, leaf)
        self.live[leaf] = entry
        heappush(self.heap, entry)
        self._compact()

    def discard(self, leaf: Usage) -> None:
        """Take a leaf out, if it is there."""
        if self.live.pop(leaf, None) is not None:
            self._compact()

    def pop(self) -> Usage | None:
        """Take out and return the least valuable leaf, or None when there is none."""
        while self.heap:
            entry = heappop(self.heap)
            leaf = entry[2]
            if self.live.get(leaf) is entry:
                del self.live[leaf]
                self._compact()
                return leaf
        return None

    def clear(self) -> None:
        """Take out every leaf."""
        self.heap.clear()
        self.live.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError when a live leaf has no heap entry, an old key, or the heap is too long."""
        if len(self.heap) > 2 * len(self.live):
            raise RuntimeError(f"heap of {len(self.heap)} entries for {len(self.live)} live leaves")
        entries = {id(entry) for entry in self.heap}
        for leaf, entry in self.live.items():
            if id(entry) not in entries:
                raise RuntimeError(f"live leaf {leaf!r} is not in the heap")
            if entry[0] != self.key(leaf):
                raise RuntimeError(
                    f"leaf {leaf!r} stands at key {entry[0]}, its usage gives {self.key(leaf)}"
                )

    def _compact(self) -> None:
        if len(self.heap) > 2 * len(self.live):
            self.heap = list(self.live.values())
            heapify(self.heap)
