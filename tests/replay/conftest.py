"""Small traces, made by the project's own generator, and the place of the public ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hisparse_sgl.replay.generator import generate, write_jsonl
from hisparse_sgl.replay.traces import Trace, TraceReader

BESIDE_THE_CHECKOUT = Path(__file__).resolve().parents[3] / "shared" / "traces"


def trace_of(records: list[dict[str, Any]], dialect: str | None = None) -> Trace:
    reader = TraceReader("test", dialect, None)
    for line in write_jsonl(iter(records)):
        reader.add(line)
    assert reader.dialect is not None and reader.block_size is not None
    return Trace("test", reader.dialect.name, reader.block_size, reader.requests, len(reader.ids))


@pytest.fixture
def records_to_trace() -> Callable[..., Trace]:
    return trace_of


@pytest.fixture
def make_trace() -> Callable[..., Trace]:
    """Like ``generate``, but a trace."""

    def make(num_requests: int, seed: int = 0, dialect: str = "mooncake", **options: float) -> Trace:
        return trace_of(list(generate(num_requests, seed, dialect, **options)), dialect)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def public_traces() -> Path:
    """Folder of the public Mooncake traces; they are not part of the project."""
    folder = Path(os.environ.get("HISPARSE_TRACES", BESIDE_THE_CHECKOUT))
    if not (folder / "mooncake_conversation.jsonl").exists():
        pytest.skip("the public traces are not here: set HISPARSE_TRACES to their folder")
    return folder
