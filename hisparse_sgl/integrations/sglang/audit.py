"""The byte audit while serving: every so many steps, all rows of one request against the host."""

from __future__ import annotations

import logging

import torch

from hisparse_sgl.audit import differing
from hisparse_sgl.integrations.sglang.lifecycle import Lifecycle, ServedRequest
from hisparse_sgl.pages import PageState
from hisparse_sgl.runtime import Runtime

logger = logging.getLogger(__name__)


class Audit:
    """Compares one running request at a time, in turn, every ``every`` steps; 0: never.

    It waits for the GPU, so it is for tests and for a server under suspicion.
    """

    def __init__(self, every: int, lifecycle: Lifecycle, runtime: Runtime) -> None:
        self.every = every
        self.lifecycle = lifecycle
        self.runtime = runtime
        self.steps = 0
        self.checked = 0

    def step(self) -> None:
        """A forward was launched on the current stream."""
        self.steps += 1
        if not self.every or self.steps % self.every:
            return
        running = [r for r in self.lifecycle.requests.values() if not r.released]
        if running:
            request = running[self.checked % len(running)]
            self.checked += 1
            if self.runtime.where.type == "cuda":
                torch.cuda.synchronize(self.runtime.where)
            self.check(request)

    def check(self, request: ServedRequest) -> int:
        """Compare every copy of the request's durable rows; mismatches are logged and counted."""
        mismatches = 0
        for layer, slots, rows in self._copies(request):
            wrong = differing(self.runtime, layer, slots, rows).nonzero().flatten().tolist()
            mismatches += len(wrong)
            if wrong:
                position = self._position(request, int(slots[wrong[0]]))
                logger.error(
                    "hisparse_sgl audit: request %s, layer %d: %d of %d rows differ from host memory, the "
                    "first at position %d (slot %d, device row %d)",
                    request.req.rid, layer, len(wrong), len(slots), position, slots[wrong[0]], rows[wrong[0]],
                )  # fmt: skip
        self.lifecycle.counters.audit_mismatches += mismatches
        return mismatches

    def _copies(self, request: ServedRequest) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """(layer, host slots, device rows) of the resident and the hot copies of durable pages."""
        life, size = self.lifecycle, self.lifecycle.page_size
        durable = [p for p in request.pages if life.pages.states[p] is PageState.DURABLE]
        offsets = torch.arange(size)
        pages = torch.tensor([p for p in durable if life.leases.is_resident(p)], dtype=torch.int64)
        device = torch.tensor([life.leases.device_page_of(p) for p in pages.tolist()], dtype=torch.int64)
        slots = (pages[:, None] * size + offsets).flatten()
        rows = (device[:, None] * size + offsets).flatten()
        copies = [(layer, slots, rows) for layer in range(self.runtime.host.buffer.shape[0])]
        if request.hot_pages and self.runtime.region_of[request.row] == request.region:
            hot = torch.tensor(request.hot_pages, dtype=torch.int64)
            rows = (hot[:, None] * size + offsets).flatten()
            known = torch.tensor(sorted(durable), dtype=torch.int64)
            for index, group in enumerate(self.runtime.groups):
                keys = self.runtime.hot.keys[index, request.region].cpu().long()
                held = (keys >= 0) & torch.isin(keys // size, known)
                copies += [(layer, keys[held], rows[held]) for layer in group.layers]
        return copies

    def _position(self, request: ServedRequest, slot: int) -> int:
        size = self.lifecycle.page_size
        return request.pages.index(slot // size) * size + slot % size
