"""BlockPool: unit tests, and a state machine against a dict oracle."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse_sgl.mem_pool.block_pool import BlockPool
from hisparse_sgl.mem_pool.extents import Extents


def never(block: int) -> None:
    raise RuntimeError(f"block {block} was reused")


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert pool.get_new_blocks(3) == [1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(AssertionError):
        pool.get_new_blocks(1)
    pool.check_integrity()


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_too_few_blocks(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(num_blocks)


def test_too_many_blocks_wanted_changes_nothing() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(2)
    pool.unpin_blocks(blocks[:1], never)
    with pytest.raises(AssertionError):
        pool.get_new_blocks(4)
    assert (pool.num_free, pool.num_unpinned, pool.num_reused) == (3, 1, 0)
    pool.check_integrity()


def test_unpinned_blocks_come_last_and_oldest_first() -> None:
    pool = BlockPool(5)
    one, two, three, four = pool.get_new_blocks(4)
    reused: list[tuple[int, int]] = []

    def on_reuse(block: int) -> None:
        reused.append((block, pool.ref_counts[block]))

    pool.unpin_blocks([three, one], on_reuse)
    pool.free_blocks([four])
    assert (pool.num_free, pool.num_truly_free, pool.num_unpinned) == (3, 1, 2)
    assert pool.get_new_blocks(2) == [four, three]
    assert reused == [(three, 0)], "the callback runs before the block has a new holder"
    assert pool.get_new_blocks(1) == [one]
    assert reused == [(three, 0), (one, 0)] and pool.num_reused == 2
    assert pool.ref_counts[two] == 1
    pool.check_integrity()


def test_adopted_block_drops_its_watcher() -> None:
    pool = BlockPool(3)
    one, two = pool.get_new_blocks(2)
    assert pool.unpin_blocks([one], never) == [one]
    assert pool.pin_blocks([one, two]) == 1
    assert pool.num_adopted == 1 and pool.num_free == 0
    pool.unpin_blocks([two], never)
    assert pool.num_free == 0, "two still has a reference"
    pool.free_blocks([one, two])
    assert pool.get_new_blocks(2) == [one, two]


def test_discarded_block_is_truly_free_without_callback() -> None:
    pool = BlockPool(2)
    [block] = pool.get_new_blocks(1)
    pool.unpin_blocks([block], never)
    pool.discard_blocks([block])
    assert pool.num_truly_free == 1 and pool.num_unpinned == 0
    assert pool.get_new_blocks(1) == [block] and pool.num_reused == 0
    pool.check_integrity()


def test_our_own_bugs_are_asserted() -> None:
    pool = BlockPool(3)
    [block] = pool.get_new_blocks(1)
    with pytest.raises(AssertionError, match="not unpinned"):
        pool.discard_blocks([block])
    pool.free_blocks([block])
    for misuse in (pool.free_blocks, pool.pin_blocks):
        with pytest.raises(AssertionError):
            misuse([block])
    with pytest.raises(AssertionError):
        pool.unpin_blocks([block], never)
    with pytest.raises(AssertionError):
        BlockPool(8, Extents(7, 2))


def test_check_integrity_sees_damage() -> None:
    pool = BlockPool(4)
    [block] = pool.get_new_blocks(1)
    pool.ref_counts[block] = 0
    with pytest.raises(RuntimeError, match=f"block {block}"):
        pool.check_integrity()
    pool.ref_counts[block] = 1
    pool.free.push(block)
    with pytest.raises(RuntimeError, match=f"block {block}"):
        pool.check_integrity()
    pool = BlockPool(4)
    pool.ref_counts[0] = 1
    with pytest.raises(RuntimeError, match="null"):
        pool.check_integrity()


class BlockPoolMachine(RuleBasedStateMachine):
    """The oracle: references by block, the unpinned order, and the content each block holds."""

    NUM_BLOCKS = 9

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(self.NUM_BLOCKS, 3)
        self.pool = BlockPool(self.NUM_BLOCKS, self.extents)
        self.references: dict[int, int] = {}
        self.unpinned: list[int] = []
        self.reused: list[int] = []
        self.num_reused = 0
        self.num_adopted = 0

    def free_count(self) -> int:
        return self.NUM_BLOCKS - 1 - len(self.references)

    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.free_count()))
        near = data.draw(st.none() | st.integers(1, self.NUM_BLOCKS - 1))
        truly_free = self.free_count() - len(self.unpinned)
        blocks = self.pool.get_new_blocks(n, near)
        taken = max(0, n - truly_free)
        assert len(set(blocks)) == n and not set(blocks) & self.references.keys()
        assert blocks[n - taken :] == self.unpinned[:taken] == self.reused
        assert not set(blocks[: n - taken]) & set(self.unpinned)
        del self.unpinned[:taken]
        self.reused.clear()
        self.num_reused += taken
        self.references.update(dict.fromkeys(blocks, 1))

    @precondition(lambda self: self.references or self.unpinned)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted([*self.references, *self.unpinned])))
        was_unpinned = block in self.unpinned
        assert self.pool.pin_blocks([block]) == was_unpinned
        if was_unpinned:
            self.unpinned.remove(block)
            self.num_adopted += 1
        self.references[block] = self.references.get(block, 0) + 1

    @precondition(lambda self: self.references)
    @rule(data=st.data(), unpin=st.booleans())
    def drop(self, data: st.DataObject, unpin: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        if unpin:
            self.pool.unpin_blocks([block], self.reused.append)
        else:
            self.pool.free_blocks([block])
        self.references[block] -= 1
        if not self.references[block]:
            del self.references[block]
            if unpin:
                self.unpinned.append(block)

    @precondition(lambda self: self.unpinned)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.unpinned))
        self.pool.discard_blocks([block])
        self.unpinned.remove(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        self.extents.check_integrity()
        assert self.reused == []
        assert self.pool.num_free == self.free_count()
        assert list(self.pool.unpinned) == self.unpinned
        assert {b: n for b, n in enumerate(self.pool.ref_counts) if n} == self.references
        assert (self.pool.num_reused, self.pool.num_adopted) == (self.num_reused, self.num_adopted)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
