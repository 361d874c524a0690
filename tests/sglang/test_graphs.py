"""Which graph a decode step takes, and what the one without swap-in answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import LAYERS, ByHand
from engine import Engine
from sglang.srt.layers.attention import graph_variants
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.runtime_context import get_context
from test_contract_coordinator import SETTINGS, Step, hot, resident

from hisparse_sgl.integrations.sglang import graphs

MODEL: Any = SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"])


@pytest.fixture
def hand() -> Iterator[ByHand]:
    engine = Engine(replace(SETTINGS, hisparse=(("resident_graphs", True),)), seed=0)
    yield ByHand(engine)
    engine.close()


@pytest.fixture
def _without_swap_in() -> Iterator[None]:
    capture_mode._set_capture_attention_variant(graphs.RESIDENT)
    yield
    capture_mode._set_capture_attention_variant(None)


def resolve(hand: ByHand, variants: Any) -> Any:
    """As SGLang asks before it replays a graph."""
    runner: Any = SimpleNamespace(
        attention_graph_variants=variants,
        model_runner=SimpleNamespace(hisparse_coordinator=hand.coordinator),
    )
    return DecodeCudaGraphRunner._resolve_attention_variant(runner, None, 4)  # type: ignore[arg-type]


def test_both_graphs_are_captured_where_the_option_says_so(hand: ByHand) -> None:
    variants = graph_variants.create_attention_graph_variants(MODEL)
    assert isinstance(variants, graphs.ResidencyVariants)
    assert variants.capture_labels == (graphs.RESIDENT, graphs.SWAP_IN)
    assert variants.select(None) == graphs.SWAP_IN  # type: ignore[arg-type]
    get_context().override("tests", hisparse_config="{}")
    assert graph_variants.create_attention_graph_variants(MODEL) is None
    get_context().override("tests", hisparse_config='{"resident_graphs": true}', enable_hisparse=False)
    assert graph_variants.create_attention_graph_variants(MODEL) is None


def test_a_hot_request_anywhere_takes_the_graph_with_swap_in(hand: ByHand) -> None:
    variants = graphs.ResidencyVariants()
    assert resolve(hand, variants) == graphs.RESIDENT
    resident(hand)
    assert resolve(hand, variants) == graphs.RESIDENT
    req = hot(hand)
    assert resolve(hand, variants) == graphs.SWAP_IN
    hand.coordinator.request_finished(req)
    assert resolve(hand, variants) == graphs.RESIDENT


def test_variants_of_sglang_are_sglangs_to_choose(hand: ByHand) -> None:
    assert resolve(hand, None) is None
    assert resolve(hand, SimpleNamespace(select=lambda batch: "dense")) == "dense"


@pytest.mark.usefixtures("_without_swap_in")
def test_rows_without_swap_in_are_those_of_the_top_k(hand: ByHand) -> None:
    reqs, step = [resident(hand), resident(hand)], Step(hand)
    for number in (2, 1):  # the second time one of them is padding
        step.fill(reqs[:number], seed=number)
        for layer in LAYERS:
            step.check(reqs[:number], step.swap_in(layer), layer)
    assert not hand.coordinator.runtime.ready and not hand.coordinator.runtime.stats.any()


@pytest.mark.usefixtures("_without_swap_in")
def test_a_row_that_is_not_there_is_masked_and_never_read(hand: ByHand) -> None:
    """What would happen if the wrong graph were taken: -1, no row of another."""
    req, step = hot(hand), Step(hand)
    step.fill([req], seed=1)
    found = step.swap_in(0)
    there = found[0] >= 0
    assert not there.all() and (found[1:] == -1).all()
    slots = hand.slots(req)[step.top_k[0][there].long()]
    assert torch.equal(hand.held(found[0][there], 0), hand.expected(slots, 0))


def test_rows_of_such_steps_are_counted() -> None:
    """In a run where everything fits, as many as the kernels count with swap-in."""
    from drive import Drive
    from scenarios import SCENARIOS

    settings, load = SCENARIOS["all fits"]
    counted = []
    for wanted in (False, True):
        drive = Drive(replace(settings, hisparse=(("resident_graphs", wanted),)), load, seed=3, steps=80)
        drive.run()
        seen = drive.forwards.seen
        assert bool(seen[f"steps: {graphs.RESIDENT}"]) == wanted and not seen[f"steps: {graphs.SWAP_IN}"]
        counted.append((seen["resident_rows"], seen["decode steps"], seen["decode rows read"]))
    assert counted[0] == counted[1] and counted[0][0] > 0, counted
