"""`gather` and `scatter`: bytes against a plain byte-by-byte oracle, on every implementation."""

from __future__ import annotations

import weakref

import pytest
import torch

from hisparse_sgl.kernels import backend
from hisparse_sgl.kernels.gather import gather
from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.kernels.scatter import scatter
from hisparse_sgl.kernels.state import CopyPlan

INTERPRETER = pytest.param(
    "interpreter", marks=pytest.mark.skipif(not backend.INTERPRETED, reason="needs TRITON_INTERPRET=1")
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TRITON = pytest.param("triton", marks=[pytest.mark.gpu, needs_cuda])
implementations = pytest.mark.parametrize("wanted", ["reference", INTERPRETER, TRITON])
FORMATS = [
    RowFormat.make((656,), 64),
    RowFormat.make((1152,), 16),
    RowFormat.make((16,), 1),
    RowFormat.make((576, 8), 64, align=576),
    RowFormat.make((48, 24), 4, align=256),
]
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: "+".join(map(str, fmt.parts)))


def device_of(wanted: str) -> str:
    return "cuda" if wanted == "triton" else "cpu"


def random_pool(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def row_bytes(layer: torch.Tensor, fmt: RowFormat, row: int) -> list[slice]:
    """The byte ranges of a row in a flat layer."""
    return [
        slice(fmt.offset(row, part), fmt.offset(row, part) + width) for part, width in enumerate(fmt.parts)
    ]


def make_plan(entries: list[tuple[int, int]], device: str, capacity: int = 40) -> CopyPlan:
    plan = CopyPlan.empty(capacity, 1, device)
    plan.entries.fill_(1)
    plan.entries[: len(entries)] = torch.tensor(entries, dtype=torch.int32).reshape(-1, 2)
    plan.count.fill_(len(entries))
    return plan


def gathered(
    host: torch.Tensor, device: torch.Tensor, entries: list[tuple[int, int]], fmt: RowFormat
) -> torch.Tensor:
    """What `gather` must leave in ``device``."""
    result = device.clone()
    source, target = host.flatten(), result.view(-1)
    for slot, row in entries:
        if not 0 <= row < device.shape[0] * fmt.page_size:
            continue
        inside = 0 <= slot < host.shape[0] * fmt.page_size
        for part, where in enumerate(row_bytes(device, fmt, row)):
            target[where] = source[row_bytes(host, fmt, slot)[part]] if inside else 0
    return result


@implementations
@pytest.mark.parametrize("beside", [False, True])
@formats
def test_gather_copies_exactly_the_planned_rows(fmt: RowFormat, beside: bool, wanted: str) -> None:
    torch.manual_seed(0)
    device = device_of(wanted)
    host, pool = random_pool(7, fmt.page_bytes), random_pool(5, fmt.page_bytes)
    slots, rows = 7 * fmt.page_size, 5 * fmt.page_size
    targets = torch.randperm(rows)[: min(rows, 30)].tolist()
    entries = [(int(torch.randint(0, slots, ())), row) for row in targets]
    entries[0] = (-1, entries[0][1])
    entries[1] = (slots, entries[1][1])
    entries += [(1, -1), (1, rows), (1, 2**31 - 1)]
    expected = gathered(host, pool, entries, fmt)
    source = host.pin_memory() if device == "cuda" else host
    target = pool.to(device)
    gather(source, target, make_plan(entries, device), fmt, beside=beside, backend=wanted)
    assert torch.equal(target.cpu(), expected)


@implementations
def test_gather_of_an_empty_plan_writes_nothing(wanted: str) -> None:
    fmt, device = FORMATS[0], device_of(wanted)
    host, pool = random_pool(2, fmt.page_bytes), random_pool(2, fmt.page_bytes)
    target = pool.to(device)
    gather(host.to(device), target, make_plan([], device), fmt, backend=wanted)
    assert torch.equal(target.cpu(), pool)
    gather(host.to(device), target, make_plan([], device, capacity=0), fmt, backend=wanted)
    assert torch.equal(target.cpu(), pool)


@implementations
def test_followers_replay_the_plan_on_layer_views(wanted: str) -> None:
    """Layers of a stack, pages strided: every second page of a wider pool."""
    fmt, device = FORMATS[3], device_of(wanted)
    host = random_pool(2, 8, fmt.page_bytes)
    pool = torch.zeros(2, 3, fmt.page_bytes, dtype=torch.uint8, device=device)
    entries = [(5, 70), (64, 3), (250, 130)]
    plan = make_plan(entries, device)
    for layer in range(2):
        gather(host.to(device)[layer, ::2], pool[layer], plan, fmt, beside=layer > 0, backend=wanted)
        blank = torch.zeros(3, fmt.page_bytes, dtype=torch.uint8)
        assert torch.equal(pool[layer].cpu(), gathered(host[layer, ::2].contiguous(), blank, entries, fmt))


@implementations
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@formats
def test_scatter_copies_rows_in_all_layers(fmt: RowFormat, dtype: torch.dtype, wanted: str) -> None:
    torch.manual_seed(1)
    device = device_of(wanted)
    pool, host = random_pool(3, 5, fmt.page_bytes), random_pool(3, 7, fmt.page_bytes)
    num_rows, num_slots = 5 * fmt.page_size, 7 * fmt.page_size
    slots = (torch.randperm(num_slots - fmt.page_size) + fmt.page_size)[:20].tolist()
    rows = torch.randint(0, num_rows, (len(slots),)).tolist()
    skipped = [(-1, slots[0]), (num_rows, slots[0]), (0, -1), (0, 0), (0, fmt.page_size - 1), (0, num_slots)]
    expected = host.clone()
    for layer in range(3):
        source, target = pool[layer].flatten(), expected[layer].view(-1)
        for row, slot in zip(rows, slots, strict=True):
            for part, where in enumerate(row_bytes(host, fmt, slot)):
                target[where] = source[row_bytes(pool, fmt, row)[part]]
    pairs = torch.tensor([*zip(rows, slots, strict=True), *skipped], dtype=dtype).to(device)
    result = host.pin_memory() if device == "cuda" else host
    scatter(pool.to(device), result, pairs[:, 0], pairs[:, 1], fmt, backend=wanted)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(result, expected)


@implementations
def test_scatter_of_nothing(wanted: str) -> None:
    fmt, device = FORMATS[0], device_of(wanted)
    pool, host = (random_pool(2, 3, fmt.page_bytes).to(device) for _ in range(2))
    before, none = host.clone(), torch.zeros(0, dtype=torch.int32, device=device)
    scatter(pool, host, none, none, fmt, backend=wanted)
    assert torch.equal(host, before)


def copy_far(pages: int, fmt: RowFormat, device: str, wanted: str) -> None:
    """Gather the last row of a large pool and scatter it to the row before. Few pages are ever touched."""
    pool = torch.empty((1, pages, fmt.page_bytes), dtype=torch.uint8, device=device)
    near = torch.zeros((1, 2, fmt.page_bytes), dtype=torch.uint8, device=device)
    last = pages * fmt.page_size - 1
    content = torch.arange(fmt.parts[0], device=device).to(torch.uint8)
    pool[0, -1, (fmt.page_size - 1) * fmt.parts[0] : fmt.page_size * fmt.parts[0]] = content
    gather(pool[0], near[0], make_plan([(last, 3)], device), fmt, backend=wanted)
    assert torch.equal(near[0].flatten()[fmt.offset(3) : fmt.offset(3) + fmt.parts[0]], content)
    pairs = torch.tensor([[3, last - 1]], dtype=torch.int32, device=device)
    scatter(near, pool, pairs[:, 0], pairs[:, 1], fmt, backend=wanted)
    start = (fmt.page_size - 2) * fmt.parts[0]
    assert torch.equal(pool[0, -1, start : start + fmt.parts[0]], content)


@pytest.mark.parametrize("wanted", ["reference", INTERPRETER])
def test_offsets_over_two_gib(wanted: str) -> None:
    fmt = RowFormat.make((656,), 64)
    try:
        copy_far(2**31 // fmt.page_bytes + 3, fmt, "cpu", wanted)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        pytest.skip("this machine cannot reserve 2 GiB of address space")


@pytest.mark.gpu
@needs_cuda
def test_word_offsets_over_two_to_the_31_on_a_gpu() -> None:
    fmt = RowFormat.make((656,), 64)
    copy_far(2**31 * 8 // fmt.page_bytes + 3, fmt, "cuda", "triton")


@pytest.mark.gpu
@needs_cuda
def test_pinned_host_is_required_on_a_gpu() -> None:
    fmt = FORMATS[0]
    host, pool = random_pool(2, fmt.page_bytes), random_pool(2, fmt.page_bytes).cuda()
    with pytest.raises(ValueError, match=r"host\.device=cpu"):
        gather(host, pool, make_plan([(1, 1)], "cuda"), fmt)


def test_bad_arguments_are_named() -> None:
    fmt = FORMATS[0]
    host, pool = random_pool(2, fmt.page_bytes), random_pool(2, fmt.page_bytes)
    plan, rows = make_plan([], "cpu"), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"host\.dtype"):
        gather(host.to(torch.int8), pool, plan, fmt)
    with pytest.raises(ValueError, match=r"device\.shape"):
        gather(host, pool[:, :-8], plan, fmt)
    with pytest.raises(ValueError, match="host has strides"):
        gather(random_pool(fmt.page_bytes, 2).T, pool, plan, fmt)
    with pytest.raises(ValueError, match=r"slots\.shape"):
        scatter(pool[None], host[None], rows, rows[:1], fmt)
    with pytest.raises(ValueError, match=r"host\.shape"):
        scatter(pool[None], host.expand(2, -1, -1), rows, rows, fmt)


def test_pools_are_checked_when_they_change() -> None:
    fmt, other = FORMATS[0], FORMATS[1]
    pool, host = random_pool(2, 3, fmt.page_bytes), random_pool(2, 3, fmt.page_bytes)
    rows = torch.tensor([1], dtype=torch.int32)
    slots = rows + fmt.page_size
    for _ in range(2):
        scatter(pool, host, rows, slots, fmt)
        for bad in ((pool[:1], host, fmt), (pool, host[:1], fmt), (pool, host, other)):
            with pytest.raises(ValueError, match=r"(host|device)\.shape"):
                scatter(bad[0], bad[1], rows, slots, bad[2])
        with pytest.raises(ValueError, match=r"rows\.dtype"):
            scatter(pool, host, rows.short(), slots, fmt)
        with pytest.raises(ValueError, match="backend='cuda'"):
            scatter(pool, host, rows, slots, fmt, backend="cuda")


def test_no_pool_is_kept_alive() -> None:
    fmt = FORMATS[0]
    pool, host = random_pool(2, 3, fmt.page_bytes), random_pool(2, 3, fmt.page_bytes)
    rows = torch.tensor([1], dtype=torch.int32)
    scatter(pool, host, rows, rows + fmt.page_size, fmt)
    gone = [weakref.ref(pool), weakref.ref(host)]
    del pool, host
    assert [ref() for ref in gone] == [None, None]
