"""Reading traces: three dialects, gzip, standard input, and every kind of bad line."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hisparse_sgl.replay.generator import generate, write_jsonl
from hisparse_sgl.replay.lines import MAX_BLANK_LINES, MAX_LINE_BYTES, TraceError
from hisparse_sgl.replay.sequences import Sequences
from hisparse_sgl.replay.traces import MAX_BAD_FIRST, Trace, read_trace

GOOD = {"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [3, 9]}
QWEN = {
    "chat_id": 1,
    "parent_chat_id": -1,
    "timestamp": 1.5,
    "input_length": 20,
    "output_length": 4,
    "type": "text",
    "turn": 1,
    "hash_ids": [1, 2],
}


def write(path: Path, *lines: Any) -> str:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("dialect", "block_size"), [("mooncake", 512), ("qwen", 16), ("kvcache-simulator", 64)]
)
def test_generated_traces_are_read_back_and_detected(tmp_path: Path, dialect: str, block_size: int) -> None:
    records = list(generate(50, 1, dialect))
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(write_jsonl(iter(records))))
    trace = read_trace(str(path))
    assert (trace.dialect, trace.block_size, len(trace.requests)) == (dialect, block_size, 50)
    ticks = 1 if dialect == "qwen" else 1000
    names: dict[int, int] = {}
    for record, request in zip(records, trace.requests, strict=True):
        assert request.arrival == pytest.approx(record["timestamp"] / ticks)
        assert (request.input_tokens, request.output_tokens) == (
            record["input_length"],
            record["output_length"],
        )
        assert [names.setdefault(i, len(names)) for i in record["hash_ids"]] == request.blocks.tolist()
    assert trace.num_blocks == len(names)


def test_gzip_is_seen_by_content_and_stdin_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(write_jsonl(generate(20, 2)))
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(data))
    from_gzip = read_trace(str(path))
    for content in (data, gzip.compress(data)):
        raw = io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
        from_stdin = read_trace("-")
        assert from_stdin.name == "<stdin>"
        assert [r.blocks for r in from_stdin.requests] == [r.blocks for r in from_gzip.requests]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timestamp": -1}, "timestamp is -1"),
        ({"timestamp": float("nan")}, "timestamp is nan"),
        ({"timestamp": "5"}, "timestamp is '5'"),
        ({"timestamp": "5" * 999}, f"timestamp is '{'5' * 39}; give"),
        ({"timestamp": 4}, "sort the trace by timestamp"),
        ({"hash_ids": [3]}, "hash_ids has 1 ids, input_length 1000 makes 2 blocks of 512"),
        ({"hash_ids": [3, 4, 5]}, "hash_ids has 3 ids"),
        ({"hash_ids": []}, "hash_ids is missing or empty"),
        ({"hash_ids": [3, True]}, "hash_ids holds 'True'"),
        ({"hash_ids": [3, 1.5]}, "hash_ids holds '1.5'"),
        ({"input_length": 0}, "input_length is 0"),
        ({"input_length": True}, "input_length is True"),
        ({"input_length": 10**12}, "input_length is 1000000000000"),
        ({"output_length": -3}, "output_length is -3"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 256, "hash_ids": [1, 2, 3, 4]}, "block_size is 256, the ones before have 512"),
        ({"block_tokens": [512, 400]}, "block_tokens does not give"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, GOOD, {**GOOD, **change}, GOOD)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    message = str(error.value)
    assert message.startswith(f"{path}:3: ") and words in message and "--skip-bad" in message
    assert "\n" not in message
    kept = read_trace(path, skip_bad=True)
    assert (len(kept.requests), kept.skipped) == (3, 1)
    assert kept.first_skipped.startswith(f"{path}:3: ")


@pytest.mark.parametrize(
    "line", ['{"timestamp": 5, "input_len', "[1, 2]", "null", "\x00\x01", "[" * 100_000, "9" * 6000]
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(TraceError, match=":2: "):
        read_trace(path)
    assert len(read_trace(path, skip_bad=True).requests) == 1


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    for key in ("timestamp", "input_length", "output_length", "hash_ids"):
        record = {name: value for name, value in GOOD.items() if name != key}
        with pytest.raises(TraceError, match=key):
            read_trace(write(tmp_path / "t.jsonl", GOOD, record), dialect="mooncake")


def test_a_bad_line_changes_nothing_for_the_next_ones(tmp_path: Path) -> None:
    bad = {**GOOD, "hash_ids": [70, 71], "timestamp": -1}
    path = write(tmp_path / "t.jsonl", bad, GOOD, {**GOOD, "hash_ids": [3, 11]})
    trace = read_trace(path, skip_bad=True)
    assert [request.blocks.tolist() for request in trace.requests] == [[0, 1], [0, 2]]


def test_a_huge_junk_file_is_refused_without_being_loaded(tmp_path: Path) -> None:
    path = tmp_path / "junk"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # sparse zeros: one line of 1 GiB
    tracemalloc.start()
    with pytest.raises(TraceError, match=r"junk:1: the line is longer than 4 MiB"):
        read_trace(str(path), skip_bad=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_LINE_BYTES


def test_junk_lines_end_the_reading_even_when_bad_lines_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *["junk"] * (MAX_BAD_FIRST + 5), GOOD)
    with pytest.raises(TraceError, match=f":{MAX_BAD_FIRST + 1}: "):
        read_trace(path, skip_bad=True)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 50)[:-9])
    (tmp_path / "empty").write_bytes(b"\n\n")
    (tmp_path / "blank.gz").write_bytes(gzip.compress(b"\n" * (MAX_BLANK_LINES + 9)))
    for path, words in [
        (tmp_path / "missing", "No such file"),
        (Path("/proc/self/mem"), "Input/output error"),
        (tmp_path / "blank.gz", f":{MAX_BLANK_LINES + 1}: more than 100,000 blank lines"),
        (tmp_path, "Is a directory"),
        (cut, "gzip data"),
        (tmp_path / "empty", "no request in it"),
    ]:
        with pytest.raises(TraceError, match=words):
            read_trace(str(path))


def test_a_closed_standard_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(TraceError, match="it is closed"):
        read_trace("-")


def test_block_size_of_records_beats_the_option_and_is_needed(tmp_path: Path) -> None:
    bare = {"input_length": 100, "hash_ids": ["a", "b"]}
    path = write(tmp_path / "t.jsonl", bare)
    with pytest.raises(TraceError, match="block_size is missing"):
        read_trace(path)
    assert read_trace(path, block_size=64).block_size == 64
    path = write(tmp_path / "u.jsonl", {**bare, "block_size": 64})
    trace = read_trace(path, block_size=16)
    assert (trace.dialect, trace.block_size, trace.requests[0].arrival) == ("kvcache-simulator", 64, 0.0)


def test_block_tokens_weigh_the_blocks(tmp_path: Path) -> None:
    record = {"block_size": 64, "input_length": 100, "hash_ids": [1, 2, 3], "block_tokens": [10, 60, 30]}
    sequences = Sequences(read_trace(write(tmp_path / "t.jsonl", record)))
    assert [sequences.prompt_tokens(0, n) for n in range(4)] == [0, 10, 70, 100]


def test_limit_stops_the_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, GOOD, "junk")
    assert len(read_trace(path, limit=2).requests) == 2


def test_an_answer_carries_the_ids_of_the_next_turn(records_to_trace: Callable[..., Trace]) -> None:
    # 40 + 30 tokens: the next prompt has 4 full blocks of them and a fifth that goes on.
    first = {**QWEN, "chat_id": 7, "input_length": 40, "output_length": 30, "hash_ids": [1, 2, 50]}
    after = {**QWEN, "chat_id": 8, "parent_chat_id": 7, "input_length": 85, "hash_ids": [1, 2, 3, 4, 5, 60]}
    other = {**QWEN, "chat_id": 9, "parent_chat_id": 7, "input_length": 85, "hash_ids": [1, 9, 3, 4, 5, 61]}
    trace = records_to_trace([first, other, after])
    assert [request.next_turn for request in trace.requests] == [2, None, None]
    sequences = Sequences(trace)
    ids = sequences.of(0)
    next_prompt = trace.requests[2].blocks.tolist()
    assert [*ids.prompt, *ids.answer][:4] == next_prompt[:4]
    assert (len(ids.prompt), len(ids.answer), ids.offset) == (2, 3, 8)
    assert ids.answer[2] >= trace.num_blocks
    assert [sequences.cached_tokens(0, n) for n in (1, 2, 3)] == [16, 32, 48]
    alone = sequences.of(1)
    assert (len(alone.prompt), alone.offset, len(alone.answer)) == (6, 0, 1)
    assert not set(alone.answer) & set(ids.answer)
