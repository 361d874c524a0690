from __future__ import annotations

import pytest

from hisparse_sgl.radix.events import EventLog
from hisparse_sgl.radix.gate import Publication, PublicationGate
from hisparse_sgl.radix.page_hash import PageHasher
from hisparse_sgl.radix.tree import PrefixTree

PAGE_SIZE = 2


class House:
    """A gate with the parts of its owner that it talks to."""

    def __init__(self) -> None:
        self.durable: set[int] = set()
        self.shared: list[int] = []
        self.tree = PrefixTree(PAGE_SIZE, events=EventLog(enabled=True))
        self.gate = PublicationGate(self.tree, self.durable.__contains__, self.shared.append)

    def open(
        self, tokens: list[int], pages: list[int], rid: str = "r", tenant: str | None = None
    ) -> Publication:
        """Admit a request: match it, then give it the matched pages and `pages` for the rest."""
        hasher = PageHasher(PAGE_SIZE, tenant)
        hasher.extend(tokens)
        found = self.tree.match(hasher.hashes)
        return self.gate.open(rid, found.pages + pages, hasher, found)

    def cached(self, tokens: list[int], tenant: str | None = None) -> list[int]:
        hasher = PageHasher(PAGE_SIZE, tenant)
        hasher.extend(tokens)
        return self.tree.peek(hasher.hashes).pages


@pytest.fixture
def house() -> House:
    return House()


TOKENS = [1, 2, 3, 4, 5, 6]


def test_publishes_only_sealed_and_durable_pages_in_order(house: House) -> None:
    pub = house.open(TOKENS, [11, 12, 13])
    assert house.gate.advance(pub, 3) == 0
    house.durable |= {12, 13}
    assert house.gate.advance(pub, 3) == 0, "page 0 is not durable, so nothing behind it is published"
    house.durable.add(11)
    assert house.gate.advance(pub, 1) == 1, "only the first page is sealed"
    house.gate.check_integrity()
    assert house.cached(TOKENS) == [11] == house.shared
    assert house.gate.advance(pub, 9) == 2
    house.gate.check_integrity()
    assert house.cached(TOKENS) == house.shared == [11, 12, 13]


def test_live_lists_grow_during_decode(house: House) -> None:
    pages, hasher = [11], PageHasher(PAGE_SIZE)
    hasher.extend([1])
    pub = house.gate.open("r", pages, hasher, house.tree.match([]))
    house.durable |= {11, 12}
    assert house.gate.advance(pub, 0) == 0
    hasher.extend([2, 3])
    pages.append(12)
    assert house.gate.advance(pub, 1) == 1
    hasher.extend([4])
    assert house.gate.advance(pub, 2) == 1
    house.gate.check_integrity()
    assert house.cached([1, 2, 3, 4]) == [11, 12]


def test_open_publication_locks_what_it_matched_and_published(house: House) -> None:
    house.durable |= {11, 12, 13, 21}
    first = house.open(TOKENS[:4], [11, 12])
    house.gate.advance(first, 2)
    house.gate.finish(first, 2, waiting=False)
    assert house.tree.num_evictable == 2
    second = house.open(TOKENS, [13])
    assert second.start_pages == second.published == 2
    assert house.tree.num_evictable == 0
    house.gate.advance(second, 3)
    assert house.tree.num_evictable == 0 and house.tree.evict(9) == []
    assert house.gate.finish(second, 3, waiting=False) is False
    house.gate.check_integrity()
    assert house.tree.evict(9) == [13, 12, 11]


def test_two_requests_compute_the_same_page(house: House) -> None:
    first, second = house.open(TOKENS, [11, 12, 13], "a"), house.open(TOKENS, [21, 22, 23], "b")
    house.durable |= {21, 11, 12, 13, 22, 23}
    assert house.gate.advance(second, 1) == 1
    assert house.gate.advance(first, 3) == 3
    assert house.gate.advance(second, 3) == 2
    house.gate.check_integrity()
    assert house.cached(TOKENS) == [21, 12, 13]
    assert house.shared == [21, 12, 13], "the tree takes no reference to a page that it does not hold"


def test_tenants_never_share(house: House) -> None:
    house.durable |= {11, 12, 13, 21, 22, 23}
    first = house.open(TOKENS, [11, 12, 13], tenant="a")
    house.gate.advance(first, 3)
    second = house.open(TOKENS, [21, 22, 23], tenant="b")
    assert second.start_pages == 0
    house.gate.advance(second, 3)
    house.gate.check_integrity()
    assert house.cached(TOKENS, "a") == [11, 12, 13] and house.cached(TOKENS, "b") == [21, 22, 23]
    assert house.cached(TOKENS) == []


