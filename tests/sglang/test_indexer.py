"""Indexer rows lie in the layers that run an indexer, and SGLang's sizes count those layers alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from drive import Script
from engine import LAYER_PATTERN, MODEL, PAGE, Engine, Settings
from scenarios import HYBRID
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.runtime_context import get_context

RATIO = 3
SMALL = replace(HYBRID, tokens=20 * PAGE, ratio=RATIO)
ROW_BYTES = 2 * (int(MODEL["kv_lora_rank"]) + int(MODEL["qk_rope_head_dim"]))  # type: ignore[call-overload]
INDEX_ROW_BYTES = 128 + 4
LEADERS = LAYER_PATTERN.count("F")


@pytest.fixture
def engine() -> Iterator[Engine]:
    built = Engine(SMALL, seed=0)
    yield built
    built.close()


def configurator(engine: Engine) -> Any:
    runner: Any = engine.scheduler.tp_worker.model_runner
    return runner.kv_cache_configurator


def test_followers_have_buffers_of_no_rows(engine: Engine) -> None:
    pool: Any = engine.memory.coordinator.mem_pool_device  # type: ignore[attr-defined]
    pages = RATIO * SMALL.tokens // PAGE + 1
    rows = [pages if kind == "F" else 0 for kind in LAYER_PATTERN]
    assert [buffer.shape[0] for buffer in pool.index_k_with_scale_buffer] == rows
    assert pool.index_k_with_scale_buffer[0][0].nbytes == PAGE * INDEX_ROW_BYTES


def test_the_cell_counts_leaders(engine: Engine) -> None:
    kvc = configurator(engine)
    sizes: Any = DefaultPoolConfigurator(kvc)
    assert sizes._cell_size == len(LAYER_PATTERN) * ROW_BYTES + LEADERS * RATIO * INDEX_ROW_BYTES
    cell = sizes._compute_dsa_indexer_cell_size
    every_layer = len(LAYER_PATTERN) * RATIO * INDEX_ROW_BYTES
    assert cell(kvc=kvc, num_layers=len(LAYER_PATTERN), allocate_all_layers=True) == every_layer
    draft = copy.copy(kvc)
    draft.is_draft_worker = True
    assert cell(kvc=draft, num_layers=len(LAYER_PATTERN)) == every_layer


def test_the_memory_of_the_pools_is_what_the_cell_says(engine: Engine) -> None:
    """Besides the null page of each."""
    pool: Any = engine.memory.coordinator.mem_pool_device  # type: ignore[attr-defined]
    sizes: Any = DefaultPoolConfigurator(configurator(engine))
    index = pool.index_k_with_scale_buffer
    null_pages = PAGE * (len(LAYER_PATTERN) * ROW_BYTES + LEADERS * INDEX_ROW_BYTES)
    total = pool.rows.nbytes + sum(buffer.nbytes for buffer in index)
    assert total == SMALL.tokens * sizes._cell_size + null_pages


@pytest.mark.usefixtures("engine")
def test_a_draft_worker_and_an_external_linker_have_all_rows() -> None:
    elide = kv_cache_configurator._should_elide_dsa_index_k
    assert elide(is_draft_worker=False) and not elide(is_draft_worker=True)
    get_context().override("tests", enable_unified_cache_external_linker=True)
    assert not elide(is_draft_worker=False)


@pytest.mark.usefixtures("plugin")
def test_without_hisparse_sglangs_answers_stay() -> None:
    built = Engine(Settings(tokens=20 * PAGE), seed=0)
    try:
        elide = kv_cache_configurator._should_elide_dsa_index_k
        assert elide(is_draft_worker=False) and not elide(is_draft_worker=True)
        sizes: Any = DefaultPoolConfigurator(configurator(built))
        assert sizes._cell_size == len(LAYER_PATTERN) * ROW_BYTES + LEADERS * INDEX_ROW_BYTES
    finally:
        built.close()


def test_requests_are_served_from_such_a_pool() -> None:
    def answers(drive: Script) -> Iterator[None]:
        rids = [drive.send(4 * PAGE + 10, PAGE) for _ in range(4)]
        yield
        while any(map(drive.is_live, rids)):
            yield

    seen = Script(SMALL, answers).run()
    assert seen["decode rows read"] and seen["prefill rows read"]
