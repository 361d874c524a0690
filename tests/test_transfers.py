"""Transfers: bytes, order, completion, and what a reader of a shared host pool leaves to the writer."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from ranks import Process

from hisparse_sgl import transfers as module
from hisparse_sgl.config import HiSparseConfig
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import IndexGroup, KVLayout
from hisparse_sgl.mem_pool.marks import Events
from hisparse_sgl.mem_pool.shared_host_pool import SharedHostPool
from hisparse_sgl.metrics import Counters
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.transfer_queue import PageCopy
from hisparse_sgl.transfers import Lane, Transfers, upload_pair

PAGE_SIZE, ROW_BYTES, LAYERS, PAGES = 4, 16, 3, 12
LAYOUT = KVLayout.single(LAYERS, (ROW_BYTES,), PAGE_SIZE, (IndexGroup(0, (1,)), IndexGroup(2)), 8)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="copies on streams of a CUDA device"),
        ],
    ),
]


def pinned(device: str) -> bool:
    return device == "cuda"


def transfers_of(host: HostPool, device: str) -> Transfers:
    pool = DevicePool(LAYOUT, PAGES, PAGES, device)
    pool.buffer.random_(0, 256)
    return Transfers(host, pool, LAYOUT.host_group.row, Counters())


def land(transfers: Transfers) -> list[int]:
    """Ids of all transfers in flight, in the order in which they are reported."""
    ids = []
    while transfers.to_host.pending or transfers.to_device.pending:
        over = transfers.wait()
        assert over and all(completion.ok for completion in over)
        ids += [completion.transfer_id for completion in over]
    return ids


@pytest.fixture(params=DEVICES)
def transfers(request: pytest.FixtureRequest) -> Iterator[Transfers]:
    with HostPool(LAYOUT, PAGES, pinned(request.param)) as host:
        yield transfers_of(host, request.param)


def test_mirror(transfers: Transfers) -> None:
    slots, rows = [5, 11, 40, 4], [9, 8, 47, 30]
    land_first = transfers.mirror(slots, rows)
    assert land(transfers) == [land_first]
    host = transfers.host.buffer.view(LAYERS, -1, ROW_BYTES)
    device = transfers.device.buffer.view(LAYERS, -1, ROW_BYTES).cpu()
    assert torch.equal(host[:, slots], device[:, rows])
    rest = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
    rest[slots] = False
    assert not host[:, rest].any()
    assert transfers.counters.device_to_host_bytes == 4 * LAYERS * ROW_BYTES


@pytest.mark.parametrize(
    ("slots", "rows", "count"),
    [([5, 6], [9, 8], 1), ([6], [8], 2), ([5, 6], [9, 7], 2)],
    ids=["the step", "without a request that has ended", "a page that lies elsewhere now"],
)
def test_a_mirror_uploads_what_was_not_uploaded_with_the_step(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch, slots: list[int], rows: list[int], count: int
) -> None:
    uploads: list[tuple[object, ...]] = []
    monkeypatch.setattr(module, "upload_pair", lambda *args: uploads.append(args) or upload_pair(*args))
    assert transfers.upload_step([5, 6], [9, 8]).tolist() == [5, 6]
    transfers.mirror(slots, rows)
    land(transfers)
    host = transfers.host.buffer.view(LAYERS, -1, ROW_BYTES)
    device = transfers.device.buffer.view(LAYERS, -1, ROW_BYTES).cpu()
    assert torch.equal(host[:, slots], device[:, rows]) and len(uploads) == count
    transfers.mirror([5, 6], [9, 8])
    land(transfers)
    assert torch.equal(host[:, [5, 6]], device[:, [9, 8]]) and len(uploads) == count + 1


class FakeEvent:
    """An event of CUDA: a wait is for the last record before it."""

    made: ClassVar[list[FakeEvent]] = []

    def __init__(self) -> None:
        self.over = False
        self.made.append(self)

    def record(self, stream: FakeStream) -> None:
        self.over, self.recorded = False, (stream.name, stream.given)

    def query(self) -> bool:
        return self.over


class FakeStream:
    """A stream of CUDA: what it was given, and for what of the others it waits."""

    def __init__(self, name: object) -> None:
        self.name, self.given = name, 0
        self.waits: list[tuple[object, int]] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waits.append(event.recorded)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_a_lane_waits_once_for_each_stream_and_uses_events_again(monkeypatch: pytest.MonkeyPatch) -> None:
    current, other = FakeStream("current"), FakeStream("other")
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current)
    monkeypatch.setattr(FakeEvent, "made", [])
    lane: Any = Lane(torch.device("cuda", 0), Events())
    lane.behind = [current, other]
    for step in range(3):
        current.given, other.given = step, 10 * step
        lane.start(step, lambda: None)
    behind = [("current", 0), ("other", 0), ("current", 1), ("other", 10), ("current", 2), ("other", 20)]
    assert lane.stream.waits == behind
    marks = [mark for _, mark, _ in lane.pending]
    assert len(set(map(id, marks))) == 3 and lane.num_completed == 0
    marks[0].over = marks[1].over = True
    assert list(lane.take(lane.num_completed)) == [0, 1]
    for step in range(3, 6):
        lane.start(step, lambda: None)
    marks = [mark for _, mark, _ in lane.pending]
    assert len(set(map(id, marks))) == 4, "no event marks two copies at once"
    assert not any(mark.over for mark in marks) and lane.num_completed == 2
    assert len(FakeEvent.made) == 5, "four marks and the event that is waited for"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "values", [([], []), ([2**31 - 1], [0]), ([4, 5], [-1, 2**40]), ([1, 2, 3], [6, 5, 4])]
)
def test_an_uploaded_pair_is_aligned(values: tuple[list[int], list[int]], device: str) -> None:
    pair = upload_pair(*values, torch.device(device))
    assert tuple(part.tolist() for part in pair) == values
    assert all(part.dtype == torch.int64 and part.storage_offset() % 2 == 0 for part in pair)


def test_spill_and_restore(transfers: Transfers) -> None:
    device = transfers.device.buffer
    before = device.clone()
    copies = [PageCopy(3, 7), PageCopy(4, 8), PageCopy(5, 2, moves_bytes=False), PageCopy(6, 9)]
    transfers.spill(copies)
    land(transfers)
    host = transfers.host.buffer
    assert torch.equal(host[:, [3, 4, 6]], before[:, [7, 8, 9]].cpu()) and not host[:, [1, 2, 5, 7]].any()
    device.fill_(1)
    transfers.restore([PageCopy(4, 1), PageCopy(3, 5), PageCopy(6, 6)])
    land(transfers)
    assert torch.equal(device[:, [1, 5, 6]].cpu(), host[:, [4, 3, 6]])
    assert device[:, [0, 2, 3, 4, 7, 8, 9, 10, 11]].eq(1).all()
    page = LAYERS * PAGE_SIZE * ROW_BYTES
    assert (transfers.counters.device_to_host_bytes, transfers.counters.restored_bytes) == (
        3 * page,
        3 * page,
    )


def test_completions_come_in_order_and_agreed(transfers: Transfers) -> None:
    limit = [(0, 0)]
    transfers.agree = lambda counts: (min(counts[0], limit[0][0]), min(counts[1], limit[0][1]))
    ids = [transfers.mirror([4], [4]), transfers.restore([PageCopy(2, 2)]), transfers.spill([PageCopy(1, 1)])]
    if transfers.where.type == "cuda":
        torch.cuda.synchronize()
    assert transfers.poll() == []
    limit[0] = (1, 0)
    assert [c.transfer_id for c in transfers.poll()] == [ids[0]]
    limit[0] = (2, 1)
    assert [c.transfer_id for c in transfers.poll()] == [ids[2], ids[1]]
    assert transfers.poll() == []


def test_a_reader_copies_nothing_to_the_host_and_waits_for_the_writer() -> None:
    with SharedHostPool.create(LAYOUT, PAGES, False) as host, SharedHostPool.attach(host.handle) as same:
        writer, reader = transfers_of(host, "cpu"), transfers_of(same, "cpu")
        for transfers in (reader, writer):  # the reader is ahead
            transfers.mirror([5], [6])
            transfers.spill([PageCopy(2, 3)])
            if transfers is reader:
                assert reader.poll() == [] and not host.buffer.any()
        assert land(writer) == land(reader) == [0, 1]
        assert reader.counters.device_to_host_bytes == 0
        assert torch.equal(host.buffer[:, 2], writer.device.buffer[:, 3])
        reader.restore([PageCopy(2, 9)])
        land(reader)
        assert torch.equal(reader.device.buffer[:, 9], writer.device.buffer[:, 3])


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_serve_a_context_that_only_the_writer_stored(device: str) -> None:
    """Both run the same steps; what has left the device is read from the writer's host rows."""
    ours, theirs = multiprocessing.Pipe()
    with Process(ours) as writer, Process(theirs) as reader:
        handle = writer.call("create", 30, pinned(device), LAYOUT)
        reader.call("attach", handle)
        for rank in (writer, reader):
            rank.send("serve_context", device)
        (stored, read), (reader_stored, reader_read) = writer.receive(), reader.receive()
    assert stored > 0 and reader_stored == 0
    assert read == reader_read > 0


def test_a_host_pool_of_another_size_is_refused() -> None:
    config = HiSparseConfig(top_k=2, context_len=16, host_pages=10, device_pages=8)
    with HostPool(LAYOUT, 11, False) as host:
        with pytest.raises(ValueError, match="host_pool has 11 pages"):
            HiSparsePool(LAYOUT, config, host_pool=host)
        assert host.buffer.numel() > 0