def test_late_completion_is_published_detached(house: House) -> None:
    pages = [11, 12, 13]
    pub = house.open(TOKENS, pages)
    house.durable.add(11)
    assert house.gate.finish(pub, 3, waiting=True) is True
    pages.clear()
    pub_hashes = list(pub.hashes)
    assert house.gate.num_detached == 1 and pub.state == "detached"
    house.gate.check_integrity()
    assert house.gate.advance_detached() == []
    house.durable.add(13)
    assert house.gate.advance_detached() == []
    assert house.cached(TOKENS) == [11] and house.tree.num_evictable == 0
    house.durable.add(12)
    assert house.gate.advance_detached() == [pub]
    house.gate.check_integrity()
    assert house.cached(TOKENS) == [11, 12, 13] and pub.hashes == pub_hashes
    assert house.gate.num_detached == 0 and house.tree.num_evictable == 3


def test_detached_copies_do_not_follow_the_request(house: House) -> None:
    pages, hasher = [11, 12, 13], PageHasher(PAGE_SIZE)
    hasher.extend(TOKENS)
    pub = house.gate.open("r", pages, hasher, house.tree.match([]))
    house.gate.finish(pub, 2, waiting=True)
    pages[0] = 99
    hasher.truncate(0)
    hasher.extend([7] * 6)
    house.durable |= {11, 12, 13, 99}
    assert house.gate.advance_detached() == [pub]
    house.gate.check_integrity()
    assert house.cached(TOKENS) == [11, 12], "the third page was not sealed when the request ended"
    stored = [event.token_ids for event in house.tree.events.take()]
    assert stored == [[1, 2], [3, 4]]


def test_failed_copy_publishes_nothing_until_its_retry(house: House) -> None:
    pub = house.open(TOKENS, [11, 12, 13])
    house.durable |= {11, 13}
    house.gate.advance(pub, 3)
    assert house.gate.finish(pub, 3, waiting=True)
    for _ in range(3):
        assert house.gate.advance_detached() == []
    assert house.cached(TOKENS) == [11]
    house.durable.add(12)
    assert house.gate.advance_detached() == [pub]
    assert house.cached(TOKENS) == [11, 12, 13]


def test_finish_without_copies_in_flight_drops_the_rest(house: House) -> None:
    pub = house.open(TOKENS, [11, 12, 13])
    house.durable |= {11, 13}
    assert house.gate.finish(pub, 3, waiting=False) is False
    assert pub.state == "closed" and house.gate.num_detached == 0
    house.durable.add(12)
    assert house.gate.advance(pub, 3) == 0 and house.gate.advance_detached() == []
    assert house.cached(TOKENS) == [11]


def test_finish_with_all_durable_is_not_detached(house: House) -> None:
    pub = house.open(TOKENS, [11, 12, 13])
    house.durable |= {11, 12, 13}
    assert house.gate.finish(pub, 3, waiting=True) is False
    assert house.cached(TOKENS) == [11, 12, 13]


def test_one_request_id_may_be_detached_and_open(house: House) -> None:
    old = house.open(TOKENS, [11, 12, 13])
    house.gate.finish(old, 3, waiting=True)
    new = house.open(TOKENS, [21, 22, 23])
    house.durable |= {11, 12, 13, 21, 22, 23}
    assert house.gate.advance(new, 3) == 3
    assert house.gate.advance_detached() == [old]
    house.gate.check_integrity()
    assert house.cached(TOKENS) == [21, 22, 23]


@pytest.mark.parametrize("detached", [False, True])
def test_cancel_never_publishes_again(house: House, detached: bool) -> None:
    pub = house.open(TOKENS, [11, 12, 13])
    house.durable.add(11)
    house.gate.advance(pub, 3)
    if detached:
        house.gate.finish(pub, 3, waiting=True)
    house.gate.cancel(pub)
    house.gate.cancel(pub)
    house.durable |= {12, 13}
    assert house.gate.advance(pub, 3) == 0 and house.gate.advance_detached() == []
    assert house.gate.finish(pub, 3, waiting=True) is False
    house.gate.check_integrity()
    assert house.cached(TOKENS) == [11] and house.tree.num_evictable == 1


