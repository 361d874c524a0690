"""The generator: equal for equal arguments, ordered, and consistent from turn to turn."""

from __future__ import annotations

from hashlib import sha256

import pytest

from hisparse_sgl.replay.generator import demo_trace, generate, write_jsonl

FIRST_FIVE = "b5261799c321186ac973558fd99bd35c701e9da33b67d1ddc339a08cbd0e2dd7"


def test_equal_arguments_give_equal_bytes() -> None:
    data = b"".join(write_jsonl(generate(300, 4, "qwen")))
    assert data == b"".join(write_jsonl(generate(300, 4, "qwen")))
    assert data != b"".join(write_jsonl(generate(300, 5, "qwen")))
    assert sha256(b"".join(write_jsonl(generate(5)))).hexdigest() == FIRST_FIVE


@pytest.mark.parametrize("dialect", ["mooncake", "qwen", "kvcache-simulator"])
def test_blocks_name_prefixes(dialect: str) -> None:
    """A block id stands behind one other id only, as in a trace of real prompts."""
    before: dict[int, int | None] = {}
    for record in generate(400, 3, dialect):
        above = None
        for block in record["hash_ids"]:
            assert before.setdefault(block, above) == above
            above = block


def test_later_turns_hold_the_earlier_ones() -> None:
    turns = {record["chat_id"]: record for record in generate(400, 6, "qwen")}
    later = [record for record in turns.values() if record["parent_chat_id"] != -1]
    assert len(later) > 100
    for record in later:
        parent = turns[record["parent_chat_id"]]
        length = parent["input_length"]
        assert record["input_length"] > length + parent["output_length"]
        assert record["hash_ids"][: length // 16] == parent["hash_ids"][: length // 16]
        assert record["turn"] == parent["turn"] + 1 and record["timestamp"] > parent["timestamp"]


def test_demo_trace_shares_prefixes() -> None:
    trace = demo_trace(300)
    assert len(trace.requests) == 300
    assert trace.num_blocks < 0.6 * sum(len(request.blocks) for request in trace.requests)
