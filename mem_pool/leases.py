"""Who holds each device page: the device copy of one host page (resident), or rows of one request (hot)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hisparse_sgl.mem_pool.block_pool import BlockPool


class DeviceLeases:
    """The one pool of device pages, and the CPU master of the residency table.

    State: `pool` over the device pages; `resident_page` [num_host_pages], the readable device page of a host
    page or 0; `host_page` [num_device_pages], whose copy a device page was leased for last; `restoring`, host
    page -> device page whose content is still on its way (leased, in no reader's sight); `hot`, the device
    pages leased as hot rows. A host page on the device has `pins` >= 1, or 0 while it is unpinned: then its
    device page counts as free and stays readable until it is handed out again.
    """

    def __init__(self, num_device_pages: int, num_host_pages: int) -> None:
        if num_host_pages < 2:
            raise ValueError(
                f"num_host_pages is {num_host_pages}, the limit is >= 2: page 0 is null, add host memory"
            )
        if num_device_pages < 2:
            raise ValueError(
                f"num_device_pages is {num_device_pages}, the limit is >= 2: page 0 is null, add memory"
            )
        self.num_device_pages = num_device_pages
        self.num_host_pages = num_host_pages
        self.pool = BlockPool(num_device_pages)
        self.resident_page = [0] * num_host_pages
        self.host_page = [0] * num_device_pages
        self.restoring: dict[int, int] = {}
        self.hot: set[int] = set()
        self.unpinned = 0
        self.peak_in_use = 0
        self._deltas: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Device pages that can be leased now, unpinned ones included."""
        return self.pool.num_free

    @property
    def num_in_use(self) -> int:
        """Device pages that are pinned or hot."""
        return self.num_device_pages - 1 - self.pool.num_free

    @property
    def reused(self) -> int:
        """How often an unpinned page was handed out again, since the start."""
        return self.pool.num_reused

    @property
    def adopted(self) -> int:
        """How often an unpinned page was pinned again, since the start."""
        return self.pool.num_adopted

    def lease_resident(self, host_pages: Sequence[int], readable: bool = True) -> list[int]:
        """Leases device pages for host pages, all different, that have none; each has one pin then.

        At most `num_free` of them (asserted). With `readable=False` the table entries stay 0 until
        `make_readable`: use it for a restore. Unpinned pages may be reused for this, which clears the entries
        of other host pages.
        """
        for page in host_pages:
            assert 0 < page < self.num_host_pages, f"host page {page} of {self.num_host_pages}"
            assert not self.device_page_of(page), f"host page {page} is on the device already"
        device_pages = self.pool.get_new_blocks(len(host_pages))
        for host_page, device_page in zip(host_pages, device_pages, strict=True):
            self.host_page[device_page] = host_page
            if readable:
                self._set_entry(host_page, device_page)
            else:
                self.restoring[host_page] = device_page
        self._note_peak()
        return device_pages

    def make_readable(self, host_page: int) -> None:
        """Publishes the table entry of a restoring page: its content has arrived."""
        self._set_entry(host_page, self.restoring.pop(host_page))

    def lease_hot(self, n: int) -> list[int]:
        """Leases `n` device pages for hot rows; asserts `n <= num_free`."""
        pages = self.pool.get_new_blocks(n)
        self.hot.update(pages)
        self._note_peak()
        return pages

    def release_hot(self, pages: Sequence[int]) -> None:
        """Gives back hot pages: they are truly free."""
        assert self.hot.issuperset(pages), f"pages {sorted(set(pages) - self.hot)} are not hot"
        self.hot.difference_update(pages)
        self.pool.free_blocks(pages)

    def pin(self, host_page: int) -> bool:
        """Adds a pin to a page on the device. True if it was unpinned: one page less is free (adopted)."""
        device_page = self._leased(host_page)
        adopted = self.pool.pin_blocks([device_page]) == 1
        self._note_peak()
        return adopted

    def pin_all(self, host_pages: Sequence[int]) -> None:
        """Adds a pin to each of these pages, which are on the device."""
        self.pool.pin_blocks(self._all_leased(host_pages))
        self._note_peak()

    def unpin(self, host_page: int) -> None:
        """Drops a pin. At zero the page counts as free and stays readable; its reuse clears the table entry.

        The host page must be durable then (design rule 3). The last pin of a restoring page cannot be
        dropped.
        """
        self.unpin_all([host_page])

    def unpin_all(self, host_pages: Sequence[int]) -> None:
        """Drops a pin of each of these pages, all different; those at zero are reused in this order."""
        blocks = self._all_leased(host_pages)
        if self.restoring:
            counts = self.pool.ref_counts
            last = [p for p, d in zip(host_pages, blocks, strict=True) if counts[d] == 1]
            assert self.restoring.keys().isdisjoint(last), f"some of host pages {last} are being restored"
        self.unpinned += len(self.pool.unpin_blocks(blocks, self._forget))

    def drop(self, host_page: int) -> bool:
        """Takes a host page off the device: its device page is truly free and its table entry is 0.

        For a host page that died, a failed restore, or a copy that must not be read again. Legal with no pin
        (unpinned) or one (the caller's own); with more, another holder still relies on the page (asserted).
        False if it was not on the device.
        """
        device_page = self.device_page_of(host_page)
        if not device_page:
            return False
        pins = self.pool.ref_counts[device_page]
        assert pins <= 1, f"host page {host_page} on device page {device_page} has {pins} pins"
        if host_page in self.restoring:
            del self.restoring[host_page]
        else:
            self._set_entry(host_page, 0)
        if pins:
            self.pool.free_blocks([device_page])
        else:
            self.pool.discard_blocks([device_page])
        return True

    def device_page_of(self, host_page: int) -> int:
        """The device page leased for a host page, readable or restoring; 0 if none."""
        return self.resident_page[host_page] or self.restoring.get(host_page, 0)

    def is_resident(self, host_page: int) -> bool:
        """True if readers find the page on the device (pinned or unpinned, not while it is restoring)."""
        return self.resident_page[host_page] != 0

    def is_restoring(self, host_page: int) -> bool:
        return host_page in self.restoring

    def is_pinned(self, host_page: int) -> bool:
        return self.pins(host_page) > 0

    def missing(self, host_pages: Sequence[int]) -> list[int]:
        """Those of these host pages that have no device page."""
        resident, restoring = self.resident_page, self.restoring
        return [page for page in host_pages if not resident[page] and page not in restoring]

    def pin_cost(self, host_pages: Iterable[int]) -> int:
        """Free device pages that it takes to pin these host pages: as many as have no pin now."""
        counts, resident, restoring = self.pool.ref_counts, self.resident_page, self.restoring
        return sum([not counts[resident[page] or restoring.get(page, 0)] for page in host_pages])

    def pins(self, host_page: int) -> int:
        """Pins on a host page: 0 if it is unpinned or not on the device."""
        return self.pool.ref_counts[self.device_page_of(host_page)]

    def take_deltas(self) -> dict[int, int]:
        """Table entries set since the last call, host page -> device page or 0 (its current value)."""
        deltas, self._deltas = self._deltas, {}
        return deltas

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every device page in use or unpinned belongs to exactly one lease."""
        self.pool.check_integrity()
        owners: dict[int, str] = dict.fromkeys(self.hot, "hot")
        leased = [(h, d) for h, d in enumerate(self.resident_page) if d] + list(self.restoring.items())
        for host_page, device_page in leased:
            if device_page in owners:
                raise RuntimeError(
                    f"device page {device_page} is host page {host_page} and {owners[device_page]}"
                )
            owners[device_page] = f"host page {host_page}"
            if self.host_page[device_page] != host_page:
                named = self.host_page[device_page]
                raise RuntimeError(f"device page {device_page} is host page {host_page}, and names {named}")
        if self.resident_page[0] or 0 in self.restoring or 0 in owners:
            raise RuntimeError(f"a null page is leased: entry of host page 0 is {self.resident_page[0]}")
        held = {page for page in range(1, self.num_device_pages) if page not in self.pool.free}
        if held != owners.keys():
            raise RuntimeError(f"device pages held {sorted(held)}, leased {sorted(owners)}")
        not_held_once = [page for page in self.hot if self.pool.ref_counts[page] != 1]
        not_pinned = [page for page in self.restoring.values() if not self.pool.ref_counts[page]]
        if not_held_once or not_pinned:
            raise RuntimeError(f"hot pages without one hold {not_held_once}, restoring unpinned {not_pinned}")
        stale = {h: d for h, d in self._deltas.items() if d != self.resident_page[h]}
        if stale:
            raise RuntimeError(f"deltas {stale} differ from the table")

    def _leased(self, host_page: int) -> int:
        device_page = self.device_page_of(host_page)
        assert device_page, f"host page {host_page} is not on the device"
        return device_page

    def _set_entry(self, host_page: int, device_page: int) -> None:
        self.resident_page[host_page] = device_page
        self._deltas[host_page] = device_page

    def _all_leased(self, host_pages: Sequence[int]) -> list[int]:
        resident = self.resident_page
        return [resident[page] or self._leased(page) for page in host_pages]

    def _forget(self, device_page: int) -> None:
        host_page = self.host_page[device_page]
        assert self.resident_page[host_page] == device_page, (
            f"host page {host_page} left device page {device_page}"
        )
        self._set_entry(host_page, 0)

    def _note_peak(self) -> None:
        self.peak_in_use = max(self.peak_in_use, self.num_in_use)
