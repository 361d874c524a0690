"""Prefix tree over host pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hisparse_sgl.radix.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, event_hash
from hisparse_sgl.radix.eviction import EvictionHeap


@dataclass(slots=True, eq=False)
class Node:
    """One host page of the tree. `page_hash` names the whole prefix that ends with it.

    A node is *locked* while it has holders (`locks`) or locked children (`locked_children`). A node that left
    the tree has `alive` False. `state` is what an engine needs besides pages to resume behind this one.
    """

    page: int
    page_hash: bytes = field(repr=False)
    parent: Node | None = field(repr=False)
    last_use: int = 0
    uses: int = 0
    locks: int = 0
    locked_children: int = 0
    num_children: int = 0
    alive: bool = True
    state: object | None = field(default=None, repr=False)

    @property
    def is_locked(self) -> bool:
        return self.locks > 0 or self.locked_children > 0


class Match(NamedTuple):
    """Longest known prefix: its host pages, its deepest node (the root when empty), and how many of the
    pages have a copy on the device."""

    pages: list[int]
    node: Node
    num_resident: int


class Inserted(NamedTuple):
    """Node of a page hash. When it is not new, the node keeps its own page and the caller keeps the other."""

    node: Node
    is_new: bool


class PrefixTree:
    """Host pages by prefix, one node a page.

    The tree counts no page references: for each new node the caller takes one for the tree, and gives it
    back for each page that `evict` or `reset` returns. `policy` is "lru" or "lfu". Between `match` and `lock`
    of its node nothing may be evicted.
    """

    def __init__(
        self,
        page_size: int,
        policy: str = "lru",
        is_resident: Callable[[int], bool] = lambda page: False,
        events: EventLog | None = None,
    ) -> None:
        self.page_size = page_size
        self.is_resident = is_resident
        self.events = events if events is not None else EventLog()
        self.root = Node(page=0, page_hash=b"", parent=None)
        self.nodes: dict[bytes, Node] = {}
        self.leaves = EvictionHeap(policy)
        self.num_locked = 0
        self._clock = 0

    @property
    def num_pages(self) -> int:
        return len(self.nodes)

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can return: all nodes without a lock at or below them."""
        return len(self.nodes) - self.num_locked

    def match(self, hashes: Sequence[bytes]) -> Match:
        """Find the longest known prefix of the page hashes, and count one use of each node on its path.

        Mutates `last_use` and `uses` of those nodes, so it is for admissions; `peek` changes nothing.
        """
        path = self._walk(hashes)
        self._clock += 1
        for node in path:
            node.last_use = self._clock
            node.uses += 1
        if path and path[-1] in self.leaves:
            self.leaves.add(path[-1])
        return self._to_match(path)

    def peek(self, hashes: Sequence[bytes]) -> Match:
        """Find the longest known prefix of the page hashes without counting a use."""
        return self._to_match(self._walk(hashes))

    def resumable(self, match: Match) -> Match:
        """The longest part of a match that ends at a node with a state, without counting a use."""
        node, count = match.node, len(match.pages)
        while node.parent is not None and node.state is None:
            node, count = node.parent, count - 1
        pages = match.pages[:count]
        return Match(pages, node, sum(map(self.is_resident, pages)))

    def insert(
        self, parent: Node, page_hash: bytes, page: int, token_ids: Sequence[int] | None = None
    ) -> Inserted:
        """Put a page below `parent`, or find the node that already has this hash.

        Counts one use of the node. `token_ids` of the page go into the event, nowhere else.
        """
        assert parent.alive, f"parent page {parent.page} has left the tree"
        self._clock += 1
        node = self.nodes.get(page_hash)
        if node is not None:
            assert node.parent is parent, f"hash of page {node.page} inserted below another parent"
            self._touch(node)
            return Inserted(node, False)
        node = Node(page, page_hash, parent, last_use=self._clock, uses=1)
        self.nodes[page_hash] = node
        parent.num_children += 1
        self.leaves.discard(parent)
        self.leaves.add(node)
        if self.events.enabled:
            above = None if parent is self.root else event_hash(parent.page_hash)
            tokens = list(token_ids) if token_ids is not None else []
            self.events.append(BlockStored([event_hash(page_hash)], above, tokens, self.page_size))
        return Inserted(node, True)

    def lock(self, node: Node) -> None:
        """Keep a node and all its ancestors from eviction until as many `unlock` calls.

        The walk up stops at the first ancestor that was locked already, so moving a lock one page forward
        (lock the child, unlock the parent) is O(1).
        """
        assert node.alive, f"page {node.page} has left the tree and cannot be locked"
        was_locked = node.is_locked
        node.locks += 1
        while not was_locked and node.parent is not None:
            self.num_locked += 1
            self.leaves.discard(node)
            node = node.parent
            was_locked = node.is_locked
            node.locked_children += 1

    def unlock(self, node: Node) -> None:
        """Take back one `lock`. A node that left the tree by `reset` is ignored.

        Nodes that become free count as used now (`last_use`): their holder used them until this moment.
        """
        if not node.alive:
            return
        assert node.locks > 0, f"page {node.page} is unlocked more often than locked"
        node.locks -= 1
        self._clock += 1
        while not node.is_locked and node.parent is not None:
            self.num_locked -= 1
            node.last_use = self._clock
            if node.num_children == 0:
                self.leaves.add(node)
            node = node.parent
            node.locked_children -= 1

    def evict(self, n: int) -> list[int]:
        """Drop up to `n` unlocked pages in policy order and return them, children before their parents.

        The caller gives back the tree's reference to each. Fewer come back only when no more are evictable.
        """
        pages: list[int] = []
        hashes: list[bytes] = []
        while len(pages) < n and (node := self.leaves.pop()) is not None:
            assert isinstance(node, Node) and node.parent is not None
            node.alive, node.state = False, None
            del self.nodes[node.page_hash]
            pages.append(node.page)
            hashes.append(node.page_hash)
            parent = node.parent
            parent.num_children -= 1
            if parent is not self.root and parent.num_children == 0 and not parent.is_locked:
                self.leaves.add(parent)
        if hashes and self.events.enabled:
            self.events.append(BlockRemoved([event_hash(page_hash) for page_hash in hashes]))
        return pages

    def reset(self) -> list[int]:
        """Drop every node, locked or not, and return all pages. Locks on the root stay."""
        pages = [node.page for node in self.nodes.values()]
        for node in self.nodes.values():
            node.alive, node.state = False, None
        self.nodes.clear()
        self.leaves.clear()
        self.num_locked = 0
        self.root.num_children = self.root.locked_children = 0
        self.events.append(AllBlocksCleared())
        return pages

    def check_integrity(self) -> None:
        """Raise RuntimeError when any count of the tree differs from what its nodes say."""
        self._check_nodes()
        children: dict[Node, list[Node]] = {node: [] for node in (self.root, *self.nodes.values())}
        for node in self.nodes.values():
            if node.parent not in children:
                raise RuntimeError(f"parent of page {node.page} is not in the tree")
            children[node.parent].append(node)
        for node, below in children.items():
            locked = sum(child.is_locked for child in below)
            if (node.num_children, node.locked_children) != (len(below), locked):
                raise RuntimeError(
                    f"page {node.page} counts {node.num_children} children, {node.locked_children} locked; "
                    f"the tree has {len(below)}, {locked} locked"
                )
        evictable = {node for node in self.nodes.values() if not node.is_locked and not children[node]}
        if evictable != set(self.leaves.live):
            raise RuntimeError(f"{len(evictable)} evictable leaves, {len(self.leaves)} in the eviction heap")
        self.leaves.check_integrity()

    def _check_nodes(self) -> None:
        pages = [node.page for node in self.nodes.values()]
        if len(set(pages)) != len(pages) or 0 in pages:
            raise RuntimeError(
                f"{len(pages)} nodes hold {len(set(pages))} pages, null page held: {0 in pages}"
            )
        for page_hash, node in self.nodes.items():
            if node.page_hash != page_hash or not node.alive or node.locks < 0:
                raise RuntimeError(f"node {node!r} is dead, misnamed or locked less than never")
        locked = sum(node.is_locked for node in self.nodes.values())
        if locked != self.num_locked:
            raise RuntimeError(f"num_locked is {self.num_locked}, but {locked} nodes are locked")

    def _walk(self, hashes: Sequence[bytes]) -> list[Node]:
        path: list[Node] = []
        get = self.nodes.get
        for page_hash in hashes:
            node = get(page_hash)
            if node is None:
                break
            path.append(node)
        return path

    def _to_match(self, path: list[Node]) -> Match:
        pages = [node.page for node in path]
        return Match(pages, path[-1] if path else self.root, sum(map(self.is_resident, pages)))

    def _touch(self, node: Node) -> None:
        node.last_use = self._clock
        node.uses += 1
        if node in self.leaves:
            self.leaves.add(node)
