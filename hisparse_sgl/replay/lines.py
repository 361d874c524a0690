"""Lines of a trace, one at a time: plain or gzip, a file or standard input, never a line without a limit."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

MAX_LINE_BYTES = 4 << 20
"""Three times a prompt of 1 M tokens in blocks of 16 with ids of 20 digits."""

MAX_BLANK_LINES = 100_000

GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A trace that cannot be used; the message names the file, the line and the fix."""


@contextmanager
def open_trace(path: str) -> Iterator[io.BufferedIOBase]:
    """The bytes of a trace; ``-`` is standard input. Content decides about gzip, not the name."""
    if path == "-" and sys.stdin is None:
        raise TraceError("<stdin>: it is closed; give the path of a JSONL trace, or pipe one in")
    try:
        raw = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
        assert isinstance(raw, io.BufferedReader)
        magic = raw.peek(2)[:2]
    except OSError as error:
        raise TraceError(
            f"{path}: {error.strerror}; give the path of a JSONL trace, or - for stdin"
        ) from None
    try:
        yield gzip.GzipFile(fileobj=raw) if magic == GZIP_MAGIC else raw
    finally:
        if path != "-":
            raw.close()


def numbered_lines(stream: io.BufferedIOBase, name: str) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of each line that is not blank; ``TraceError`` for one that is too long.

    The same for very many blank ones: a file of line ends that a small gzip file unpacks to.
    """
    number = blank = 0
    while True:
        number += 1
        try:
            line = stream.readline(MAX_LINE_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise TraceError(
                f"{name}:{number}: the gzip data ends or breaks here; copy the file again"
            ) from None
        except OSError as error:
            raise TraceError(f"{name}:{number}: {error.strerror}; give a file that can be read") from None
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(
                f"{name}:{number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB, so this is no JSONL "
                "trace; give a file with one request a line"
            )
        if line.strip():
            blank = 0
            yield number, line
            continue
        blank += 1
        if blank > MAX_BLANK_LINES:
            raise TraceError(
                f"{name}:{number}: more than {MAX_BLANK_LINES:,} blank lines follow each other, so this is "
                "no JSONL trace; give a file with one request a line"
            )
