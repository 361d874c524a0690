"""`arrange`: a long plan in the order of its host addresses, and `gather` by it."""

from __future__ import annotations

import pytest
import torch

from hisparse_sgl.kernels import arrange as module
from hisparse_sgl.kernels import backend
from hisparse_sgl.kernels import gather as gather_module
from hisparse_sgl.kernels.arrange import arrange
from hisparse_sgl.kernels.gather import gather, gather_reference
from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.kernels.state import BUCKETS, CopyPlan

INTERPRETER = pytest.param(
    "interpreter", marks=pytest.mark.skipif(not backend.INTERPRETED, reason="needs TRITON_INTERPRET=1")
)
TRITON = pytest.param(
    "triton",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
kernels = pytest.mark.parametrize("wanted", [INTERPRETER, TRITON])
NUM_SLOTS = 64 * 1000


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of more than 100 entries are long, batches that can have 200 are large."""
    monkeypatch.setattr(module, "LONG_PLAN", 100)
    monkeypatch.setattr(gather_module, "LONG_PLAN", 100)
    monkeypatch.setattr(module, "LARGE_BATCH", 200)


def make_plan(count: int, wanted: str, capacity: int = 3000, num_slots: int = NUM_SLOTS) -> CopyPlan:
    """Random sources, some unreadable, and different destinations; entries out of use are poisoned."""
    torch.manual_seed(count)
    plan = CopyPlan.empty(capacity, 1, "cuda" if wanted == "triton" else "cpu", ordered=True)
    plan.entries.fill_(-77)
    slots = torch.randint(0, num_slots, (count,))
    slots[::50] = -1
    plan.entries[:count, 0] = slots.int()
    plan.entries[:count, 1] = torch.randperm(count).int()
    plan.count.fill_(count)
    assert plan.order is not None
    plan.order.entries.fill_(-99)
    return plan


@kernels
@pytest.mark.parametrize("count", [101, 1024, 2999, 3000])
def test_a_long_plan_is_ordered_by_stretches_of_the_pool(count: int, wanted: str) -> None:
    plan = make_plan(count, wanted)
    before = plan.entries.clone()
    for _ in range(2):
        arranged = arrange(plan, most=3000, num_slots=NUM_SLOTS, backend=wanted)
        assert arranged.order is not None
        arranged.order.check_integrity()
        ordered = arranged.order.entries.tolist()
        assert sorted(ordered[:count]) == sorted(before[:count].tolist())
        assert ordered[count:] == [[-99, -99]] * (3000 - count)
        stretches = [max(slot, 0) // (NUM_SLOTS // BUCKETS) for slot, _ in ordered[:count]]
        assert stretches == sorted(stretches) and len(set(stretches)) > 50
        assert torch.equal(plan.entries, before)


@kernels
def test_slots_past_the_pool_and_pools_of_few_slots_stay_in_bounds(wanted: str) -> None:
    for num_slots in (1, 64, 2**31 - 2**17):
        plan = make_plan(300, wanted, num_slots=2**31 - 1)
        arranged = arrange(plan, most=300, num_slots=num_slots, backend=wanted)
        assert arranged.order is not None
        arranged.order.check_integrity()
        assert sorted(arranged.order.entries[:300].tolist()) == sorted(plan.entries[:300].tolist())


@kernels
def test_a_short_plan_and_a_small_batch_are_left_alone(wanted: str) -> None:
    plan = make_plan(100, wanted)
    arranged = arrange(plan, most=3000, num_slots=NUM_SLOTS, backend=wanted)
    assert arranged.order is not None and bool((arranged.order.entries == -99).all())
    arranged.order.check_integrity()
    assert arrange(plan, most=199, num_slots=NUM_SLOTS, backend=wanted).order is None
    assert arrange(plan, most=3000, num_slots=NUM_SLOTS, backend="reference").order is None


@kernels
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("count", [100, 101, 290])
@pytest.mark.parametrize("parts", [(656,), (1152,), (576, 8)])
def test_gather_copies_the_same_by_an_arranged_plan(
    parts: tuple[int, ...], count: int, beside: bool, wanted: str
) -> None:
    fmt = RowFormat.make(parts, 16, align=576 if len(parts) > 1 else 1)
    host = torch.randint(0, 256, (40, fmt.page_bytes), dtype=torch.uint8)
    plan = make_plan(count, wanted, capacity=320, num_slots=40 * 16)
    expected = torch.full((20, fmt.page_bytes), 0xEE, dtype=torch.uint8)
    pool = expected.to(plan.entries.device)
    on_cpu = CopyPlan(*(getattr(plan, name).cpu() for name in ("entries", "count", "starts", "counts")))
    gather_reference(host, expected, on_cpu, fmt)
    arranged = arrange(plan, most=320, num_slots=40 * 16, backend=wanted)
    if count > 100:  # a long plan is copied by its order alone
        plan.entries.fill_(-1)
    source = host.pin_memory() if wanted == "triton" else host
    gather(source, pool, arranged, fmt, beside=beside, backend=wanted)
    assert torch.equal(pool.cpu(), expected)


@kernels
def test_bad_arguments_are_named(wanted: str) -> None:
    plan = make_plan(150, wanted, capacity=300)
    with pytest.raises(ValueError, match=r"most=301 must be 1\.\.300"):
        arrange(plan, most=301, num_slots=NUM_SLOTS, backend=wanted)
    with pytest.raises(ValueError, match="num_slots=0"):
        arrange(plan, most=300, num_slots=0, backend=wanted)


def test_counters_that_a_launch_left_are_found() -> None:
    plan = CopyPlan.empty(8, 1, ordered=True)
    assert plan.order is not None
    plan.check_integrity(1)
    plan.order.bins[1, 3, 0] = 2
    with pytest.raises(RuntimeError, match="1 counters of a plan's order"):
        plan.check_integrity(1)
