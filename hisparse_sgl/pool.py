"""The engine-neutral API: one object that owns the memory, the tables and the requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

import torch

from hisparse_sgl.audit import count_mismatches
from hisparse_sgl.checks import check_positions, check_rids, check_slots, request_id, row_bytes, tokens, whole
from hisparse_sgl.config import HiSparseConfig, Sizes
from hisparse_sgl.coordinator import Coordinator
from hisparse_sgl.integrity import check_integrity
from hisparse_sgl.kernels.backend import choose
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.extents import extent_pages
from hisparse_sgl.mem_pool.host_pool import HostPool
from hisparse_sgl.mem_pool.layout import KVLayout
from hisparse_sgl.metrics import Counters, Metric, snapshot
from hisparse_sgl.radix.events import KVEvent
from hisparse_sgl.radix.page_hash import ExtraKey, TokenIds
from hisparse_sgl.requests import Admission, Deferred, Deltas, Request
from hisparse_sgl.runtime import Runtime
from hisparse_sgl.transfers import Transfers, upload


class HiSparsePool:
    """A host-backed KV pool with a prefix cache.

    One step is ``extend`` for each request, ``begin_step``, the forward (``write`` and ``swap_in`` a layer),
    ``step_done``. Every method raises ``ValueError`` after ``close``, for a request that is not running, and
    for a value out of its limits; nothing is changed then.

    Args:
        layout: what the model keeps for each token.
        config: sizes and policies.
        device: where the device pool lies.
        transfer_class: what moves bytes between the pools; tests put late and failing copies here.
        host_pool: the host memory, a ``SharedHostPool`` of several ranks for one; None makes it. ``close``
            closes it.
    """

    def __init__(
        self,
        layout: KVLayout,
        config: HiSparseConfig,
        device: torch.device | str = "cpu",
        transfer_class: type[Transfers] = Transfers,
        host_pool: HostPool | None = None,
    ) -> None:
        self.layout = layout
        self.config = config
        group = layout.host_group
        self.sizes = Sizes.of(config, layout.page_size, group.tokens_per_row)
        self.closed = False
        self.group_ids = {g.leader: i for i, g in enumerate(group.index_groups)}
        backend = None if config.kernels == "auto" else config.kernels
        with ExitStack() as opened:
            # The host pool first: it knows what fits, and its slots take indexer rows on the device.
            if host_pool is None:
                host_pool = HostPool(layout, config.host_pages, torch.device(device).type == "cuda")
                opened.callback(host_pool.close)
            elif (host_pool.layout, host_pool.num_pages) != (layout, config.host_pages):
                raise ValueError(
                    f"host_pool has {host_pool.num_pages} pages, the limit is config.host_pages, "
                    f"{config.host_pages}, of the same layout: make it with both"
                )
            self.host_pool = host_pool
            self.device_pool = DevicePool(
                layout, config.device_pages, config.host_pages, device, poison=config.poison
            )
            opened.callback(self.device_pool.close)
            choose(self.device_pool.buffer, backend)
            self._counters = Counters()
            self.transfers = transfer_class(
                self.host_pool, self.device_pool, group.row, self._counters, backend
            )
            self.runtime = Runtime(layout, config, self.sizes, self.host_pool, self.device_pool, backend)
            self.coordinator = Coordinator(
                config,
                layout.page_size,
                self.transfers,
                self._counters,
                extent_pages=extent_pages(group.row.page_bytes),
                on_lease=self.device_pool.poison_pages if config.poison else None,
                tokens_per_row=group.tokens_per_row,
                needs_state=layout.needs_state,
            )
            opened.pop_all()
        self._step: list[Request] = []
        self._written: set[int] = set()  # layers that the open step wrote
        self._deltas: list[Deltas] = []  # taken from the coordinator and not applied yet

    def admit(self, rid: str, token_ids: TokenIds, extra_key: ExtraKey = None) -> Admission | Deferred:
        """Let a request in with its longest durable prefix; at least one token is left to compute.

        ``extra_key`` (LoRA id, tenant salt) separates prefixes: requests with different keys never share.
        """
        self._check_open()
        self._check_between_steps("admit")
        return self.coordinator.admit(request_id(rid), tokens(token_ids), extra_key)

    def extend(self, rid: str, n: int) -> torch.Tensor | Deferred:
        """Token slots int32 [n] on the device for the next ``n`` tokens of a request."""
        self._check_open()
        self._check_between_steps("extend")
        slots = self.coordinator.extend(rid, whole("n", n))
        if isinstance(slots, Deferred):
            return slots
        return upload(slots, torch.int32, self.device)

    def append_tokens(self, rid: str, token_ids: TokenIds) -> None:
        """Tell the pool which tokens were generated, so that their pages can be published."""
        self._check_open()
        self.coordinator.append_tokens(rid, tokens(token_ids))

    def rewind(self, rid: str, num_tokens: int) -> None:
        """Take back all tokens of a request after the first ``num_tokens`` (rejected drafts)."""
        self._check_open()
        self.coordinator.rewind(rid, whole("num_tokens", num_tokens))

    def begin_step(self, rids: Sequence[str], query_rows: int = 1) -> None:
        """The batch of the next forward, in batch order; brings the device tables up to date.

        The tokens that these requests have now are the ones that ``step_done`` counts as written, but for
        those that ``rewind`` takes back. When the forward fails, retract or abort these requests: that ends
        the step as well.
        """
        self._check_open()
        check_rids(rids)
        if not 1 <= whole("query_rows", query_rows) <= self.config.query_rows:
            raise ValueError(
                f"query_rows is {query_rows}, it must be between 1 and the pool's {self.config.query_rows}: "
                "raise HiSparseConfig.query_rows"
            )
        requests = [self.coordinator.request(rid) for rid in rids]
        self._check_between_steps("begin_step")
        is_ready = self.coordinator.residency.is_ready
        waiting = [request.rid for request in requests if not (request.hot_pages or is_ready(request))]
        if waiting:
            raise ValueError(
                f"rids {waiting} wait for pages to be restored: leave each out until extend returns its slots"
            )
        self._apply()
        self.runtime.set_batch([request.row for request in requests], query_rows)
        self.coordinator.begin_step(requests)
        self._written = set()
        self._step = requests

    def keep_state(self, rid: str, num_tokens: int, state: object) -> None:
        """Keep what the engine needs besides pages to resume behind the first ``num_tokens`` tokens.

        The prefix tree owns it with the page that ends there, once that is published; the first one given for
        a page is the one kept. An admission whose hit ends there answers it.
        """
        self._check_open()
        self.coordinator.keep_state(rid, whole("num_tokens", num_tokens), state)

    def row_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Row slots int32 [n] of token slots: that of the row which each token completes, 0 (null) for none.

        Where each token has a row of its own these are the same numbers.
        """
        self._check_open()
        share = self.layout.host_group.tokens_per_row
        return torch.where(slots % share == share - 1, slots // share, 0).to(torch.int32)

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows of new tokens to their resident pages.

        Args:
            layer: layer of the host-backed group.
            slots: int32 [n], row slots of what ``extend`` returned; slots of page 0 take padding.
            rows: [n, row bytes] uint8, or any dtype of the same bytes a row.
        """
        self._check_open()
        self._check_layer(layer)
        check_slots(slots, self.num_rows)
        data = row_bytes(rows, slots.numel(), self.layout.host_group.row.row_bytes)
        where = self.runtime.translate(slots).long()
        if self.device.type == "cpu" and bool((where < 0).any()):
            raise ValueError(
                f"slots has {slots[where < 0].tolist()}, the limit is slots on resident pages: write slots "
                "that extend returned, after begin_step"
            )
        where.clamp_(min=0)  # on a GPU nobody looks: a stray row lands on the null page
        self.device_pool.write_rows(layer, where, data)
        self._written.add(layer)

    def write_index(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write indexer rows to row slots; ``layer`` is a leader, ``rows`` [n, index row bytes]."""
        target = self.index_rows(layer)
        check_slots(slots, self.num_rows)
        target[slots.long()] = row_bytes(rows, slots.numel(), target.shape[1])

    def index_rows(self, layer: int) -> torch.Tensor:
        """uint8 [row slots, index row bytes]: the indexer rows of a leader layer, by row slot."""
        self._check_open()
        return self.device_pool.index_rows[self._group_id(layer)]

    def group_rows(self, name: str, layer: int) -> torch.Tensor:
        """uint8 [slots // tokens_per_row, row bytes]: one layer of a group that lies on the device only.

        The engine reads and writes it by itself. A row has the life of its slots, so a prefix hit finds it.
        """
        self._check_open()
        return self.device_pool.group_rows(name, whole("layer", layer), torch.uint8)

    def page_table(self, rids: Sequence[str]) -> torch.Tensor:
        """int32 [len(rids), pages of the longest]: host pages of requests, 0 behind the last."""
        self._check_open()
        requests = [self.coordinator.request(rid) for rid in rids]
        width = max((len(request.pages) for request in requests), default=0)
        padded = [request.pages + [0] * (width - len(request.pages)) for request in requests]
        return torch.tensor(padded, dtype=torch.int32, device=self.device).view(len(rids), width)

    def translate(self, slots: torch.Tensor) -> torch.Tensor:
        """Device rows int32 of row slots, for prefill reads; -1 where one is not resident."""
        self._check_open()
        return self.runtime.translate(slots)

    def swap_in(self, group: int, positions: torch.Tensor) -> torch.Tensor:
        """Device rows of the positions that the indexer selected; missing ones are on their way.

        Args:
            group: the leader layer of the index group.
            positions: int32 [batch * query_rows, at most top_k] in the order of ``begin_step``, -1 pads.
                Positions of rows: those of tokens divided by ``tokens_per_row``.

        Returns:
            int32 rows of the same shape, -1 masked, valid until the group's next call. Read the bytes
            through ``rows(layer)``.
        """
        self._check_open()
        check_positions(positions, self.runtime.batch * self.runtime.query_rows, self.config.top_k)
        return self.runtime.swap_in(self._group_id(group), positions)

    def pages(self, layer: int) -> torch.Tensor:
        """uint8 [device pages, page bytes] of a layer, for any rows; waits (on the GPU) for its copies."""
        self._check_open()
        self._check_layer(layer)
        self.runtime.wait_layer(layer)
        return self.device_pool.layer(layer)

    def rows(self, layer: int) -> torch.Tensor:
        """uint8 [device rows, row bytes] of a layer, for one-part rows; waits as ``pages`` does."""
        self.pages(layer)
        return self.device_pool.rows(layer, torch.uint8)

    def step_done(self) -> None:
        """The forward is over: copy what is full to the host, take in completed copies, publish, unpin.

        Raises:
            ValueError: ``write`` wrote some layers of the step and not the others, whose rows would be
                published unwritten. The step stays open. (An engine that writes by itself is not looked at.)
        """
        self._check_open()
        missing = sorted(set(range(self.layout.host_group.num_layers)) - self._written)
        if self._step and self._written and missing:
            raise ValueError(f"step_done was called with layers {missing} unwritten: write every layer first")
        step, self._step = self._step, []
        self.runtime.join()
        self.coordinator.step_done(step)

    def wait(self) -> bool:
        """Block for the oldest copy in flight, for want of other work. False if there is none."""
        self._check_open()
        self._check_between_steps("wait")
        return self.coordinator.wait()

    def retract(self, rid: str) -> None:
        """Take a running request back; what is durable of it is published. Admit it again to go on."""
        self._join_copies()
        self.coordinator.retract(rid)

    def finish(self, rid: str) -> None:
        """The request is complete; its whole pages are published, now or when their copies are through."""
        self._join_copies()
        self.coordinator.finish(rid)

    def abort(self, rid: str) -> None:
        """End a request without publishing any more of it."""
        self._join_copies()
        self.coordinator.abort(rid)

    def flush(self) -> None:
        """Forget every prefix; what runs now is never published."""
        self._check_open()
        self.coordinator.flush()

    def take_kv_events(self) -> list[KVEvent]:
        """KV events since the last call (``HiSparseConfig.kv_events``)."""
        self._check_open()
        return self.coordinator.events.take()

    @property
    def num_slots(self) -> int:
        """Token slots of the host pool, the null page's included."""
        return self.config.host_pages * self.sizes.page_size

    @property
    def num_rows(self) -> int:
        """Row slots of the host pool: fewer than token slots where tokens share a row."""
        return self.config.host_pages * self.sizes.page_rows

    @property
    def device(self) -> torch.device:
        return self.device_pool.buffer.device

    @property
    def counters(self) -> Counters:
        """Counts so far. Reads the device."""
        self._check_open()
        self.runtime.fill(self._counters)
        self._counters.fill(self.coordinator.leases)
        return self._counters

    @property
    def peak_device_pages(self) -> int:
        """Most device pages that were pinned or hot at one time."""
        return self.coordinator.leases.peak_in_use

    @property
    def peak_host_pages(self) -> int:
        """Most host pages in use at one time: full residency would have needed them on the device."""
        return self.coordinator.pages.peak_in_use

    def metrics(self) -> list[Metric]:
        """All series, as docs/metrics.md lists them. Reads the device."""
        return snapshot(self.counters, self.coordinator)

    def audit(self) -> int:
        """Compare every device copy with the host's bytes; returns and counts the rows that differ. Slow."""
        self._check_open()
        self._apply()
        mismatches = count_mismatches(self.coordinator, self.runtime)
        self._counters.audit_mismatches += mismatches
        return mismatches

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` naming the first invariant that does not hold. Reads the device."""
        self._check_open()
        check_integrity(self.coordinator)
        self.runtime.check_integrity()

    def close(self) -> None:
        """Give the memory back. Safe to call again, after an exception, and with a dead CUDA context."""
        self.closed = True
        self.host_pool.close()
        self.device_pool.close()

    def __enter__(self) -> HiSparsePool:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _apply(self) -> None:
        # What an error cuts short is applied again, as a whole, before what comes after it.
        self._deltas.append(self.coordinator.take_deltas())
        while self._deltas:
            self.runtime.apply(self._deltas[0])
            del self._deltas[0]

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the pool is closed: make a new HiSparsePool")

    def _join_copies(self) -> None:
        self._check_open()
        # After a forward that failed they may still write to a hot region that is now given back.
        self.runtime.join()

    def _check_layer(self, layer: int) -> None:
        self.layout.group_of(whole("layer", layer))

    def _check_between_steps(self, call: str) -> None:
        # Pages that a forward still reads would be handed out.
        if any(self.coordinator.requests.get(request.rid) is request for request in self._step):
            raise ValueError(
                f"{call} was called while a step is open: call step_done first, or retract or abort the "
                f"requests of the step, {[request.rid for request in self._step]}"
            )

    def _group_id(self, layer: int) -> int:
        if layer not in self.group_ids:
            raise ValueError(
                f"layer is {layer}, the limit is one that runs the indexer: use the leader of its group, "
                f"one of {sorted(self.group_ids)}"
            )
        return self.group_ids[layer]
