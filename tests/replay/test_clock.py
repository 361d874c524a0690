"""The clock model: what a step and a copy take."""

from __future__ import annotations

import pytest

from hisparse_sgl.replay.clock import Clock, Rates, SimulatedTransfers
from hisparse_sgl.transfer_queue import Completion, PageCopy


def test_a_step_adds_up_its_parts() -> None:
    rates = Rates(
        prefill_tokens=1000, decode_step_ms=20, decode_request_ms=0.5, swap_step_ms=1, gather_gb_s=10
    )
    assert rates.step_seconds(0, 500, None) == pytest.approx(0.5)
    assert rates.step_seconds(4, 0, None) == pytest.approx(0.022)
    assert rates.step_seconds(4, 100, 2e9) == pytest.approx(0.022 + 0.1 + 0.001 + 0.2)


def test_a_page_takes_its_bytes_and_one_copy_a_layer() -> None:
    rates = Rates(to_host_gb_s=10, to_device_gb_s=20, copy_us=5)
    assert rates.page_seconds(1_000_000_000, 100, to_host=True) == pytest.approx(0.1 + 0.0005)
    assert rates.page_seconds(1_000_000_000, 100, to_host=False) == pytest.approx(0.05 + 0.0005)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefill_tokens", 0),
        ("gather_gb_s", -1),
        ("copy_us", -1),
        ("hot_hit_rate", 1.1),
        ("copy_us", float("nan")),
        ("gather_gb_s", 1e-308),
        ("prefill_tokens", 1e-308),
        ("decode_step_ms", float("inf")),
    ],
)
def test_a_rate_that_cannot_be_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Rates(**{field: value})  # type: ignore[arg-type]


def test_copies_of_one_direction_follow_each_other_and_the_other_direction_does_not_wait() -> None:
    clock = Clock()
    queue = SimulatedTransfers(clock, 100, to_host_seconds=2.0, to_device_seconds=1.0)
    first = queue.spill([PageCopy(1, 1), PageCopy(2, 2)])
    second = queue.spill([PageCopy(3, 3), PageCopy(4, 4, moves_bytes=False)])
    back = queue.restore([PageCopy(5, 5)])
    assert queue.poll() == [] and queue.next_completion == 1.0
    assert queue.wait() == [Completion(back, True)] and clock.now == 1.0
    clock.advance_to(6.0)
    assert queue.poll() == [Completion(first, True), Completion(second, True)]
    assert (queue.to_host.bytes_moved, queue.to_device.bytes_moved) == (300, 100)
    assert queue.wait() == [] and queue.next_completion is None


def test_a_copy_after_a_pause_begins_now() -> None:
    clock = Clock()
    queue = SimulatedTransfers(clock, 100, to_host_seconds=2.0)
    clock.advance_to(10.0)
    queue.spill([PageCopy(1, 1)])
    assert queue.next_completion == 12.0
    clock.advance_to(3.0)
    assert clock.now == 10.0
