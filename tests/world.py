"""A pool, what its owner knows of it, and every check of the one against the other.

Rows go by number. A token has one for each time it is written; a row of several tokens has that of its last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from late_transfers import LateTransfers
from oracle import Oracle, Prefix, Record, WrongBytes
from random_pools import (
    CONTEXT_LEN,
    GROUPS,
    NUM_LAYERS,
    PAGE_SIZE,
    PLAIN,
    make_layout,
    random_config,
)

from hisparse_sgl.kernels.rows import row_view
from hisparse_sgl.pool import HiSparsePool
from hisparse_sgl.requests import Request
from hisparse_sgl.transfers import Transfers


class World:
    """A pool with late copies, and the oracle.

    With ``structure`` False the pool's own invariants are not asked: bytes and answers alone must then show a
    fault. ``eager`` overrides the drawn ``eager_host_mirror``. With ``tokens_per_row`` over 1 the pool has a
    compressed group, a plain one beside it on the device, and prefixes that need a state to resume.
    """

    def __init__(
        self,
        seed: int,
        structure: bool = True,
        device: str = "cpu",
        transfer_class: type[Transfers] = LateTransfers,
        eager: bool | None = None,
        tokens_per_row: int = 1,
    ) -> None:
        rng = Random(seed)
        self.share = tokens_per_row
        self.config = random_config(rng, PAGE_SIZE // tokens_per_row)
        if device != "cpu":
            self.config = replace(self.config, kernels="auto")
        if eager is not None:
            self.config = replace(self.config, eager_host_mirror=eager)
        self.structure = structure
        self.pool = HiSparsePool(make_layout(tokens_per_row), self.config, device, transfer_class)
        self.sizes = self.pool.sizes
        self.transfers: Any = self.pool.transfers
        self.coordinator = self.pool.coordinator
        columns = self.pool.layout.host_group.row.row_bytes // 8
        self.oracle = Oracle(NUM_LAYERS, self.config.host_pages * PAGE_SIZE, PAGE_SIZE, columns)
        self.families = [[rng.randrange(3) for _ in range(CONTEXT_LEN)] for _ in range(2)]
        self.longest_chunk = min(9, PAGE_SIZE * (self.config.device_pages - 3 - self.sizes.hot_pages))
        self.running: dict[str, Record] = {}
        self.retracted: list[Record] = []
        self.num_rids = 0
        self.seen: Counter[str] = Counter()

    @property
    def device(self) -> np.ndarray:
        """int64 [layers, device rows, row bytes / 8], as the current stream sees the device pool."""
        return self._rows_in(self.pool.device_pool.buffer)

    @property
    def host(self) -> np.ndarray:
        """int64 [layers, host rows, row bytes / 8]."""
        return self._rows_in(self.pool.host_pool.buffer)

    def check(self) -> None:
        """The invariants, the audit, every settled row of every request, and every page of the tree."""
        if self.structure:
            self.pool.check_integrity()
        mismatches = self.pool.audit()
        if mismatches:
            raise WrongBytes(f"audit finds {mismatches} rows that differ from the host's")
        host, device, size = self.host, self.device, self.sizes.page_rows
        for node in list(self.coordinator.tree.nodes.values()):
            page, numbers = node.page, self.oracle.page_writes(node.page)
            prefix = self.oracle.shareable.get(numbers)
            assert prefix, f"page {page} of rows {numbers} is shared and must not be"
            rows = host[:, page * size : (page + 1) * size]
            self.oracle.compare(f"host page {page} in the tree", rows, self._of_rows(numbers))
            kept = self.oracle.kept.get(numbers)
            assert node.state == prefix if node.state or kept else True, f"state of page {page}: {node.state}"
        for record in self.running.values():
            self._check_record(record, host, device)

    def close(self) -> None:
        self.pool.close()

    def _check_record(self, record: Record, host: np.ndarray, device: np.ndarray) -> None:
        request = self._request(record.rid)
        assert request.num_tokens == record.num_tokens, (request.num_tokens, record)
        if not record.writes:
            return
        self._check_plain(record, request)
        numbers, slots = self._of_rows(record.writes), self._row_slots(request, len(record.writes))
        pages = slots // self.sizes.page_rows
        resident = np.array(self.coordinator.leases.resident_page)[pages]
        on_device = resident > 0
        rows = resident[on_device] * self.sizes.page_rows + slots[on_device] % self.sizes.page_rows
        self.oracle.compare(f"{record.rid} on the device", device[:, rows], numbers[on_device])
        on_host = np.array([self.coordinator.pages.is_durable(page) for page in pages.tolist()], dtype=bool)
        self.oracle.compare(f"{record.rid} on the host", host[:, slots[on_host]], numbers[on_host])
        assert (on_device | on_host).all(), f"{record.rid} has lost rows"
        for group in GROUPS:
            keys = self.pool.index_rows(group.leader).view(torch.int64).cpu().numpy()[slots, 0]
            assert np.array_equal(keys, numbers), f"indexer rows of {record.rid}: {keys}, not {numbers}"

    def _check_plain(self, record: Record, request: Request) -> None:
        """The group beside the compressed one: a row for each token, on the device while its slot lives."""
        for group in self.pool.layout.device_groups:
            slots = self._slots(request)[: len(record.writes)]
            for layer in range(group.num_layers):
                rows = self.pool.group_rows(PLAIN, layer).view(torch.int64).cpu().numpy()[slots, :2]
                expected = np.stack([record.writes, np.full(len(slots), layer)], axis=-1)
                if not np.array_equal(rows, expected):
                    raise WrongBytes(f"plain rows of {record.rid} in layer {layer}: {rows}, not {expected}")

    def _check_rows(
        self, batch: list[Record], query_rows: int, positions: torch.Tensor, rows: torch.Tensor, layer: int
    ) -> None:
        wanted, given, device = positions.cpu().numpy(), rows.cpu().numpy(), self.device
        assert ((given < 0) == (wanted < 0)).all(), f"positions {wanted.tolist()} got rows {given.tolist()}"
        for index, record in enumerate(batch):
            part = slice(index * query_rows, (index + 1) * query_rows)
            asked = wanted[part][wanted[part] >= 0]
            found = device[layer, given[part][wanted[part] >= 0]]
            self.oracle.compare_layer(
                f"{record.rid} reads {asked}", found, self._of_rows(record.writes)[asked], layer
            )

    def _check_prefill(self, record: Record) -> None:
        """What a prefill kernel reads through ``translate``."""
        request = self._request(record.rid)
        slots = self._row_slots(request, request.num_tokens)
        rows = self.pool.translate(self._on_device(slots).int()).cpu().numpy()
        assert request.hot_pages or (rows >= 0).all(), f"{record.rid} is resident and misses rows {rows}"
        numbers = self._of_rows(record.writes)
        self.oracle.compare(f"prefill of {record.rid}", self.device[:, rows[rows >= 0]], numbers[rows >= 0])

    def _check_shared(self, page: int, prefix: Prefix) -> None:
        numbers = self.oracle.page_writes(page)
        found = self.oracle.shareable.get(numbers)
        assert found == prefix, f"page {page} of rows {numbers} stands for {found}, not for {prefix}"

    def _published(self) -> set[tuple[int, ...]]:
        return {self.oracle.page_writes(node.page) for node in self.coordinator.tree.nodes.values()}

    def _with_states(self) -> set[tuple[int, ...]]:
        nodes = self.coordinator.tree.nodes.values()
        return {self.oracle.page_writes(node.page) for node in nodes if node.state is not None}

    def _request(self, rid: str) -> Request:
        return self.coordinator.requests[rid]

    def _pages(self, rid: str) -> list[int]:
        return self.pool.page_table([rid])[0].tolist() if self._request(rid).pages else []

    def _slots(self, request: Request) -> np.ndarray:
        """Token slots int64 of a request."""
        pages = np.array(request.pages, dtype=np.int64)
        return (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()[: request.num_tokens]

    def _row_slots(self, request: Request, num_tokens: int) -> np.ndarray:
        """Row slots int64 of the rows that the first tokens of a request complete."""
        return self._slots(request)[self.share - 1 : num_tokens : self.share] // self.share

    def _of_rows(self, numbers: Any) -> np.ndarray:
        """Of the numbers of tokens from a row's first one on, those of the rows that they complete."""
        return np.array(numbers[self.share - 1 :: self.share], dtype=np.int64)

    def _on_device(self, data: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(data).to(self.pool.device)

    def _rows_in(self, buffer: torch.Tensor) -> np.ndarray:
        row = self.pool.layout.host_group.row
        parts = [row_view(buffer, row, part).flatten(1, 2) for part in range(len(row.parts))]
        return torch.cat(parts, -1).view(torch.int64).cpu().numpy()
