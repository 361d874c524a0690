"""DeviceLeases: unit tests, and a state machine against a dict oracle."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse_sgl.mem_pool.leases import DeviceLeases


def test_resident_lease_sets_the_table() -> None:
    leases = DeviceLeases(4, 10)
    [device_page] = leases.lease_resident([7])
    assert leases.resident_page[7] == leases.device_page_of(7) == device_page != 0
    assert leases.is_resident(7) and leases.is_pinned(7) and leases.pins(7) == 1
    assert leases.take_deltas() == {7: device_page}
    assert leases.take_deltas() == {}
    leases.check_integrity()


def test_unpinned_page_stays_readable_until_reuse() -> None:
    leases = DeviceLeases(3, 10)
    [first] = leases.lease_resident([1])
    leases.lease_resident([2])
    leases.unpin(1)
    leases.take_deltas()
    assert leases.num_free == 1 and leases.is_resident(1) and not leases.is_pinned(1)
    assert leases.lease_hot(1) == [first]
    assert not leases.is_resident(1) and leases.device_page_of(1) == 0
    assert leases.take_deltas() == {1: 0}
    assert (leases.unpinned, leases.reused, leases.adopted) == (1, 1, 0)
    leases.check_integrity()


def test_prefix_hit_adopts_an_unpinned_page() -> None:
    leases = DeviceLeases(3, 10)
    [device_page] = leases.lease_resident([1])
    assert leases.pin(1) is False and leases.pins(1) == 2
    leases.unpin(1)
    assert leases.unpinned == 0, "the other request still pins the page"
    leases.unpin(1)
    assert leases.num_free == 2
    assert leases.pin(1) is True
    assert leases.num_free == 1 and leases.device_page_of(1) == device_page
    assert (leases.unpinned, leases.adopted) == (1, 1)
    leases.check_integrity()


def test_pins_of_several_pages_at_once() -> None:
    leases = DeviceLeases(4, 10)
    for page in (1, 2):
        leases.lease_resident([page])
    leases.unpin(2)
    leases.pin_all([1, 2])
    assert (leases.pins(1), leases.pins(2), leases.adopted) == (2, 1, 1)
    leases.unpin_all([1, 2])
    assert (leases.pins(1), leases.pins(2), leases.unpinned) == (1, 0, 2)
    assert leases.num_free == 2 and leases.is_resident(2), "the page is unpinned, not gone"
    leases.pin_all([1, 2])
    leases.pin(2)
    leases.unpin_all([1, 2])
    assert leases.pins(1) == leases.pins(2) == 1
    with pytest.raises(AssertionError, match="not on the device"):
        leases.pin_all([1, 3])
    leases.check_integrity()


def test_restoring_page_is_in_no_readers_sight() -> None:
    leases = DeviceLeases(3, 10)
    [device_page] = leases.lease_resident([4], readable=False)
    assert leases.device_page_of(4) == device_page
    assert leases.resident_page[4] == 0 and not leases.is_resident(4) and leases.is_restoring(4)
    assert leases.take_deltas() == {}
    leases.pin(4)
    leases.unpin(4)
    with pytest.raises(AssertionError, match="restored"):
        leases.unpin(4)
    leases.check_integrity()
    leases.make_readable(4)
    assert leases.resident_page[4] == device_page and not leases.is_restoring(4)
    assert leases.take_deltas() == {4: device_page}
    leases.check_integrity()


def test_failed_restore_leaves_no_trace() -> None:
    leases = DeviceLeases(3, 10)
    leases.lease_resident([4], readable=False)
    assert leases.drop(4) is True
    assert leases.num_free == 2 and leases.device_page_of(4) == 0 and leases.take_deltas() == {}
    leases.check_integrity()


def test_drop() -> None:
    leases = DeviceLeases(4, 10)
    leases.lease_resident([1])
    leases.lease_resident([2])
    leases.unpin(2)
    leases.pin(1)
    with pytest.raises(AssertionError, match="2 pins"):
        leases.drop(1)
    leases.unpin(1)
    assert leases.drop(1) and leases.drop(2) and not leases.drop(2)
    assert leases.pool.num_truly_free == 3 and leases.reused == 0
    assert leases.take_deltas() == {1: 0, 2: 0}
    leases.check_integrity()


def test_hot_pages_and_peak() -> None:
    leases = DeviceLeases(6, 10)
    pages = leases.lease_hot(3)
    leases.lease_resident([1])
    leases.release_hot(pages[:2])
    assert leases.num_in_use == 2 and leases.peak_in_use == 4 and leases.num_free == 3
    with pytest.raises(AssertionError, match="not hot"):
        leases.release_hot(pages[:1])
    with pytest.raises(AssertionError, match="not hot"):
        leases.release_hot([leases.device_page_of(1)])
    leases.check_integrity()
    leases.release_hot(pages[2:])
    assert leases.num_free == 4


def test_misuse_is_asserted_and_changes_nothing() -> None:
    leases = DeviceLeases(2, 4)
    leases.lease_resident([3])
    for misuse in (
        lambda: leases.lease_resident([3]),
        lambda: leases.lease_resident([2]),
        lambda: leases.lease_resident([0]),
        lambda: leases.lease_resident([4]),
        lambda: leases.lease_hot(1),
        lambda: leases.pin(1),
        lambda: leases.unpin(1),
    ):
        with pytest.raises(AssertionError):
            misuse()
    assert leases.pins(3) == 1 and leases.num_free == 0
    leases.check_integrity()


def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match="num_device_pages"):
        DeviceLeases(1, 4)
    with pytest.raises(ValueError, match="num_host_pages"):
        DeviceLeases(4, 1)


def test_check_integrity_sees_damage() -> None:
    def leased() -> DeviceLeases:
        leases = DeviceLeases(6, 6)
        leases.lease_resident([1])
        leases.lease_resident([2])
        leases.lease_hot(1)
        return leases

    leases = leased()
    leases.resident_page[2] = leases.resident_page[1]
    with pytest.raises(RuntimeError, match="host page 2"):
        leases.check_integrity()
    leases = leased()
    leases.resident_page[1] = 0
    with pytest.raises(RuntimeError, match="leased"):
        leases.check_integrity()
    leases = leased()
    leases.hot.add(leases.resident_page[1])
    with pytest.raises(RuntimeError, match="hot"):
        leases.check_integrity()
    leases = leased()
    leases._deltas[1] = 0
    with pytest.raises(RuntimeError, match="deltas"):
        leases.check_integrity()


class LeasesMachine(RuleBasedStateMachine):
    """The oracle: pins, restoring and hot pages as plain dicts, and the GPU's table fed by deltas only."""

    NUM_DEVICE, NUM_HOST = 6, 9

    def __init__(self) -> None:
        super().__init__()
        self.leases = DeviceLeases(self.NUM_DEVICE, self.NUM_HOST)
        self.pins: dict[int, int] = {}
        self.restoring: set[int] = set()
        self.unpinned: list[int] = []
        self.hot: list[int] = []
        self.gpu_table = [0] * self.NUM_HOST
        self.reused = self.adopted = self.peak = 0

    def in_use(self) -> int:
        return len(self.pins) + len(self.hot)

    def reuse(self, n: int) -> None:
        truly_free = self.NUM_DEVICE - 1 - self.in_use() - len(self.unpinned)
        taken = max(0, n - truly_free)
        self.reused += taken
        del self.unpinned[:taken]

    def on_device(self) -> list[int]:
        return sorted([*self.pins, *self.unpinned])

    @precondition(lambda self: self.in_use() < self.NUM_DEVICE - 1)
    @rule(data=st.data(), readable=st.booleans())
    def lease_resident(self, data: st.DataObject, readable: bool) -> None:
        absent = sorted(set(range(1, self.NUM_HOST)) - set(self.on_device()))
        page = data.draw(st.sampled_from(absent))
        self.reuse(1)
        self.leases.lease_resident([page], readable)
        self.pins[page] = 1
        if not readable:
            self.restoring.add(page)

    @rule(data=st.data())
    def lease_hot(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.NUM_DEVICE - 1 - self.in_use()))
        self.reuse(n)
        pages = self.leases.lease_hot(n)
        assert len(pages) == n
        self.hot += pages

    @precondition(lambda self: self.hot)
    @rule(data=st.data())
    def release_hot(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.hot))
        self.leases.release_hot([page])
        self.hot.remove(page)

    @precondition(lambda self: self.restoring)
    @rule(data=st.data())
    def make_readable(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.restoring)))
        self.leases.make_readable(page)
        self.restoring.remove(page)

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.on_device()))
        adopted = page in self.unpinned
        assert self.leases.pin(page) == adopted
        self.pins[page] = self.pins.get(page, 0) + 1
        if adopted:
            self.unpinned.remove(page)
            self.adopted += 1

    @precondition(lambda self: any(n > 1 or p not in self.restoring for p, n in self.pins.items()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        legal = [p for p, n in sorted(self.pins.items()) if n > 1 or p not in self.restoring]
        page = data.draw(st.sampled_from(legal))
        self.leases.unpin(page)
        self.pins[page] -= 1
        if not self.pins[page]:
            del self.pins[page]
            self.unpinned.append(page)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page = data.draw(st.integers(1, self.NUM_HOST - 1))
        if self.pins.get(page, 0) > 1:
            return
        assert self.leases.drop(page) == (page in self.on_device())
        self.pins.pop(page, None)
        self.restoring.discard(page)
        if page in self.unpinned:
            self.unpinned.remove(page)

    @rule()
    def send_deltas(self) -> None:
        for page, device_page in self.leases.take_deltas().items():
            self.gpu_table[page] = device_page
        assert self.gpu_table == self.leases.resident_page

    @invariant()
    def agrees(self) -> None:
        self.leases.check_integrity()
        self.peak = max(self.peak, self.in_use())
        for page in range(1, self.NUM_HOST):
            assert self.leases.pins(page) == self.pins.get(page, 0)
            assert bool(self.leases.device_page_of(page)) == (page in self.on_device())
            assert self.leases.is_resident(page) == (page in self.on_device() and page not in self.restoring)
        assert self.leases.num_free == self.NUM_DEVICE - 1 - self.in_use()
        assert sorted(self.leases.hot) == sorted(self.hot)
        counters = (self.leases.reused, self.leases.adopted, self.leases.peak_in_use)
        assert counters == (self.reused, self.adopted, self.peak)


TestLeasesMachine = LeasesMachine.TestCase
TestLeasesMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
