"""Options of the examples: what is refused, how, and what the accepted ones lead to."""

from __future__ import annotations

import pytest
from conversations import LARGEST_CONTEXT, first_turns, next_turn
from options import parse


@pytest.fixture(autouse=True)
def _keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--page-size", "12"], "--page-size is 12, the limit is a power of two from 4 to 64; use 16"),
        (["--hot-rows", "40"], "--hot-rows is 40, the limit is a multiple of --page-size 16"),
        (["--hot-rows", "0"], "--hot-rows is 0, the limit is"),
        (["--device-pages", "9"], "--device-pages is 9, the limit is 10 to 100000"),
        (["--requests", "2"], "--requests is 2, the limit is 6 to 1000; use 24"),
        (["--seed", "-1"], "--seed is -1, the limit is 0"),
        (["--seed", "x"], "argument --seed: invalid int value"),
        (["--device", "cuda", "--kernels", "reference"], "--kernels is reference, the limit is --device cpu"),
    ],
)
def test_a_bad_value_ends_with_one_line_and_code_2(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse("", argv)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_the_default_kernels_follow_the_device() -> None:
    assert parse("", []).kernels == "reference"
    assert parse("", ["--device", "cuda"]).kernels == "auto"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_every_context_stays_below_the_largest(seed: int, page_size: int) -> None:
    requests = first_turns(24, page_size, seed)
    total = 0
    for request in requests:
        assert len({tuple(r.prompt[:160]) for r in requests}) == 1, "the system prompt is not shared"
        request.tokens = [0] * request.num_tokens
        second = next_turn(request)
        last = second or request
        assert len(last.prompt) + last.num_tokens <= LARGEST_CONTEXT
        total += 2 if second else 1
    assert total == 24
    rows_of_first = len(requests[0].prompt) + requests[0].num_tokens - 1
    assert rows_of_first % page_size == 0
    assert requests[-1].abort_at and requests[-1].follow_up is None
