import random
from dataclasses import dataclass

import pytest

from hisparse_sgl.radix.eviction import EvictionHeap


@dataclass(eq=False)
class Leaf:
    last_use: int
    uses: int = 1


def drain(heap: EvictionHeap) -> list:
    out = []
    while (leaf := heap.pop()) is not None:
        heap.check_integrity()
        out.append(leaf)
    return out


def test_lru_takes_the_oldest_use_first() -> None:
    old, new, middle = Leaf(1, uses=9), Leaf(3, uses=1), Leaf(2, uses=5)
    heap = EvictionHeap("lru")
    for leaf in (new, old, middle):
        heap.add(leaf)
    assert drain(heap) == [old, middle, new]


def test_lfu_takes_fewest_uses_then_the_oldest() -> None:
    often, once_new, once_old = Leaf(1, uses=9), Leaf(3), Leaf(2)
    heap = EvictionHeap("lfu")
    for leaf in (often, once_new, once_old):
        heap.add(leaf)
    assert drain(heap) == [once_old, once_new, often]


def test_add_again_moves_a_leaf_and_discard_forgets_it() -> None:
    a, b, c = Leaf(1), Leaf(2), Leaf(3)
    heap = EvictionHeap("lru")
    for leaf in (a, b, c):
        heap.add(leaf)
    a.last_use = 4
    heap.add(a)
    heap.discard(b)
    heap.discard(b)
    heap.check_integrity()
    assert b not in heap and len(heap) == 2
    assert drain(heap) == [c, a]


def test_stale_entries_stay_bounded() -> None:
    rng = random.Random(0)
    leaves = [Leaf(i) for i in range(50)]
    heap = EvictionHeap("lru")
    for clock in range(5000):
        leaf = rng.choice(leaves)
        leaf.last_use = clock
        if rng.random() < 0.3:
            heap.discard(leaf)
        else:
            heap.add(leaf)
        assert len(heap.heap) <= 2 * len(heap)
    heap.check_integrity()


def test_a_changed_key_without_add_is_seen() -> None:
    leaf = Leaf(1)
    heap = EvictionHeap("lru")
    heap.add(leaf)
    leaf.last_use = 2
    with pytest.raises(RuntimeError, match="stands at key"):
        heap.check_integrity()


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"policy='fifo' is unknown; use one of \['lfu', 'lru'\]"):
        EvictionHeap("fifo")
