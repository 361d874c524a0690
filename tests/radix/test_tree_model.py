"""The prefix tree against a dict of tuples that scans everything each time."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse_sgl.radix.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, event_hash
from hisparse_sgl.radix.page_hash import page_hashes
from hisparse_sgl.radix.tree import Node, PrefixTree

PREFIXES = st.lists(st.integers(0, 2), max_size=5).map(tuple)


@dataclass
class Entry:
    page: int
    last_use: int
    uses: int = 1


def names(prefix: tuple[int, ...]) -> list[bytes]:
    return page_hashes(prefix, 1)


class TreeMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.events = EventLog(enabled=True)
        self.tree = PrefixTree(1, self.policy, lambda page: page % 3 == 0, self.events)
        self.entries: dict[tuple[int, ...], Entry] = {}
        self.holders: list[tuple[tuple[int, ...] | None, Node]] = []  # None: dead since a reset
        self.seen_by_consumer: set[int] = set()
        self.clock = 0
        self.next_page = 1

    def known(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        while prefix and prefix not in self.entries:
            prefix = prefix[:-1]
        return prefix

    def is_locked(self, prefix: tuple[int, ...]) -> bool:
        return any(held is not None and held[: len(prefix)] == prefix for held, _ in self.holders)

    def use(self, prefix: tuple[int, ...]) -> None:
        self.clock += 1
        for end in range(1, len(prefix) + 1):
            entry = self.entries[prefix[:end]]
            entry.last_use, entry.uses = self.clock, entry.uses + 1

    @rule(prefix=PREFIXES)
    def publish(self, prefix: tuple[int, ...]) -> None:
        node = self.tree.root
        for end, page_hash in enumerate(names(prefix), start=1):
            self.clock += 1
            key = prefix[:end]
            inserted = self.tree.insert(node, page_hash, self.next_page)
            assert inserted.is_new == (key not in self.entries)
            if inserted.is_new:
                self.entries[key] = Entry(self.next_page, self.clock)
                self.next_page += 1
            else:
                self.entries[key].last_use = self.clock
                self.entries[key].uses += 1
            node = inserted.node
            assert node.page == self.entries[key].page

    @rule(prefix=PREFIXES, count=st.booleans())
    def match(self, prefix: tuple[int, ...], count: bool) -> None:
        found = self.tree.match(names(prefix)) if count else self.tree.peek(names(prefix))
        known = self.known(prefix)
        pages = [self.entries[known[:end]].page for end in range(1, len(known) + 1)]
        assert found.pages == pages
        assert found.node.page == (pages[-1] if pages else 0)
        assert found.num_resident == sum(page % 3 == 0 for page in pages)
        if count:
            self.use(known)

    @rule(prefix=PREFIXES)
    def lock(self, prefix: tuple[int, ...]) -> None:
        known = self.known(prefix)
        node = self.tree.peek(names(known)).node
        self.tree.lock(node)
        self.holders.append((known, node))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        held, node = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.tree.unlock(node)
        if held is None:
            return
        self.clock += 1
        for end in range(1, len(held) + 1):
            if not self.is_locked(held[:end]):
                self.entries[held[:end]].last_use = self.clock

    @rule(n=st.integers(0, 4))
    def evict(self, n: int) -> None:
        expected = []
        for _ in range(n):
            parents = {key[:-1] for key in self.entries}
            leaves = [key for key in self.entries if key not in parents and not self.is_locked(key)]
            if not leaves:
                break
            expected.append(self.entries.pop(min(leaves, key=self.rank)).page)
        assert self.tree.evict(n) == expected

    def rank(self, key: tuple[int, ...]) -> tuple[int, int]:
        entry = self.entries[key]
        return (entry.uses, entry.last_use) if self.policy == "lfu" else (entry.last_use, 0)

    @rule()
    def reset(self) -> None:
        assert sorted(self.tree.reset()) == sorted(entry.page for entry in self.entries.values())
        self.entries.clear()
        self.holders = [(held if held == () else None, node) for held, node in self.holders]

    @invariant()
    def agrees(self) -> None:
        self.tree.check_integrity()
        assert self.tree.num_pages == len(self.entries)
        assert self.tree.num_evictable == sum(not self.is_locked(key) for key in self.entries)

    @invariant()
    def consumer_of_events_sees_the_tree(self) -> None:
        for event in self.events.take():
            if isinstance(event, BlockStored):
                assert event.parent_block_hash is None or event.parent_block_hash in self.seen_by_consumer
                self.seen_by_consumer.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert self.seen_by_consumer.issuperset(event.block_hashes)
                self.seen_by_consumer.difference_update(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.seen_by_consumer.clear()
        assert self.seen_by_consumer == {event_hash(names(key)[-1]) for key in self.entries}


class LfuTreeMachine(TreeMachine):
    policy = "lfu"


TestLru = TreeMachine.TestCase
TestLfu = LfuTreeMachine.TestCase
TestLru.settings = TestLfu.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
