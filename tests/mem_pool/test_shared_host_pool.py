"""One host pool in several processes: what the writer recorded is read, and nothing is left behind."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
from ranks import LAYOUT, Process

from hisparse_sgl.mem_pool.shared_host_pool import NUM_EVENTS, SharedHostPool

MANY_PAGES = 2500  # 200 MiB, so that it shows in the machine's count of shared memory

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA events")


def shared_memory() -> int:
    """Bytes of shared memory in use on this machine."""
    found = re.search(r"Shmem: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) * 1024


def wait_until_freed(most: int) -> None:
    end = time.monotonic() + 10
    while shared_memory() > most:
        assert time.monotonic() < end, f"{shared_memory()} bytes of shared memory are left, {most} expected"
        time.sleep(0.05)


def test_two_pools_in_one_process() -> None:
    with SharedHostPool.create(LAYOUT, 3, False) as writer, SharedHostPool.attach(writer.handle) as reader:
        assert writer.is_writer and not reader.is_writer
        assert writer.buffer.shape == (2, 3, 64 * 656) and not reader.buffer.any()
        mark = reader.record(None)
        assert not mark.query()
        writer.buffer[1, 2] = 7
        assert writer.record(None).query() and mark.query()
        mark.synchronize()
        assert reader.buffer[1, 2].eq(7).all() and torch.equal(reader.buffer, writer.buffer)


def test_the_counters_lie_behind_the_buffer() -> None:
    with SharedHostPool.create(LAYOUT, 3, False) as writer, SharedHostPool.attach(writer.handle) as reader:
        reader.buffer.fill_(0xFF)
        for number in range(1, 3 * NUM_EVENTS):
            assert not reader.query(number)
            assert writer.record(None).number == number
            assert reader.query(number)
        assert writer.buffer.eq(0xFF).all()


def test_a_reader_waits_no_longer_than_it_is_told() -> None:
    with (
        SharedHostPool.create(LAYOUT, 2, False) as writer,
        SharedHostPool.attach(writer.handle) as reader,
        pytest.raises(TimeoutError, match=r"record 1 .* the last is 0"),
    ):
        reader.synchronize(1, timeout=0.05)


def test_nobody_attaches_to_a_closed_pool() -> None:
    writer = SharedHostPool.create(LAYOUT, 2, False)
    reader = SharedHostPool.attach(writer.handle)
    writer.close()
    writer.close()
    with pytest.raises(RuntimeError, match=f"process {os.getpid()} "):
        SharedHostPool.attach(writer.handle)
    with pytest.raises(RuntimeError, match="is gone: record 1 was waited for, the last is 0"):
        reader.synchronize(1)
    reader.close()


def test_another_file_under_the_number_is_noticed() -> None:
    writer = SharedHostPool.create(LAYOUT, 2, False)
    handle = writer.handle
    writer.close()
    other = os.memfd_create("other")
    os.dup2(other, handle.fd)
    try:
        with pytest.raises(RuntimeError, match="is closed"):
            SharedHostPool.attach(handle)
    finally:
        os.close(other)
        if other != handle.fd:
            os.close(handle.fd)


def test_a_pool_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_pages is .*fewer pages"):
        SharedHostPool.create(LAYOUT, 1 << 40, False)


def test_reader_in_another_process_and_killed() -> None:
    before = shared_memory()
    with Process() as other, SharedHostPool.create(LAYOUT, MANY_PAGES, False) as writer:
        other.call("attach", writer.handle)
        assert other.call("values", MANY_PAGES - 1) == [0]
        writer.buffer.fill_(5)
        number = writer.record(None).number
        other.call("synchronize", number, 10)
        assert other.call("values", MANY_PAGES - 1) == [5]
        other.kill()
        assert writer.buffer[0, 1].eq(5).all()
        assert shared_memory() > before + writer.num_bytes // 2
    wait_until_freed(before + writer.num_bytes // 2)


def test_writer_killed() -> None:
    before = shared_memory()
    with Process() as other:
        handle = other.call("create", MANY_PAGES, False)
        reader = SharedHostPool.attach(handle)
        number = other.call("fill", 3, 9)
        reader.synchronize(number)
        other.call("fill", MANY_PAGES - 1, 8)
        reader.buffer[:, 4:-1] = 1  # brings the memory in
        other.kill()
    with pytest.raises(RuntimeError, match=f"process {handle.pid}, is gone: record 3 .* the last is 2"):
        reader.synchronize(3)
    assert reader.query(2) and reader.buffer[:, 3].eq(9).all() and reader.buffer[:, -1].eq(8).all()
    with pytest.raises(RuntimeError, match="cannot be reached"):
        SharedHostPool.attach(handle)
    assert shared_memory() > before + reader.num_bytes // 2
    reader.close()
    wait_until_freed(before + reader.num_bytes // 2)


@needs_gpu
@pytest.mark.gpu
def test_two_processes_on_one_gpu() -> None:
    with Process() as writer, Process() as reader:
        reader.call("attach", writer.call("create", 400, True))
        for value in range(1, NUM_EVENTS + 3):
            number = writer.call("copy_to_host", value % 3 + 1, value)
            over, found = reader.call("copy_to_device", value % 3 + 1, number)
            assert found == [value]
            assert value > 1 or not over, "the writer was done before the reader waited: nothing was shown"
        reader.call("close")
        assert writer.call("values", 1) != [0]
        writer.call("close")


@needs_gpu
@pytest.mark.gpu
def test_a_killed_reader_leaves_the_gpu_writer_alone() -> None:
    before = shared_memory()
    with Process() as reader, SharedHostPool.create(LAYOUT, MANY_PAGES, True) as writer:
        reader.call("attach", writer.handle)
        reader.kill()
        on_device = torch.full_like(writer.buffer, 3, device="cuda")
        writer.buffer.copy_(on_device, non_blocking=True)
        writer.record(torch.cuda.current_stream()).synchronize()
        assert writer.buffer.eq(3).all()
    wait_until_freed(before + writer.num_bytes // 2)
