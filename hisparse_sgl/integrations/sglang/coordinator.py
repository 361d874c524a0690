"""Stands in for SGLang's HiSparseCoordinator: what its scheduler and its attention layers call.

Called by the scheduler, in the order of a step: ``collect`` (before it plans), ``admission`` (by
``adder.py``), ``allocate_spec_scratch`` and ``extend`` (a prefill's slots) or ``can_decode`` and
``prepare_decode`` (a decode step's), then ``before_forward`` and ``after_forward`` around the forward, on its
stream; at the end of a request ``request_finished`` or ``retract_req``, always before its row is released.
Called by attention, inside a CUDA graph: ``swap_in_selected_pages``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers import hisparse_coordinator as stock
from sglang.srt.runtime_context import get_memory

from hisparse_sgl.config import MAX_CONTEXT, HiSparseConfig, Sizes, hot_requests_within
from hisparse_sgl.integrations.sglang import graphs, prometheus, targets, topk
from hisparse_sgl.integrations.sglang.admission import Admission
from hisparse_sgl.integrations.sglang.audit import Audit
from hisparse_sgl.integrations.sglang.kv_pool import BorrowedDevicePool, KVPool
from hisparse_sgl.integrations.sglang.lifecycle import Lifecycle, ServedRequest
from hisparse_sgl.integrations.sglang.options import Options
from hisparse_sgl.integrations.sglang.real_requests import RealRequests
from hisparse_sgl.integrations.sglang.stats import LaggedCounters
from hisparse_sgl.kernels.sizes import hot_state_bytes
from hisparse_sgl.mem_pool.extents import extent_pages
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import KVLayout
from hisparse_sgl.metrics import Counters, Metric, snapshot
from hisparse_sgl.runtime import Runtime
from hisparse_sgl.transfers import Transfers, upload

logger = logging.getLogger(__name__)

POLL_INTERVAL = 8
"""Steps after which several ranks agree on completed copies although nothing waits for one."""

NUM_PLANS = 2
"""Copy plans in turn: a group's followers are through before the next group but one begins."""


