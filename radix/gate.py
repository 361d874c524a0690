"""Publication gate: what a request computed enters the prefix tree only when it is durable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hisparse_sgl.radix.page_hash import PageHasher
from hisparse_sgl.radix.tree import Match, Node, PrefixTree


@dataclass(slots=True, eq=False)
class Publication:
    """How far one request is published.

    `pages` and `hasher` are the request's own, live objects until the publication is detached, then copies.
    `node` is the node of page `published - 1` (the root when 0) and is locked by this publication.
    Pages [0, start_pages) came from the tree; [start_pages, published) are in it by this publication or, when
    another request was first with the same hash, by that one. `states` maps the number of a page that is not
    published yet to what a request needs that resumes behind it.
    """

    rid: str
    pages: list[int] = field(repr=False)
    hasher: PageHasher = field(repr=False)
    node: Node
    start_pages: int
    published: int
    state: Literal["open", "detached", "closed"] = "open"
    states: dict[int, object] = field(default_factory=dict, repr=False)

    @property
    def hashes(self) -> list[bytes]:
        return self.hasher.hashes


class Flushed(NamedTuple):
    """What a flush let go: the tree's pages, and the detached publications, whose pages their owner still
    leases (copies may be in flight) and now has to release."""

    tree_pages: list[int]
    detached: list[Publication]


class PublicationGate:
    """Moves pages of requests into the tree, in order, each only once it is sealed and durable.

    `is_durable(page)` says whether every row of a host page is on the host on every rank; all ranks must get
    the same answer. `share(page)` takes the tree's own reference to a host page. The gate never changes
    a request's references: its owner holds each page until the publication is closed.
    """

    def __init__(
        self, tree: PrefixTree, is_durable: Callable[[int], bool], share: Callable[[int], None]
    ) -> None:
        self.tree = tree
        self.is_durable = is_durable
        self.share = share
        # Dicts, because they keep the order of arrival: all ranks publish in the same order.
        self.opened: dict[Publication, None] = {}
        self.detached: dict[Publication, None] = {}

    @property
    def num_detached(self) -> int:
        return len(self.detached)

    def open(self, rid: str, pages: list[int], hasher: PageHasher, matched: Match) -> Publication:
        """Start to publish a request whose `pages` begin with the matched ones; locks `matched.node`."""
        count = len(matched.pages)
        assert pages[:count] == matched.pages, f"pages of {rid} do not begin with the {count} matched ones"
        assert len(hasher.hashes) >= count, f"{rid} matched {count} pages, {len(hasher.hashes)} are hashed"
        self.tree.lock(matched.node)
        pub = Publication(rid, pages, hasher, matched.node, start_pages=count, published=count)
        self.opened[pub] = None
        return pub

    def advance(self, pub: Publication, num_sealed_pages: int) -> int:
        """Publish the next pages while they are sealed, hashed and durable; return how many were passed.

        A page whose hash the tree already knows is passed too, but stays the request's own. A closed
        publication passes none.
        """
        if pub.state == "closed":
            return 0
        hashes = pub.hashes
        assert pub.published == 0 or (
            len(hashes) >= pub.published and hashes[pub.published - 1] == pub.node.page_hash
        ), f"{pub.rid} changed tokens of its {pub.published} published pages"
        before = pub.published
        limit = min(num_sealed_pages, len(hashes), len(pub.pages))
        while pub.published < limit and self.is_durable(pub.pages[pub.published]):
            self._publish_next(pub)
        return pub.published - before

    def keep_state(self, pub: Publication, index: int, state: object) -> None:
        """Let page `index` of a request carry the state at its end into the tree.

        When the tree knows that prefix, by this request or another, it takes the state at once. A node keeps
        the first state that it is given. A closed publication drops it.
        """
        if pub.state == "closed":
            return
        if index >= pub.published:
            pub.states[index] = state
        node = self.tree.nodes.get(pub.hashes[index]) if index < len(pub.hashes) else None
        if node is not None and node.state is None:
            node.state = state

    def drop_states(self, pub: Publication, index: int) -> None:
        """Forget the states at the ends of pages `index` and later, which are to be written again."""
        pub.states = {page: state for page, state in pub.states.items() if page < index}

    def finish(self, pub: Publication, num_sealed_pages: int, waiting: bool) -> bool:
        """End a request: publish what is durable, and return whether the publication became detached.

        It does when sealed pages are left and `waiting` says that their copies are still to complete. Then
        the gate keeps copies of the pages and hashes, and the caller keeps the host pages leased until
        `advance_detached` or `flush` returns the publication, or `cancel` ends it. Otherwise it is closed.
        """
        if pub.state == "closed":
            return False
        assert pub.state == "open", f"{pub.rid} is finished twice"
        self.advance(pub, num_sealed_pages)
        limit = min(num_sealed_pages, len(pub.hashes), len(pub.pages))
        if not waiting or pub.published >= limit:
            self.cancel(pub)
            return False
        del self.opened[pub]
        self.drop_states(pub, limit)
        pub.pages = pub.pages[:limit]
        pub.hasher = pub.hasher.copy()
        pub.hasher.truncate(limit * pub.hasher.page_size)
        pub.state = "detached"
        self.detached[pub] = None
        return True

    def advance_detached(self) -> list[Publication]:
        """Publish what became durable since, and return the publications that are now complete and closed.

        O(1) for a publication whose next page is not durable yet.
        """
        done: list[Publication] = []
        for pub in list(self.detached):
            self.advance(pub, len(pub.pages))
            if pub.published == len(pub.pages):
                self.cancel(pub)
                done.append(pub)
        return done

    def cancel(self, pub: Publication) -> None:
        """Close a publication: unlock its node and publish nothing more. What it published stays.

        For aborts, for retractions after a last `advance`, and for giving up a detached one. Closing twice
        changes nothing.
        """
        if pub.state == "closed":
            return
        del (self.opened if pub.state == "open" else self.detached)[pub]
        pub.state = "closed"
        pub.states = {}
        self.tree.unlock(pub.node)

    def flush(self) -> Flushed:
        """Empty the tree and cancel every publication: what a flush finds is never published after it."""
        detached = list(self.detached)
        for pub in [*self.opened, *detached]:
            self.cancel(pub)
        return Flushed(self.tree.reset(), detached)

    def check_integrity(self) -> None:
        """Raise RuntimeError when the tree holds a page that is not durable, or a publication is not a chain
        of tree nodes from its `published` count down to the root."""
        self.tree.check_integrity()
        for node in self.tree.nodes.values():
            if not self.is_durable(node.page):
                raise RuntimeError(f"page {node.page} is in the tree but not durable")
        held: dict[Node, int] = {}
        for pub in [*self.opened, *self.detached]:
            self._check_publication(pub)
            held[pub.node] = held.get(pub.node, 0) + 1
        for node, count in held.items():
            if node.locks < count:
                raise RuntimeError(f"page {node.page} has {node.locks} locks for {count} publications")

    def _publish_next(self, pub: Publication) -> None:
        index = pub.published
        page, page_hash = pub.pages[index], pub.hashes[index]
        tokens = pub.hasher.page_tokens(index) if self.tree.events.enabled else None
        node, is_new = self.tree.insert(pub.node, page_hash, page, tokens)
        if is_new:
            self.share(page)
        state = pub.states.pop(index, None)
        if node.state is None:
            node.state = state
        self.tree.lock(node)
        self.tree.unlock(pub.node)
        pub.node = node
        pub.published = index + 1

    def _check_publication(self, pub: Publication) -> None:
        if not pub.start_pages <= pub.published <= min(len(pub.pages), len(pub.hashes)):
            raise RuntimeError(
                f"{pub.rid} published {pub.published} of {len(pub.pages)} pages, {len(pub.hashes)} hashes, "
                f"{pub.start_pages} at the start"
            )
        if any(index < pub.published for index in pub.states):
            raise RuntimeError(f"{pub.rid} holds the states of pages {sorted(pub.states)}, published before")
        node: Node | None = pub.node
        for index in range(pub.published - 1, -1, -1):
            if node is None or not node.alive or node.page_hash != pub.hashes[index]:
                raise RuntimeError(f"page {index} of {pub.rid} counts as published but is not in the tree")
            node = node.parent
        if node is not self.tree.root:
            raise RuntimeError(f"{pub.rid} published {pub.published} pages, its node lies deeper than that")
