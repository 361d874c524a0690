"""The byte audit: every copy on the device against the host, which is the truth."""

from __future__ import annotations

import torch

from hisparse_sgl.coordinator import Coordinator
from hisparse_sgl.kernels.rows import row_view
from hisparse_sgl.runtime import Runtime


def count_mismatches(coordinator: Coordinator, runtime: Runtime) -> int:
    """Rows of durable pages, resident or in hot regions, whose bytes differ from the host's, over all layers.

    The device tables must be up to date. Reads the device and waits for it.
    """
    return _resident(coordinator, runtime) + _hot(coordinator, runtime)


def _resident(coordinator: Coordinator, runtime: Runtime) -> int:
    pages, leases = coordinator.pages, coordinator.leases
    checked = [p for p in range(len(leases.resident_page)) if leases.is_resident(p) and pages.is_durable(p)]
    size = runtime.sizes.page_rows
    slots = torch.tensor([page * size + i for page in checked for i in range(size)], dtype=torch.int64)
    rows = torch.tensor(
        [leases.device_page_of(page) * size + i for page in checked for i in range(size)], dtype=torch.int64
    )
    return sum(
        int(differing(runtime, layer, slots, rows).sum()) for layer in range(runtime.host.buffer.shape[0])
    )


def _hot(coordinator: Coordinator, runtime: Runtime) -> int:
    size, mismatches, durable = runtime.sizes.page_rows, 0, coordinator.pages.is_durable
    for request in coordinator.requests.values():
        if not request.hot_pages:
            continue
        pages = torch.tensor(request.hot_pages, dtype=torch.int64)
        rows = (pages[:, None] * size + torch.arange(size)).flatten()
        for index, group in enumerate(runtime.groups):
            keys = runtime.hot.keys[index, request.region].cpu().long()
            # A page that is being written again is not true on the host until it is durable.
            held = torch.tensor([key >= 0 and durable(key // size) for key in keys.tolist()])
            pairs = (differing(runtime, layer, keys[held], rows[held]) for layer in group.layers)
            mismatches += sum(int(wrong.sum()) for wrong in pairs)
    return mismatches


def differing(runtime: Runtime, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """bool [n]: which of the pairs (host slot, device row), both int64 [n] on the CPU, differ in any byte."""
    size = runtime.row.page_size
    wrong = torch.zeros(slots.numel(), dtype=torch.bool)
    where = rows.to(runtime.where)
    for part in range(len(runtime.row.parts)):
        host = row_view(runtime.host.buffer[layer], runtime.row, part)[slots // size, slots % size]
        device = row_view(runtime.device.buffer[layer], runtime.row, part)[where // size, where % size].cpu()
        wrong |= (host != device).any(-1)
    return wrong
