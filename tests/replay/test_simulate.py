"""The replay with a clock: timelines worked out by hand, and invariants after every step of random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from hisparse_sgl.integrity import check_integrity
from hisparse_sgl.replay.clock import Rates
from hisparse_sgl.replay.measures import percentiles
from hisparse_sgl.replay.sequences import Sequences
from hisparse_sgl.replay.setup import Model, Setup, Size
from hisparse_sgl.replay.simulate import Simulation
from hisparse_sgl.replay.traces import Trace

RATES = Rates(prefill_tokens=1000, prefill_chunk=1024, decode_step_ms=9, decode_request_ms=1, copy_us=0)
MODEL = Model(layers=1, row_bytes=1000, top_k=512, hot_rows=512)
MakeTrace = Callable[..., Trace]


def request(seconds: float, tokens: int, answer: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": seconds * 1000, "input_length": tokens, "output_length": answer, "hash_ids": ids}


def simulate(trace: Trace, host: int = 100, device: int = 100, **options: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {"model": MODEL, "rates": RATES, **options}
    return Simulation(
        Setup(host=Size(pages=host), device=Size(pages=device), **chosen), Sequences(trace)
    ).run()


def test_a_request_alone_then_the_same_prompt_again(records_to_trace: MakeTrace) -> None:
    # 1,000 tokens: 1 s, which yields the first of 3 tokens; two steps of 10 ms follow.
    trace = records_to_trace([request(0, 1000, 3, [1, 2]), request(5, 1000, 3, [1, 2])])
    result = simulate(trace)
    assert result["ttft_seconds"]["max"] == pytest.approx(1.0)
    assert result["ttft_seconds"]["mean"] == pytest.approx((1.0 + 0.001) / 2)  # the second computes one token
    assert result["makespan_seconds"] == pytest.approx(5.021)
    assert (result["hit_tokens"], result["query_tokens"]) == (1000, 2000)
    assert result["queueing_seconds"]["max"] == 0
    assert result["decode_time_share"] == {"resident": 1.0, "hybrid": 0.0, "hot": 0.0}
    # Each request writes two prompt pages, the second one none, and the page of its own answer.
    assert result["bytes_spilled"] == 4 * 512 * 1000 and result["bytes_restored"] == 0


def test_prompts_are_computed_in_chunks_beside_decoding(records_to_trace: MakeTrace) -> None:
    # Two chunks of 1,024 tokens, with 100 tokens of the second prompt in the third step.
    trace = records_to_trace([request(0, 2048, 2, [1, 2, 3, 4]), request(0, 100, 1, [9])])
    result = simulate(trace)
    assert result["ttft_seconds"]["max"] == pytest.approx(2.048 + 0.1 + 0.01)
    assert result["queueing_seconds"]["max"] == pytest.approx(2.048)
    assert result["makespan_seconds"] == pytest.approx(2.158)
    assert result["concurrency_peak"] == 2


def test_prompt_pages_dropped_from_the_device_are_restored(records_to_trace: MakeTrace) -> None:
    """Ten pages of device memory hold one prompt of six pages only: the first comes back from the host."""
    first, second = list(range(6)), list(range(10, 16))
    trace = records_to_trace(
        [request(0, 3072, 1, first), request(10, 3072, 1, second), request(20, 3072, 1, first)]
    )
    slow = Rates(prefill_tokens=1000, copy_us=0, to_device_gb_s=0.001)
    result = simulate(trace, device=10, rates=slow)
    restored = result["bytes_restored"] // (512 * 1000)
    assert result["hit_tokens"] == 3072 and restored > 0
    # 512 ms a page, during which nothing is computed, then one token.
    assert result["queueing_seconds"]["max"] == pytest.approx(0.512 * restored)
    assert result["stalled_seconds"] == pytest.approx(0.512 * restored)


def test_a_long_answer_spills_and_its_next_turn_finds_it(records_to_trace: MakeTrace) -> None:
    common = {"type": "text", "turn": 1, "timestamp": 0}
    first = {**common, "chat_id": 1, "parent_chat_id": -1, "input_length": 40, "output_length": 30}
    first["hash_ids"] = [1, 2, 50]
    after = {**common, "chat_id": 2, "parent_chat_id": 1, "input_length": 85, "output_length": 1}
    after |= {"timestamp": 100, "hash_ids": [1, 2, 3, 4, 5, 60]}
    model = Model(layers=1, row_bytes=1000, top_k=16, hot_rows=16)
    assert simulate(records_to_trace([first, after]), model=model)["hit_tokens"] == 64
    after["parent_chat_id"] = 77  # unknown: then only the prompt is found
    assert simulate(records_to_trace([first, after]), model=model)["hit_tokens"] == 32


def test_a_request_that_never_fits_is_refused_and_the_others_run(records_to_trace: MakeTrace) -> None:
    trace = records_to_trace([request(0, 512 * 30, 1, list(range(30))), request(0, 512, 1, [99])])
    result = simulate(trace, device=20)
    assert (result["refused_requests"], result["completed_requests"]) == (1, 1)
    with pytest.raises(ValueError, match="the longest request of the trace has 31"):
        simulate(trace, host=20)
    with pytest.raises(ValueError, match="two hot regions and a tail take 5"):
        simulate(trace, device=4)


def test_a_device_without_limit_keeps_everything_resident(make_trace: MakeTrace) -> None:
    sequences = Sequences(make_trace(150, 2, requests_per_second=20.0))
    result = Simulation(Setup(host=Size(), device=Size()), sequences).run()
    assert result["decode_time_share"]["resident"] == 1 and result["bytes_restored"] == 0
    assert result["deferred_requests"] == result["retractions"] == 0


def test_a_smaller_device_runs_fewer_at_once_and_reads_through_hot_regions(make_trace: MakeTrace) -> None:
    sequences = Sequences(make_trace(200, 2, requests_per_second=10.0))
    sizes = [Setup(host=Size(), device=Size(pages=pages)) for pages in (150, 600, 5000)]
    small, middle, large = (Simulation(setup, sequences).run() for setup in sizes)
    assert small["concurrency_peak"] < middle["concurrency_peak"] < large["concurrency_peak"]
    assert small["ttft_seconds"]["p50"] > middle["ttft_seconds"]["p50"] > large["ttft_seconds"]["p50"]
    assert small["decode_time_share"]["hot"] > 0 and small["bytes_swapped_in"] > 0
    assert large["bytes_swapped_in"] == 0


def random_case(make_trace: MakeTrace, seed: int) -> Simulation:
    rng = random.Random(seed)
    dialect = rng.choice(["mooncake", "qwen", "kvcache-simulator"])
    block = {"mooncake": 512, "qwen": 16, "kvcache-simulator": 64}[dialect]
    trace = make_trace(
        40,
        seed,
        dialect,
        requests_per_second=rng.choice([1.0, 20.0, 200.0]),
        mean_new_tokens=block * 4.0,
        mean_answer_tokens=block * rng.choice([0.5, 3.0, 12.0]),
    )
    sequences = Sequences(trace)
    model = Model(top_k=2 * block, hot_rows=block * rng.choice([2, 3, 4]))
    rates = Rates(
        prefill_chunk=block * rng.choice([1, 4, 20]),
        to_host_gb_s=rng.choice([0.1, 1, 54]),
        to_device_gb_s=rng.choice([0.1, 1, 54]),
    )
    setup = Setup(
        model=model,
        rates=rates,
        host=Size(pages=sequences.most_pages + rng.choice([0, 3, 40])),
        device=Size(pages=2 * model.hot_rows // block + rng.choice([10, 40, 80])),
        policy=rng.choice(["lru", "lfu"]),
        max_requests=rng.choice([2, 8, 40]),
    )
    return Simulation(setup, sequences)


@pytest.mark.parametrize("seed", range(12))
def test_invariants_hold_after_every_step_and_every_token_is_produced(
    make_trace: MakeTrace, seed: int
) -> None:
    simulation = random_case(make_trace, seed)
    before = 0.0
    while simulation.step():
        check_integrity(simulation.coordinator)
        simulation.occupancy.check_integrity()
        assert simulation.clock.now >= before
        before = simulation.clock.now
    result = simulation.run()
    requests = simulation.sequences.trace.requests
    assert result["completed_requests"] + result["refused_requests"] == len(requests)
    fitting = []
    for index in range(len(requests)):
        ids = simulation.sequences.of(index)
        if simulation._fits(len(ids.prompt) + len(ids.answer)):
            fitting.append(max(1, requests[index].output_tokens))
    assert simulation.measures.output_tokens == sum(fitting)
    assert len(simulation.measures.ttft) == len(simulation.measures.queueing) == len(fitting)
    assert sum(result["decode_time_share"].values()) == pytest.approx(1, abs=1e-5)
    assert not simulation.coordinator.requests and simulation.occupancy.missing_rows == 0


def test_the_random_cases_reach_retractions_and_every_reason_to_defer(make_trace: MakeTrace) -> None:
    results = [random_case(make_trace, seed).run() for seed in range(12)]
    assert sum(result["retractions"] for result in results) > 0
    reasons = {reason for result in results for reason in result["deferred_for"]}
    assert reasons == {"device pages", "host pages", "request rows"}
    assert all(sum(result["decode_time_share"][mode] for result in results) for mode in ("hybrid", "hot"))


def test_equal_runs_give_equal_figures(make_trace: MakeTrace) -> None:
    assert random_case(make_trace, 3).run() == random_case(make_trace, 3).run()


def test_percentiles_are_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentiles(values) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert percentiles([3.0]) == {"mean": 3, "p50": 3, "p90": 3, "p99": 3, "max": 3}
    assert percentiles([])["max"] == 0
