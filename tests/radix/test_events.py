import pytest

from hisparse_sgl.radix.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, event_hash
from hisparse_sgl.radix.page_hash import page_hashes
from hisparse_sgl.radix.tree import PrefixTree


def test_tree_emits_stored_removed_cleared() -> None:
    log = EventLog(enabled=True)
    tree = PrefixTree(2, events=log)
    first, second = page_hashes([1, 2, 3, 4], 2)
    node = tree.insert(tree.root, first, 1, [1, 2]).node
    tree.insert(node, second, 2, [3, 4])
    tree.insert(node, second, 3, [3, 4])
    tree.evict(1)
    tree.reset()
    assert log.take() == [
        BlockStored([event_hash(first)], None, [1, 2], 2),
        BlockStored([event_hash(second)], event_hash(first), [3, 4], 2),
        BlockRemoved([event_hash(second)]),
        AllBlocksCleared(),
    ]
    assert log.take() == []


def test_field_names_and_order_of_the_engines() -> None:
    assert BlockStored.__slots__ == (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
    )
    assert BlockRemoved.__slots__ == ("block_hashes", "medium")


def test_event_hash_is_signed_64_bit_of_the_first_bytes() -> None:
    assert event_hash(bytes.fromhex("ff" * 32)) == -1
    assert event_hash(bytes.fromhex("7f" + "ff" * 31)) == 2**63 - 1
    assert event_hash(bytes.fromhex("00" * 7 + "02" + "ff" * 24)) == 2


def test_full_log_drops_the_oldest_and_counts() -> None:
    log = EventLog(enabled=True, max_events=2)
    events = [BlockRemoved([i]) for i in range(5)]
    for event in events:
        log.append(event)
    assert log.dropped == 3 and len(log) == 2
    assert log.take() == events[3:]


def test_disabled_log_keeps_nothing() -> None:
    tree = PrefixTree(1)
    tree.insert(tree.root, b"a", 1)
    tree.reset()
    assert tree.events.take() == [] and tree.events.dropped == 0


def test_limit_is_checked() -> None:
    with pytest.raises(ValueError, match="max_events=0 must be at least 1"):
        EventLog(max_events=0)
