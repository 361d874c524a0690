"""Reads request traces in three dialects of JSONL: Mooncake, Qwen-Bailian and kvcache-simulator."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hisparse_sgl.replay.lines import TraceError, numbered_lines, open_trace

MAX_TOKENS = 1 << 27
MAX_BLOCK_SIZE = 1 << 16
MAX_BAD_FIRST = 1000
"""Bad lines before the first good one, after which even ``--skip-bad`` gives up."""


class Dialect(NamedTuple):
    """What differs between the formats: unit of ``timestamp``, tokens a block (None: each record says it)."""

    name: str
    ticks_per_second: float
    block_size: int | None
    timed: bool  # every record must have a timestamp and an output_length


DIALECTS = {
    "mooncake": Dialect("mooncake", 1000.0, 512, True),
    "qwen": Dialect("qwen", 1.0, 16, True),
    "kvcache-simulator": Dialect("kvcache-simulator", 1000.0, None, False),
}


@dataclass(slots=True, eq=False)
class TraceRequest:
    """One request. ``blocks`` are the ids of its prompt's blocks, renumbered from 0 in order of appearance.

    ``block_tokens`` holds the tokens of each block where the trace gives them; else every block but the last
    is full. ``next_turn`` is the index of the request whose prompt goes on where this answer ends.
    """

    arrival: float  # seconds
    input_tokens: int
    output_tokens: int
    blocks: array[int] = field(repr=False)
    block_tokens: array[int] | None = None
    next_turn: int | None = None


@dataclass(slots=True, eq=False)
class Trace:
    """A whole trace; ``num_blocks`` counts different block ids."""

    name: str
    dialect: str
    block_size: int
    requests: list[TraceRequest]
    num_blocks: int
    skipped: int = 0
    first_skipped: str = ""

    @property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)


class TraceReader:
    """Turns lines into requests; keeps what one line needs to know about the lines before it."""

    def __init__(self, name: str, dialect: str | None, block_size: int | None) -> None:
        self.name = name
        self.dialect = DIALECTS[dialect] if dialect else None
        self.block_size = block_size
        self.declared_block_size: int | None = None
        self.ids: dict[int | str, int] = {}
        self.requests: list[TraceRequest] = []
        self.chats: dict[Any, int] = {}

    def add(self, line: bytes) -> None:
        """Append the request of one line. ``ValueError`` for a bad one; nothing has changed then."""
        record = _parse(line)
        dialect = self.dialect or detect(record)
        input_tokens = _whole(record, "input_length", 1, MAX_TOKENS)
        output_tokens = _whole(record, "output_length", 0, MAX_TOKENS, None if dialect.timed else 0)
        block_size = self._block_size(record, dialect)
        blocks = _ids(record)
        block_tokens = _block_tokens(record, len(blocks), input_tokens, block_size)
        if block_tokens is None and len(blocks) != -(-input_tokens // block_size):
            raise ValueError(
                f"hash_ids has {len(blocks)} ids, input_length {input_tokens} makes "
                f"{-(-input_tokens // block_size)} blocks of {block_size}; correct one of them, "
                "or give the right --block-size"
            )
        arrival = self._arrival(record, dialect)
        self.dialect, self.block_size = dialect, block_size
        if record.get("block_size") is not None:
            self.declared_block_size = block_size
        dense = array("i", (self.ids.setdefault(block, len(self.ids)) for block in blocks))
        self.requests.append(TraceRequest(arrival, input_tokens, output_tokens, dense, block_tokens))
        if "chat_id" in record:
            self._link(record)

    def _block_size(self, record: dict[str, Any], dialect: Dialect) -> int:
        if record.get("block_size") is not None:
            declared = _whole(record, "block_size", 1, MAX_BLOCK_SIZE)
            known = self.declared_block_size or (self.block_size if self.requests else None)
            if known not in (None, declared):
                raise ValueError(
                    f"block_size is {declared}, the ones before have {known}; split the trace by block size"
                )
            return declared
        size = self.declared_block_size or self.block_size or dialect.block_size
        if size is None:
            raise ValueError("block_size is missing; add it to the record or give --block-size")
        return size

    def _arrival(self, record: dict[str, Any], dialect: Dialect) -> float:
        before = self.requests[-1].arrival if self.requests else 0.0
        value = record.get("timestamp")
        if value is None and not dialect.timed:
            return before
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            shown = "missing" if "timestamp" not in record else repr(value)[:40]
            raise ValueError(f"timestamp is {shown}; give a number from 0 to 1e15")
        seconds = value / dialect.ticks_per_second
        if seconds < before:
            raise ValueError(
                f"timestamp is {value}, the request before has {before * dialect.ticks_per_second:g}; "
                "sort the trace by timestamp"
            )
        return seconds

    def _link(self, record: dict[str, Any]) -> None:
        """Let the turn before know that this prompt continues it: its answer fills these blocks."""
        index = len(self.requests) - 1
        parent = self.chats.get(str(record.get("parent_chat_id")))
        self.chats[str(record["chat_id"])] = index
        if parent is None:
            return
        before, after = self.requests[parent], self.requests[index]
        full = before.input_tokens // (self.block_size or 1)
        if before.next_turn is None and before.blocks[:full] == after.blocks[:full]:
            before.next_turn = index


def read_trace(
    path: str,
    dialect: str | None = None,
    block_size: int | None = None,
    skip_bad: bool = False,
    limit: int | None = None,
    on_request: Callable[[], None] = lambda: None,
) -> Trace:
    """Read a trace file, plain or gzip; ``-`` is standard input.

    The dialect is that of the first good line unless given. ``TraceError`` (a ``ValueError``) names the file,
    the line and the fix. With ``skip_bad`` bad lines are counted and passed over.
    """
    name = "<stdin>" if path == "-" else path
    with open_trace(path) as stream:
        return _collect(numbered_lines(stream, name), name, dialect, block_size, skip_bad, limit, on_request)


def _collect(
    lines: Iterator[tuple[int, bytes]],
    name: str,
    dialect: str | None,
    block_size: int | None,
    skip_bad: bool,
    limit: int | None,
    on_request: Callable[[], None],
) -> Trace:
    reader = TraceReader(name, dialect, block_size)
    skipped, first_skipped = 0, ""
    for number, line in lines:
        if limit is not None and len(reader.requests) >= limit:
            break
        try:
            reader.add(line)
            on_request()
        except ValueError as error:
            message = f"{name}:{number}: {error}"
            if not skip_bad or (not reader.requests and skipped >= MAX_BAD_FIRST):
                advice = f" (no good line among the first {number:,})" if skip_bad else ", or pass --skip-bad"
                raise TraceError(message + advice) from None
            first_skipped = first_skipped or message
            skipped += 1
    if not reader.requests or reader.dialect is None or reader.block_size is None:
        raise TraceError(f"{name}: no request in it ({skipped} bad lines); give a JSONL trace")
    return Trace(
        name,
        reader.dialect.name,
        reader.block_size,
        reader.requests,
        len(reader.ids),
        skipped,
        first_skipped,
    )


def detect(record: dict[str, Any]) -> Dialect:
    """The dialect that a record is written in."""
    if "chat_id" in record:
        return DIALECTS["qwen"]
    if "block_size" in record or "timestamp" not in record:
        return DIALECTS["kvcache-simulator"]
    return DIALECTS["mooncake"]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not a whole JSON object (cut in half?); correct the line") from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not a JSON object; give one request a line")
    return record


def _whole(record: dict[str, Any], key: str, least: int, most: int, default: int | None = None) -> int:
    value = record.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shown = "missing" if key not in record else repr(value)[:40]
        raise ValueError(f"{key} is {shown}; give a whole number from {least} to {most}")
    return value


def _ids(record: dict[str, Any]) -> list[int | str]:
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not ids:
        raise ValueError("hash_ids is missing or empty; give the list of the prompt's block ids")
    for block in ids:
        if isinstance(block, bool) or not isinstance(block, int | str):
            raise ValueError(f"hash_ids holds {str(block)[:40]!r}; give integers or strings")
    return ids


def _block_tokens(
    record: dict[str, Any], num_blocks: int, input_tokens: int, block_size: int
) -> array[int] | None:
    tokens = record.get("block_tokens")
    if tokens is None:
        return None
    whole = isinstance(tokens, list) and all(type(n) is int and 1 <= n <= block_size for n in tokens)
    if not whole or len(tokens) != num_blocks or sum(tokens) != input_tokens:
        raise ValueError(
            f"block_tokens does not give 1 to {block_size} tokens for each of the {num_blocks} blocks and "
            f"{input_tokens} in all; correct or drop it"
        )
    return array("i", tokens)
