import pytest

from hisparse_sgl.radix.page_hash import page_hashes
from hisparse_sgl.radix.tree import Node, PrefixTree

PAGE_SIZE = 2


def names(text: str, extra_key: str | None = None) -> list[bytes]:
    """Page hashes of a text in which each letter stands for one page."""
    return page_hashes([ord(letter) for letter in text for _ in range(PAGE_SIZE)], PAGE_SIZE, extra_key)


def publish(tree: PrefixTree, text: str, first_page: int) -> Node:
    node = tree.root
    for i, page_hash in enumerate(names(text)):
        node = tree.insert(node, page_hash, first_page + i).node
        tree.check_integrity()
    return node


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(PAGE_SIZE, is_resident=lambda page: page % 2 == 0)


def test_match_longest_known_prefix(tree: PrefixTree) -> None:
    publish(tree, "abc", 1)
    publish(tree, "abde", 11)
    found = tree.match(names("abdx"))
    assert found.pages == [1, 2, 13]
    assert found.node.page == 13
    assert found.num_resident == 1
    assert tree.match(names("xabc")) == ([], tree.root, 0)
    assert tree.match([]) == ([], tree.root, 0)
    assert tree.num_pages == 5


def test_known_hash_keeps_its_own_page(tree: PrefixTree) -> None:
    first = tree.insert(tree.root, names("a")[0], 1)
    second = tree.insert(tree.root, names("a")[0], 2)
    assert first.is_new and not second.is_new
    assert second.node is first.node and second.node.page == 1
    assert tree.num_pages == 1


def test_tenants_never_share(tree: PrefixTree) -> None:
    publish(tree, "abc", 1)
    assert tree.match(names("abc", "tenant")).pages == []
    assert tree.match(names("abc")).pages == [1, 2, 3]


def test_lru_order_children_first(tree: PrefixTree) -> None:
    publish(tree, "ab", 1)
    publish(tree, "cd", 11)
    publish(tree, "ef", 21)
    tree.match(names("ab"))
    tree.match(names("c"))
    tree.check_integrity()
    # d was used at its insertion, then come ef, then ab (matched), then c (matched last).
    assert tree.evict(10) == [12, 22, 21, 2, 1, 11]
    tree.check_integrity()
    assert tree.num_pages == tree.num_evictable == 0


def test_lfu_order(tree: PrefixTree) -> None:
    tree = PrefixTree(PAGE_SIZE, policy="lfu")
    publish(tree, "a", 1)
    publish(tree, "b", 2)
    publish(tree, "c", 3)
    for text in ("a", "a", "c"):
        tree.match(names(text))
        tree.check_integrity()
    assert [tree.evict(1) for _ in range(4)] == [[2], [3], [1], []]


def test_peek_does_not_touch(tree: PrefixTree) -> None:
    publish(tree, "a", 1)
    publish(tree, "b", 2)
    assert tree.peek(names("a")).pages == [1]
    assert tree.evict(1) == [1]


def test_lock_protects_the_path_and_counts_exactly(tree: PrefixTree) -> None:
    publish(tree, "abc", 1)
    publish(tree, "abd", 11)
    node = tree.match(names("ab")).node
    tree.lock(node)
    tree.lock(node)
    tree.check_integrity()
    assert tree.num_evictable == 2
    assert sorted(tree.evict(10)) == [3, 13]
    tree.unlock(node)
    tree.check_integrity()
    assert tree.num_evictable == 0 and tree.evict(10) == []
    tree.unlock(node)
    tree.check_integrity()
    assert tree.evict(10) == [2, 1]


def test_two_holders_on_two_branches(tree: PrefixTree) -> None:
    left, right = publish(tree, "abc", 1), publish(tree, "abd", 11)
    tree.lock(left)
    tree.lock(right)
    assert tree.num_evictable == 0
    tree.unlock(left)
    tree.check_integrity()
    assert tree.num_evictable == 1 and tree.evict(9) == [3]
    tree.unlock(right)
    assert tree.num_evictable == 3


def test_moving_a_lock_forward_is_constant_work(tree: PrefixTree) -> None:
    """A chain published page by page under a moving lock takes linear work: no move walks the chain."""
    walked = 0

    class CountingNode(Node):
        __slots__ = ()

        @property
        def is_locked(self) -> bool:
            nonlocal walked
            walked += 1
            return self.locks > 0 or self.locked_children > 0

    node = tree.root
    tree.lock(node)
    for i in range(200):
        child = CountingNode(i + 1, bytes([i]), node)
        tree.nodes[child.page_hash] = child
        node.num_children += 1
        tree.leaves.add(child)
        tree.lock(child)
        tree.unlock(node)
        node = child
    assert walked <= 200 * 10
    tree.check_integrity()
    assert tree.num_evictable == 0


def test_unlock_counts_as_use(tree: PrefixTree) -> None:
    held = publish(tree, "a", 1)
    tree.lock(held)
    publish(tree, "b", 2)
    tree.unlock(held)
    assert tree.evict(2) == [2, 1]


def test_reset_leaves_dead_nodes_whose_unlock_is_ignored(tree: PrefixTree) -> None:
    node = publish(tree, "abc", 1)
    tree.lock(node)
    tree.lock(tree.root)
    assert sorted(tree.reset()) == [1, 2, 3]
    tree.check_integrity()
    assert not node.alive and tree.num_pages == 0
    publish(tree, "abc", 11)
    tree.unlock(node)
    tree.unlock(tree.root)
    tree.check_integrity()
    assert tree.num_evictable == 3


def test_misuse_is_an_assertion(tree: PrefixTree) -> None:
    node = publish(tree, "ab", 1)
    with pytest.raises(AssertionError, match="more often"):
        tree.unlock(node)
    with pytest.raises(AssertionError, match="another parent"):
        tree.insert(tree.root, node.page_hash, 9)
    tree.evict(1)
    with pytest.raises(AssertionError, match="left the tree"):
        tree.lock(node)
    with pytest.raises(AssertionError, match="left the tree"):
        tree.insert(node, b"x", 9)


def corrupt_page(tree: PrefixTree, node: Node) -> None:
    node.page = 1


def corrupt_children(tree: PrefixTree, node: Node) -> None:
    node.num_children += 1


def corrupt_locks(tree: PrefixTree, node: Node) -> None:
    node.locks += 1


def corrupt_locked_children(tree: PrefixTree, node: Node) -> None:
    node.parent.locked_children += 1


def corrupt_heap(tree: PrefixTree, node: Node) -> None:
    tree.leaves.discard(node)


def corrupt_parent(tree: PrefixTree, node: Node) -> None:
    del tree.nodes[node.parent.page_hash]


def corrupt_name(tree: PrefixTree, node: Node) -> None:
    node.page_hash = b"other"


def corrupt_null_page(tree: PrefixTree, node: Node) -> None:
    node.page = 0


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_page,
        corrupt_children,
        corrupt_locks,
        corrupt_locked_children,
        corrupt_heap,
        corrupt_parent,
        corrupt_name,
        corrupt_null_page,
    ],
)
def test_check_integrity_sees_corruption(tree: PrefixTree, corrupt) -> None:
    corrupt(tree, publish(tree, "abc", 1))
    with pytest.raises(RuntimeError):
        tree.check_integrity()