def test_flush_cancels_open_and_detached(house: House) -> None:
    house.durable |= {11, 21}
    running = house.open(TOKENS, [11, 12, 13], "running")
    house.gate.advance(running, 3)
    late = house.open([7, 8, 9, 9], [21, 22], "late")
    house.gate.finish(late, 2, waiting=True)
    unmatched = house.open([0, 0], [31], "unmatched")
    flushed = house.gate.flush()
    assert sorted(flushed.tree_pages) == [11, 21] and flushed.detached == [late]
    house.durable |= {12, 13, 22, 31}
    for pub in (running, late, unmatched):
        assert house.gate.advance(pub, 3) == 0
        assert house.gate.finish(pub, 3, waiting=True) is False
    assert house.gate.advance_detached() == [] and house.tree.num_pages == 0
    house.gate.check_integrity()
    fresh = house.open(TOKENS, [11, 12, 13], "fresh")
    assert house.gate.advance(fresh, 3) == 3
    house.gate.check_integrity()


def test_publishing_before_completion_is_caught(house: House) -> None:
    pub = house.open(TOKENS, [11, 12, 13])
    honest, house.gate.is_durable = house.gate.is_durable, lambda page: True
    house.gate.advance(pub, 1)
    house.gate.is_durable = honest
    with pytest.raises(RuntimeError, match="page 11 is in the tree but not durable"):
        house.gate.check_integrity()


def test_wrong_counts_are_caught(house: House) -> None:
    house.durable |= {11, 12, 13}
    pub = house.open(TOKENS, [11, 12, 13])
    house.gate.advance(pub, 2)
    for published in (0, 1, 3, 4):
        pub.published = published
        with pytest.raises(RuntimeError, match=r"r published|page \d of r"):
            house.gate.check_integrity()
    pub.published = 2
    house.gate.check_integrity()
    house.tree.unlock(pub.node)
    with pytest.raises(RuntimeError, match="0 locks for 1 publications"):
        house.gate.check_integrity()


def test_changed_tokens_below_a_published_page_are_an_assertion(house: House) -> None:
    house.durable |= {11, 12, 13}
    pub = house.open(TOKENS, [11, 12, 13])
    house.gate.advance(pub, 2)
    pub.hasher.truncate(2)
    pub.hasher.extend([9, 9, 9, 9])
    with pytest.raises(AssertionError, match="changed tokens"):
        house.gate.advance(pub, 3)


def test_open_wants_the_matched_pages_first(house: House) -> None:
    house.durable |= {11, 12, 13}
    pub = house.open(TOKENS, [11, 12, 13])
    house.gate.advance(pub, 3)
    with pytest.raises(AssertionError, match="do not begin with the 3 matched"):
        house.gate.open("x", [], pub.hasher, house.tree.match(pub.hashes))


def test_states_enter_the_tree_with_their_pages(house: House) -> None:
    house.durable |= {11, 12, 13}
    pub = house.open(TOKENS, [11, 12, 13])
    house.gate.keep_state(pub, 1, "behind two pages")
    house.gate.keep_state(pub, 2, "behind three")
    house.gate.drop_states(pub, 2)
    house.gate.advance(pub, 3)
    house.gate.keep_state(pub, 0, "first")
    house.gate.keep_state(pub, 0, "second")
    house.gate.check_integrity()
    assert [node.state for node in house.tree.nodes.values()] == ["first", "behind two pages", None]
    hashes = pub.hashes
    for count, pages in ((3, [11, 12]), (2, [11, 12]), (1, [11])):
        assert house.tree.resumable(house.tree.peek(hashes[:count])).pages == pages
    assert house.tree.resumable(house.tree.peek([])).node is house.tree.root


def test_a_detached_publication_keeps_the_states_of_its_pages(house: House) -> None:
    pub = house.open(TOKENS, [11, 12, 13])
    for index in range(3):
        house.gate.keep_state(pub, index, index)
    assert house.gate.finish(pub, 2, waiting=True)
    assert pub.states == {0: 0, 1: 1}
    house.durable |= {11, 12}
    assert house.gate.advance_detached() == [pub]
    assert [node.state for node in house.tree.nodes.values()] == [0, 1]
    assert not pub.states


def test_a_closed_publication_takes_no_state(house: House) -> None:
    pub = house.open(TOKENS, [11, 12, 13])
    house.gate.keep_state(pub, 0, "lost")
    house.gate.cancel(pub)
    house.gate.keep_state(pub, 0, "lost too")
    assert not pub.states


def test_a_state_of_a_published_page_is_damage(house: House) -> None:
    house.durable.add(11)
    pub = house.open(TOKENS, [11, 12, 13])
    house.gate.advance(pub, 1)
    pub.states[0] = "stale"
    with pytest.raises(RuntimeError, match="r holds the states of pages"):
        house.gate.check_integrity()
