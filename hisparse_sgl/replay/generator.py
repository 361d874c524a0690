"""Makes traces of conversations: shared system prompts, several turns, blocks as in a real trace."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from hisparse_sgl.replay.traces import DIALECTS, Trace, TraceReader


@dataclass(slots=True)
class Turn:
    """What the next prompt of a conversation begins with."""

    ids: list[int]
    tokens: int
    number: int = 1
    parent: int = -1


def generate(
    num_requests: int = 2000,
    seed: int = 0,
    dialect: str = "mooncake",
    block_size: int | None = None,
    requests_per_second: float = 3.0,
    mean_turns: float = 3.0,
    mean_new_tokens: float = 6000.0,
    mean_answer_tokens: float = 300.0,
) -> Iterator[dict[str, Any]]:
    """Records of a trace, by timestamp. Equal arguments give equal records.

    A conversation begins with one of four system prompts; each later turn holds all before it, the answer
    included. Full blocks keep their id from turn to turn; a partial last block has an id of its own.
    """
    rng = random.Random(seed)
    form = DIALECTS[dialect]
    block = block_size or form.block_size or 64
    new_id, new_chat = count(), count(1)
    systems = [[next(new_id) for _ in range(2 + 2 * kind)] for kind in range(4)]
    arrivals: list[tuple[float, int, Turn]] = []
    clock = 0.0
    for _ in range(num_requests):
        while not arrivals or clock < arrivals[0][0]:
            clock += rng.expovariate(requests_per_second / mean_turns)
            ids = list(systems[min(3, int(rng.expovariate(1.0)))])
            heappush(arrivals, (clock, next(new_chat), Turn(ids, len(ids) * block)))
        now, chat, turn = heappop(arrivals)
        length = turn.tokens + 1 + int(rng.expovariate(1 / mean_new_tokens))
        answer = 1 + int(rng.expovariate(1 / mean_answer_tokens))
        full = _grow(turn.ids, length // block, new_id)
        hash_ids = full + ([next(new_id)] if length % block else [])
        yield _record(form.name, block, now, length, answer, hash_ids, (chat, turn.parent, turn.number))
        if rng.random() < 1 - 1 / mean_turns:
            ids = _grow(full, (length + answer) // block, new_id)
            later = Turn(ids, length + answer, turn.number + 1, chat)
            heappush(arrivals, (now + 5 + rng.expovariate(1 / 30), next(new_chat), later))


def write_jsonl(records: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """One line a record, as the public traces are written."""
    for record in records:
        yield json.dumps(record).encode() + b"\n"


def demo_trace(num_requests: int = 2000, seed: int = 0) -> Trace:
    """The trace of ``replay --demo``, through the same reader as a file."""
    reader = TraceReader("demo", "mooncake", None)
    for line in write_jsonl(generate(num_requests, seed)):
        reader.add(line)
    return Trace("demo", "mooncake", 512, reader.requests, len(reader.ids))


def _grow(ids: list[int], num_blocks: int, new_id: Iterator[int]) -> list[int]:
    return ids + [next(new_id) for _ in range(num_blocks - len(ids))]


def _record(
    dialect: str,
    block_size: int,
    seconds: float,
    length: int,
    answer: int,
    hash_ids: list[int],
    chat: tuple[int, int, int],
) -> dict[str, Any]:
    record: dict[str, Any] = {"timestamp": int(seconds * 1000)}
    record |= {"input_length": length, "output_length": answer, "hash_ids": hash_ids}
    if dialect == "qwen":
        record["timestamp"] = round(seconds, 3)
        record |= {"chat_id": chat[0], "parent_chat_id": chat[1], "turn": chat[2], "type": "text"}
    elif dialect == "kvcache-simulator":
        record["block_size"] = block_size
    return record