class Coordinator:
    """The pools, the tables and the requests of one scheduler.

    The arguments are those of SGLang's class, whose place it takes. ``swap_in_block_size`` is a parameter of
    SGLang's own kernel and has no meaning here.
    """

    transfer_class: type[Transfers] = Transfers
    hisparse_sgl = True

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        top_k: int,
        device_buffer_size: int,
        device: str,
        tp_group: Any,
        host_to_device_ratio: int = 2,
        swap_in_block_size: int = 960,
        shared_index_layers: list[bool] | None = None,
        num_draft_tokens: int = 0,
    ) -> None:
        targets.check_applied()
        self.options = Options.parse(get_memory().hisparse_config)
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.tp_group = tp_group
        self.tp_world_size = torch.distributed.get_world_size(group=tp_group)
        pool: KVPool = token_to_kv_pool_allocator.get_kvcache()
        self.mem_pool_device = pool
        if shared_index_layers is not None and len(shared_index_layers) != pool.layer_num:
            shared_index_layers = None  # as SGLang does: layers counted otherwise than the model's
        layout = pool.layout(shared_index_layers)
        self.config = self._config(top_k, device_buffer_size, layout)
        self.counters = Counters()
        self._open_pools(layout)
        groups = layout.host_group.index_groups
        self.group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self.leaders = set(layout.host_group.index_layers)
        self.answers: dict[int, torch.Tensor] = {}
        self.num_real_reqs = RealRequests(pool.rows.device)
        self.audit = Audit(self.options.audit_every, self.lifecycle, self.runtime)
        self.kernel_stats = LaggedCounters(self.runtime.stats)
        self.num_steps = 0
        self.forward_stream: Any = None  # where forwards run, if not on the current one
        self.scratch_rows: list[int] = []
        self.decode_slots: list[int] = []
        self.launching: list[tuple[ServedRequest, int]] = []
        self.is_resident = False  # the step that is launched replays a graph without swap-in
        self.resident_rows = 0  # that such steps selected, which no kernel counts

    def _open_pools(self, layout: KVLayout) -> None:
        """Host memory first, then what works on it and on SGLang's device pool."""
        pool, config = self.mem_pool_device, self.config
        sizes = Sizes.of(config, pool.page_size)
        self.device_pool = BorrowedDevicePool(pool, layout)
        on_gpu = self.device_pool.buffer.is_cuda
        _log_sizes(config, sizes, layout)
        self.host_pool = HostPool(layout, config.host_pages, on_gpu)
        kernels = None if self.options.kernels == "auto" else self.options.kernels
        row = layout.host_group.row
        self.transfers = self.transfer_class(
            self.host_pool, self.device_pool, row, self.counters, kernels, agree=self._agree
        )
        self.runtime = Runtime(
            layout, config, sizes, self.host_pool, self.device_pool, kernels, num_plans=NUM_PLANS
        )
        self.lifecycle = Lifecycle(
            config,
            pool.page_size,
            self.transfers,
            self.counters,
            extent_pages=extent_pages(row.page_bytes),
            on_lease=self._poison if self.options.poison else None,
        )
        if on_gpu:
            topk.verify(self.device_pool.buffer.device, config.top_k)
        pool.attach(self.runtime.tables.resident_page, kernels)
        self.token_to_kv_pool_allocator.attach(self)

    def _config(self, top_k: int, device_buffer_size: int, layout: KVLayout) -> HiSparseConfig:
        pool, allocator, options = self.mem_pool_device, self.token_to_kv_pool_allocator, self.options
        rows, context = self.req_to_token_pool.req_to_token.shape
        host_pages, ranks = allocator.size_full // pool.page_size + 1, self.tp_world_size
        config = HiSparseConfig(
            top_k=top_k,
            context_len=min(context, MAX_CONTEXT, (host_pages - 1) * pool.page_size),
            host_pages=host_pages,
            device_pages=pool.num_pages,
            device_buffer_size=device_buffer_size,
            max_requests=-(-rows // ranks) * ranks,  # SGLang may pad a batch to a multiple of its ranks
            max_hot_requests=options.max_hot_requests,
            eager_host_mirror=options.eager_host_mirror,
            max_spill_pages=options.max_spill_pages,
            admission_window=options.admission_window,
            kernels=options.kernels,
            poison=options.poison,
        )
        if options.max_hot_requests is not None:
            return config
        region = _region_bytes(Sizes.of(config, pool.page_size), layout)
        return replace(config, max_hot_requests=hot_requests_within(pool.rows.nbytes, region))

    def attach_tree(self, tree: Any) -> None:
        """The tree is built last."""
        self.tree = tree
        self.admission = Admission(self.lifecycle, tree)

    # What the scheduler calls in each step.

    def collect(self) -> None:
        """Before the scheduler plans a step: completed copies, publication, spills, hot regions.

        Asking all ranks which copies are through costs a reduction, so several ranks do it only when
        something waits for one, and now and then.
        """
        self.num_steps += 1
        waiting = self.admission.is_waiting or self.tree.is_waiting or self.num_steps % POLL_INTERVAL == 0
        self.lifecycle.collect(poll=waiting or self.tp_world_size == 1)
        self.tree.publish()
        prometheus.export(self, time.monotonic())

    def allocate_spec_scratch(self, req_pool_indices: Sequence[int]) -> None:
        """The rows of the prefill batch that the allocator is about to be asked for, in batch order."""
        self.scratch_rows = list(req_pool_indices)
        for request in self.lifecycle.requests.values():
            if request.row < 0:
                self.lifecycle.bind(request, request.req.kv.req_pool_idx)

    def extend(self, ends: Sequence[int]) -> np.ndarray | None:
        """Slots int64 of a prefill batch up to these lengths; None if host pages are missing."""
        rows, self.scratch_rows = self.scratch_rows, []
        assert len(rows) == len(ends), f"{len(ends)} lengths for the rows {rows}"
        slots: list[np.ndarray] = []
        for row, end in zip(rows, ends, strict=True):
            request = self.lifecycle.rows[row]
            more = self.lifecycle.extend(request, end)
            if more is None:
                return None
            slots.append(more)
            self.launching.append((request, end))
        return np.concatenate(slots)

    def can_decode(self, reqs: Sequence[Any]) -> bool:
        """Whether all of these can take a token more; the last moment at which one can be retracted."""
        records = self.lifecycle.requests
        return self.lifecycle.can_grow([records[req.rid] for req in reqs])

    def prepare_decode(self, reqs: Sequence[Any]) -> None:
        """Slots of the next token of each request of the batch, in its order."""
        records = self.lifecycle.requests
        requests = [records[req.rid] for req in reqs]
        self.decode_slots = self.lifecycle.grow(requests)
        self.launching += [(request, request.num_tokens) for request in requests]

    def take_decode_slots(self) -> torch.Tensor:
        """The slots of ``prepare_decode`` on the device, int64 [batch]."""
        slots, self.decode_slots = self.decode_slots, []
        if not self.config.eager_host_mirror:
            return upload(slots, torch.int64, self.device_pool.buffer.device)
        return self.transfers.upload_step(slots, self.lifecycle.pages.device_rows(slots))

    def before_forward(self) -> None:
        """On the forward's stream: what it reads is up to date, what it needs restored has arrived."""
        self.runtime.apply(self.lifecycle.take_deltas())
        self.transfers.join_restores()

    def after_forward(self) -> None:
        """On the forward's stream: it was launched. Mirrors run behind it."""
        launched, self.launching = self.launching, []
        if self.is_resident:
            self.is_resident = False
            rows = sum(min(end, self.config.top_k) for _, end in launched)
            self.resident_rows += rows * len(self.leaders)
        mirrored = self.lifecycle.settle(launched)
        if self.config.eager_host_mirror:
            self.lifecycle.pages.mirror(mirrored)
        if launched:
            self.audit.step()

    def graph_variant(self) -> str:
        """Which graph the decode step takes that is being launched, behind ``before_forward``."""
        self.is_resident = not self.lifecycle.residency.num_hot
        return graphs.RESIDENT if self.is_resident else graphs.SWAP_IN

    def request(self, req: Any) -> ServedRequest:
        """Our record of one of SGLang's requests."""
        return self.lifecycle.requests[req.rid]

    # What the scheduler calls at the end of a request, before it releases the row.

    def request_finished(self, req: Any) -> None:
        """The request computes nothing more. A step of it may still run; what that reads stays as it is until
        a later forward."""
        self.lifecycle.release(self.request(req))

    def retract_req(self, req: Any) -> None:
        """The request is taken back: its durable prefix is published, its next admission finds it."""
        request = self.request(req)
        self.counters.retractions += 1
        self.lifecycle.release(request)
        self.tree.publish_retracted(req, request)

    # What the attention layers call.

    def swap_in_selected_pages(
        self,
        req_pool_indices: torch.Tensor,
        compressed_seq_lens: torch.Tensor,
        top_k_result: torch.Tensor,
        layer_id: int,
    ) -> torch.Tensor:
        """Device rows int32 [batch, top_k] of the selected positions of one layer, -1 masked.

        A leader resolves and starts the copies of its group; a follower waits for its own. In a graph for
        steps whose rows are all resident there is nothing to copy or to wait for.
        """
        group = self.group_of[layer_id]
        if layer_id not in self.leaders:
            self.runtime.wait_layer(layer_id)
            return self.answers[group]
        if group == 0:
            self.runtime.set_device_batch(req_pool_indices, self.num_real_reqs.on_device)
        if graphs.without_swap_in():
            self.answers[group] = self.runtime.resident_rows(top_k_result)
        else:
            self.answers[group] = self.runtime.swap_in(group, top_k_result)
        return self.answers[group]

    # The rest of what SGLang asks its coordinator. Nothing is staged here, and nothing is backed up late.

    def set_decode_producer_stream(self, stream: Any) -> None:
        """The stream of the forwards: every copy runs behind what it was given."""
        self.forward_stream = stream
        self.transfers.run_behind(stream)

    def admit_request_into_staging(self, req: Any) -> None:
        req.hisparse_staging = False

    def collect_ready_reqs(self) -> list[Any]:
        return []

    def has_ongoing_staging(self) -> bool:
        return False

    @property
    def ack_staging_queue(self) -> list[Any]:
        return []

    def map_last_loc_to_buffer(self, *args: Any, **kwargs: Any) -> None:
        """The new token's page is leased already."""

    def wait_for_pending_backup(self) -> None:
        """Copies are ordered by ``before_forward``."""

    def get_token_stats(self) -> Any:
        life, leases, allocator = self.lifecycle, self.lifecycle.leases, self.lifecycle.allocator
        size, device, host = life.page_size, self.config.device_pages - 1, self.config.host_pages - 1
        used = host - allocator.num_free
        return stock.HiSparseTokenStats(
            device_tokens=leases.num_in_use * size,
            device_token_usage=leases.num_in_use / device,
            host_tokens=used * size,
            host_token_usage=used / host,
        )

    def metrics(self, exact: bool = False) -> list[Metric]:
        """All series of docs/metrics.md; without ``exact`` the kernels' counts are those of the last landed
        read, and the GPU is not waited for."""
        self.runtime.fill(self.counters, None if exact else self.kernel_stats.read())
        self.counters.resident_rows += self.resident_rows
        self.counters.fill(self.lifecycle.leases)
        return snapshot(self.counters, self.lifecycle)

    def destroy(self) -> None:
        """End all copies, log the counts, give the host memory back: that also where a broken GPU lets
        nothing else be done."""
        try:
            if self.device_pool.buffer.is_cuda:
                torch.cuda.synchronize(self.device_pool.buffer.device)
            counters = [m for m in self.metrics(exact=True) if m.kind == "counter"]
            counts = {m.name.removeprefix("hisparse:"): m.value for m in counters}
            logger.info("hisparse_sgl served: %s", ", ".join(f"{k} {v}" for k, v in counts.items() if v))
        finally:
            self.host_pool.close()

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` on records that contradict each other. Reads the device."""
        self.lifecycle.check_integrity()
        self.runtime.check_integrity()

    def _poison(self, device_pages: list[int]) -> None:
        """Behind the forward in flight, which may still read what these pages held."""
        buffer = self.device_pool.buffer
        if buffer.is_cuda and self.forward_stream is not None:
            torch.cuda.current_stream(buffer.device).wait_stream(self.forward_stream)
        self.device_pool.poison_pages(device_pages)

    def _agree(self, counts: tuple[int, int]) -> tuple[int, int]:
        """The least of each count over the ranks that schedule alike (rule 8)."""
        if self.tp_world_size == 1:
            return counts
        least = torch.tensor(counts, dtype=torch.int64)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=self.tp_group)
        return int(least[0]), int(least[1])


def _region_bytes(sizes: Sizes, layout: KVLayout) -> int:
    """Bytes of the hot state of one region."""
    context, groups = sizes.context_pages * sizes.page_rows, len(layout.host_group.index_groups)
    return hot_state_bytes(sizes.hot_rows, context, groups)


def _log_sizes(config: HiSparseConfig, sizes: Sizes, layout: KVLayout) -> None:
    logger.info(
        "hisparse_sgl: %d device pages of %.2f MiB, %d host pages, %.1f GiB of host memory; up to %d hot "
        "regions of %d rows, %.1f MiB of hot state",
        config.device_pages,
        layout.host_bytes(1) / 2**20,
        config.host_pages,
        layout.host_bytes(config.host_pages) / 2**30,
        sizes.hot_regions,
        sizes.hot_rows,
        sizes.hot_regions * _region_bytes(sizes, layout) / 2**20,
    )
