"""DeepSeek V4 on the pool, token for token against the same model alone, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import serving
import torch
from conversations import Request, encode
from options import V4, Options
from scheduler import Scheduler
from tiny_models import build, deepseek_v4_config, generate_alone, glm_config, precision

from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.integrations import deepseek_v4
from hisparse_sgl.integrations.deepseek_v4 import PooledModel, layout_of
from hisparse_sgl.integrations.deepseek_v4_cache import RequestState
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.requests import Admission

PAGE = 128
TEXT = encode("The pool keeps a row for four tokens on the host, and hot rows on the device. " * 20)


@functools.cache
def model_pair() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    pooled, alone = (build(deepseek_v4_config(), torch.float64, seed=3) for _ in range(2))
    return pooled, alone


def prompt(length: int, own: int) -> list[int]:
    """`length` tokens whose first 140 all prompts share."""
    noise = torch.randint(0, 256, (max(0, length - 140),), generator=torch.Generator().manual_seed(own))
    return (TEXT[:140] + noise.tolist())[:length]


def make_pool(**changes: Any) -> HiSparsePool:
    model, _ = model_pair()
    sizes = {"device_pages": 9, "host_pages": 60, "device_buffer_size": 32, "max_requests": 4}
    config = HiSparseConfig(
        **{"top_k": 16, "context_len": 1024, "poison": True, "kernels": "reference", **sizes, **changes}
    )
    return HiSparsePool(layout_of(model.config, model.dtype, PAGE), config)


Spoil = Callable[[PooledModel], None]


def serve(lengths: list[int], spoil: Spoil | None = None, **changes: Any) -> SimpleNamespace:
    """Serves prompts of these lengths and a second turn of the first; compares each with the model alone."""
    pooled, alone = model_pair()
    requests = [Request(f"r{i}", prompt(length, i), 10) for i, length in enumerate(lengths)]
    requests[0].rid, requests[0].follow_up = "t0", TEXT[100:130]
    with make_pool(**changes) as pool, precision(torch.float64):
        model = PooledModel(pooled, pool)
        if spoil:
            spoil(model)
        try:
            ended = Scheduler(model, requests, 37, max_running=4, on_step=pool.check_integrity).run()
        finally:
            model.close()
        assert not model.states
        mismatches = pool.audit()
        equal = [generate_alone(alone, r.prompt, len(r.tokens)) == r.tokens for r in ended]
        return SimpleNamespace(ended=ended, equal=equal, counters=pool.counters, mismatches=mismatches)


def test_ragged_chunked_and_reused_prefixes_equal_the_model_alone() -> None:
    run = serve([250, 3, 390, 520], device_pages=14)
    assert run.equal == [True] * 5
    assert run.mismatches == 0
    second_turn = next(r for r in run.ended if r.rid == "t1")
    assert second_turn.cached_tokens == 256, "the second turn did not find the pages that decoding filled"


def test_a_prompt_larger_than_the_device_is_computed_out_of_its_hot_region() -> None:
    run = serve([500], device_pages=6)
    assert [request.hot for request in run.ended] == [False, True]
    assert run.ended[1].cached_tokens == 384
    assert run.counters.hot_misses > 0 and run.mismatches == 0
    assert run.equal == [True] * 2


def _drop_one_row(model: PooledModel) -> None:
    swap_in = model.pool.swap_in

    def spoiled(group: int, positions: torch.Tensor) -> torch.Tensor:
        rows = swap_in(group, positions)
        rows[:, 0] = -1
        return rows

    model.pool.swap_in = spoiled  # type: ignore[method-assign]


def _resume_without_a_window(model: PooledModel) -> None:
    start = model.start

    def spoiled(rid: str, admission: Admission) -> None:
        start(rid, admission)
        windows = model.states[rid].windows
        windows.update({layer: torch.zeros_like(rows) for layer, rows in windows.items()})

    model.start = spoiled  # type: ignore[method-assign]


def _resume_without_an_overlap(model: PooledModel) -> None:
    start = model.start

    def spoiled(rid: str, admission: Admission) -> None:
        start(rid, admission)
        model.states[rid].overlaps.clear()

    model.start = spoiled  # type: ignore[method-assign]


def _token_positions(model: PooledModel) -> None:
    """Ask for positions of tokens where those of rows are meant."""
    swap_in = model.pool.swap_in
    model.pool.swap_in = lambda group, positions: swap_in(group, positions // 4)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "spoil", [_drop_one_row, _resume_without_a_window, _resume_without_an_overlap, _token_positions]
)
def test_the_comparison_can_fail(spoil: Spoil) -> None:
    assert not all(serve([250, 390], spoil).equal)


def test_a_hit_is_cut_where_no_state_was_kept() -> None:
    pooled, _ = model_pair()
    with make_pool(device_pages=30) as pool, precision(torch.float64):
        model = PooledModel(pooled, pool)
        keep = pool.keep_state
        pool.keep_state = lambda rid, n, state: keep(rid, n, state) if n != 2 * PAGE else None  # type: ignore
        Scheduler(model, [Request("first", prompt(300, 1), 4)], 96, max_running=1).run()
        admission = pool.admit("again", prompt(300, 1))
        assert admission == Admission(PAGE, PAGE, False, admission.state, PAGE)
        assert isinstance(admission.state, RequestState)
        assert {layer: len(rows) for layer, rows in admission.state.windows.items()} == dict.fromkeys(
            range(5), 127
        )
        assert f"{admission}" == (
            f"Admission(cached_tokens={PAGE}, resident_tokens={PAGE}, hot=False, shortened_tokens={PAGE})"
        )
        model.close()


def test_the_layout_of_a_model() -> None:
    layout = layout_of(deepseek_v4_config(), torch.float64, 256)
    c4, c128 = layout.groups
    assert (c4.tokens_per_row, c4.row.page_size, c4.num_layers, c4.index_row_bytes) == (4, 64, 2, 128)
    assert (c128.tokens_per_row, c128.row.page_size, c128.num_layers) == (128, 2, 2)
    assert layout.host_group is c4 and layout.device_groups == (c128,) and layout.needs_state


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layout_of(deepseek_v4_config(), torch.float64, 64), "page_size is 64 .+ multiple of 128"),
        (lambda: layout_of(glm_config(), torch.float64), "model_type is 'glm_moe_dsa', the limit is"),
    ],
)
def test_refused_layouts(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_another_top_k_or_layout_is_refused() -> None:
    pooled, _ = model_pair()
    with make_pool(top_k=8) as pool, pytest.raises(ValueError, match="top_k of the pool is 8"):
        PooledModel(pooled, pool)
    layout = layout_of(pooled.config, torch.float32, PAGE)
    config = HiSparseConfig(top_k=16, context_len=256, host_pages=10, device_pages=9, device_buffer_size=32)
    with HiSparsePool(layout, config) as pool, pytest.raises(ValueError, match="layout of the pool is"):
        PooledModel(pooled, pool)


def test_the_whole_example(capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(
        device_pages=17,
        hot_rows=32,
        page_size=PAGE,
        requests=6,
        seed=0,
        dtype="float64",
        kernels="reference",
        device="cpu",
        shape=V4,
    )
    assert serving.serve(deepseek_v4_config(), options, deepseek_v4) == 0
    assert "yes (6 of 6)" in capsys.readouterr().out
