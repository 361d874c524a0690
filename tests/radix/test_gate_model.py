"""Random requests, copies, ends, evictions and flushes through the gate, with the owner's page references."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse_sgl.radix.gate import Publication, PublicationGate
from hisparse_sgl.radix.page_hash import PageHasher
from hisparse_sgl.radix.tree import PrefixTree

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
NUM_PAGES = 40


@dataclass(eq=False)
class Request:
    tokens: list[int]
    pages: list[int]
    pub: Publication
    sealed: int
    flushed: bool = False


class GateMachine(RuleBasedStateMachine):
    """One token a page. A page's content is the token prefix that was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: Counter[int] = Counter()
        self.content: dict[int, tuple[int, ...]] = {}
        self.durable: set[int] = set()
        self.tree = PrefixTree(1)
        self.gate = PublicationGate(self.tree, self.durable.__contains__, self.share)
        self.running: list[Request] = []
        self.detached: list[Request] = []

    def share(self, page: int) -> None:
        assert self.refs[page] > 0, f"the tree took page {page}, which nobody owns"
        self.refs[page] += 1

    def drop(self, pages: list[int]) -> None:
        for page in pages:
            self.refs[page] -= 1
            assert self.refs[page] >= 0
            if self.refs[page] == 0:
                self.durable.discard(page)
                del self.refs[page], self.content[page]

    def take_page(self, prefix: tuple[int, ...]) -> int | None:
        page = next((p for p in range(1, NUM_PAGES) if p not in self.refs), None)
        if page is not None:
            self.refs[page] = 1
            self.content[page] = prefix
        return page

    def pick(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.running))

    def append(self, request: Request) -> bool:
        page = self.take_page(tuple(request.tokens[: len(request.pages) + 1]))
        if page is not None:
            request.pages.append(page)
        return page is not None

    @rule(tokens=TOKENS)
    def admit(self, tokens: list[int]) -> None:
        hasher = PageHasher(1)
        hasher.extend(tokens)
        found = self.tree.match(hasher.hashes)
        for end, page in enumerate(found.pages, start=1):
            assert self.content[page] == tuple(tokens[:end])
            self.share(page)
        pages = list(found.pages)
        request = Request(tokens, pages, self.gate.open("r", pages, hasher, found), len(pages))
        while len(pages) < len(tokens) and self.append(request):
            pass
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        request = self.pick(data)
        request.tokens.append(token)
        request.pub.hasher.extend([token])
        if len(request.tokens) == len(request.pages) + 1:
            self.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), copied=st.booleans())
    def settle(self, data: st.DataObject, copied: bool) -> None:
        request = self.pick(data)
        request.sealed = min(len(request.pages), len(request.tokens))
        own = [p for p in request.pages[: request.sealed] if p not in self.durable]
        if copied and own:
            self.durable.add(data.draw(st.sampled_from(own)))
        before = request.pub.published
        passed = self.gate.advance(request.pub, request.sealed)
        assert request.pub.published == before + passed
        if request.flushed:
            assert passed == 0

    @precondition(lambda self: self.running)
    @rule(data=st.data(), waiting=st.booleans())
    def finish(self, data: st.DataObject, waiting: bool) -> None:
        request = self.pick(data)
        self.running.remove(request)
        if self.gate.finish(request.pub, request.sealed, waiting):
            assert not request.flushed
            self.drop(request.pages[request.sealed :])
            del request.pages[request.sealed :]
            self.detached.append(request)
        else:
            self.drop(request.pages)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.running.remove(request)
        self.gate.cancel(request.pub)
        self.drop(request.pages)

    @precondition(lambda self: self.detached)
    @rule(data=st.data())
    def late_completion(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.detached))
        pending = [p for p in request.pages if p not in self.durable]
        if pending:
            self.durable.add(data.draw(st.sampled_from(pending)))
        done = self.gate.advance_detached()
        for late in [r for r in self.detached if r.pub in done]:
            assert self.tree.peek(late.pub.hashes).node is late.pub.node
            self.detached.remove(late)
            self.drop(late.pages)

    @rule(n=st.integers(1, 4))
    def evict(self, n: int) -> None:
        expected = min(n, self.tree.num_evictable)
        pages = self.tree.evict(n)
        assert len(pages) == expected
        self.drop(pages)

    @precondition(lambda self: self.tree.num_pages > 6)
    @rule()
    def flush(self) -> None:
        flushed = self.gate.flush()
        assert flushed.detached == [request.pub for request in self.detached]
        self.drop(flushed.tree_pages)
        for request in self.detached:
            self.drop(request.pages)
        self.detached.clear()
        for request in self.running:
            request.flushed = True

    @invariant()
    def consistent(self) -> None:
        self.gate.check_integrity()
        assert set(self.durable) <= set(self.refs)
        held = Counter(node.page for node in self.tree.nodes.values())
        for request in self.running + self.detached:
            held.update(request.pages)
        assert held == self.refs
        hasher = PageHasher(1)
        for node in self.tree.nodes.values():
            hasher.truncate(0)
            hasher.extend(self.content[node.page])
            assert hasher.hashes[-1] == node.page_hash, "the tree offers a page under a foreign prefix"

    def teardown(self) -> None:
        for request in self.detached:
            self.durable.update(request.pages)
        done = self.gate.advance_detached()
        assert set(done) == {request.pub for request in self.detached}
        for request in self.detached:
            assert len(self.tree.peek(request.pub.hashes).pages) == len(request.pages)
        for request in self.running:
            self.gate.cancel(request.pub)
        self.gate.check_integrity()
        assert self.tree.num_evictable == self.tree.num_pages
        assert self.gate.num_detached == 0


TestGate = GateMachine.TestCase
TestGate.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
