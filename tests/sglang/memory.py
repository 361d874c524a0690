"""How attention finds its rows, and what must hold of the memory: SGLang as it is, and with our plugin."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from forwards import NOBODY, Decode, Forwards, WrongRow
from sglang.srt.model_executor.runner_utils import capture_mode
from texts import rows


class StockMemory:
    """Every row is on the device; the number of its row is its slot."""

    structure = True  # whether invariants are asked for

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.num_tokens = scheduler.token_to_kv_pool_allocator.size

    def prefill_rows(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    def decode_rows(self, step: Decode, layer: int) -> torch.Tensor:
        found = torch.full(step.positions.shape, -1, dtype=torch.int32)
        for i, slots in enumerate(step.slots):
            found[i] = torch.where(step.positions[i] < 0, -1, slots[step.positions[i].long()])
        return found

    def choose_graph(self) -> str | None:
        return None

    def check(self, forwards: Forwards) -> None: ...

    def settle(self) -> None:
        """Let all copies end."""

    def check_end(self, forwards: Forwards) -> None: ...


class HybridMemory(StockMemory):
    """Our coordinator's rows. Structure is checked after each step, bytes of durable pages now and then."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.coordinator = scheduler.hisparse_coordinator
        self.lifecycle = self.coordinator.lifecycle
        self.num_tokens = scheduler.token_to_kv_pool_allocator.size_full

    def prefill_rows(self, slots: torch.Tensor) -> torch.Tensor:
        return self.coordinator.mem_pool_device.translate_loc_to_hisparse_device(slots)

    def choose_graph(self) -> str | None:
        return self.coordinator.graph_variant() if self.coordinator.options.resident_graphs else None

    def decode_rows(self, step: Decode, layer: int) -> torch.Tensor:
        capture_mode._set_capture_attention_variant(step.graph)
        try:
            return self.coordinator.swap_in_selected_pages(
                step.request_rows, step.seq_lens, step.positions, layer
            )
        finally:
            capture_mode._set_capture_attention_variant(None)

    def check(self, forwards: Forwards) -> None:
        if self.structure:
            self.coordinator.check_integrity()
        durable = self.lifecycle.pages.is_durable
        loose = [page for page in tree_pages(self.scheduler.tree_cache).tolist() if not durable(page)]
        if loose:
            raise AssertionError(f"pages {loose} are in the tree and not durable")
        if forwards.rng.random() < 0.1:
            self.check_host(forwards)

    def check_host(self, forwards: Forwards) -> None:
        """The host's rows of every durable page are those that were written for its slots."""
        size = self.lifecycle.page_size
        durable = [
            p for p in range(1, self.lifecycle.config.host_pages) if self.lifecycle.pages.is_durable(p)
        ]
        if not durable:
            return
        owners = forwards.owner.reshape(-1, size)[durable].ravel()
        if (owners == NOBODY).any():
            raise WrongRow(f"pages {durable} are durable, and some of their rows were never written")
        host = self.coordinator.host_pool.buffer
        for layer in range(host.shape[0]):
            data = host[layer].view(self.lifecycle.config.host_pages, -1)[durable].view(torch.int64).numpy()
            data = data.reshape(len(owners), -1)
            expected = rows(owners, layer, data.shape[1])
            if not np.array_equal(data, expected):
                at = int((data != expected).any(-1).nonzero()[0][0])
                page = durable[at // size]
                raise WrongRow(f"host row {at % size} of durable page {page} differs in layer {layer}")
        forwards.seen["host rows read"] += len(owners)

    def settle(self) -> None:
        self.coordinator.transfers.failure_rate = 0.0
        for _ in range(1000):
            if not (self.lifecycle.pages.flights or self.lifecycle.pages.to_spill):
                break
            self.lifecycle.wait()
            self.coordinator.collect()

    def check_end(self, forwards: Forwards) -> None:
        """Nothing is held but by the tree; after a flush everything is free."""
        life, tree = self.lifecycle, self.scheduler.tree_cache
        self.coordinator.metrics()
        forwards.seen.update(asdict(self.coordinator.counters))
        mismatches = self.coordinator.counters.audit_mismatches
        assert not mismatches, f"the audit counts {mismatches} rows that differ from the host's"
        self.check(forwards)
        self.check_host(forwards)
        held = {
            "requests": life.requests, "rows": life.rows, "flights": life.pages.flights,
            "publications": tree.detached, "open": tree.open, "promised": life.residency.promised,
            "promised host pages": life.residency.promised_host, "launching": self.coordinator.launching,
        }  # fmt: skip
        left = {name: value for name, value in held.items() if value}
        assert not left, f"left over: {left}"
        leases, regions = life.leases, life.sizes.hot_regions
        assert sorted(life.residency.free_regions) == list(range(regions)), life.residency.free_regions
        free = life.config.device_pages - 1
        assert leases.num_free == free, f"{leases.num_free} device pages are free of {free}"
        owned = life.config.host_pages - 1 - life.allocator.num_free
        cached = len(tree_pages(tree))
        assert owned == cached, f"{owned} host pages are in use, {cached} in the tree"
        assert self.scheduler.flush_cache()
        assert life.allocator.num_free == life.config.host_pages - 1
        assert leases.pool.num_truly_free == free, f"{leases.pool.num_truly_free} pages truly free of {free}"
        if self.structure:
            self.coordinator.check_integrity()


def tree_pages(tree: Any) -> torch.Tensor:
    """int64 [pages]: what the tree holds, as page numbers."""
    return tree.all_values_flatten()[:: tree.page_size] // tree.page_size
