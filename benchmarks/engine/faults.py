"""Faults put into a running server on purpose, to show that comparing its answers can fail.

A second SGLang plugin wraps methods of ours in every process of the server and acts while a file names a
fault. What it damages stays so in the prefix cache, and ``zero_row`` only meets prompts that are computed
from their start: flush the cache before and after a fault. Only for ``--cuda-graph-backend-decode disabled``:
what a graph replays does not come by here.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

FAULTS: tuple[str, ...] = ("zero_row", "shift_layer", "swap_hot_rows")
"""All in one layer. ``zero_row``: the row of one token of a request is zeroed behind the write, and mirrored
so to the host. ``shift_layer``: each row is written to the slot of the token after it, the last of a forward
to that of the first. ``swap_hot_rows``: behind the swap-in of a decode step, a row that the request selected
and another one of it, not selected, exchange their bytes: hot ones if there are. Between two selected rows
that would change nothing, attention does not know their order."""

LAYER = 1
"""The layer that is damaged: an early one, so that later layers build on it."""

TOKEN = 5
"""Position of the row that is zeroed: in the first page, which all later positions of a prefill may read."""

VARIABLE = "HISPARSE_SGL_FAULT_FILE"
"""Environment variable with the path of the file that names the fault."""

_MODULE = "hisparse_sgl_faults"
_METADATA = f"Metadata-Version: 2.1\nName: {_MODULE}\nVersion: 0\n"
_ENTRY_POINTS = f"[sglang.srt.plugins]\nfaults = {_MODULE}:register\n"


def environment(folder: Path) -> dict[str, str]:
    """Variables to add for a server, whose processes then load the faults; no fault is set.

    ``folder``, which is made, gets a distribution with one entry point and a copy of this module, so that its
    path has nothing else that a server could import by mistake. The value of ``PYTHONPATH`` goes in front of
    what the server has there.
    """
    info = folder.resolve() / f"{_MODULE}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    (info.parent / f"{_MODULE}.py").write_text(Path(__file__).read_text())
    set_fault(folder, None)
    variables = {"PYTHONPATH": str(info.parent), VARIABLE: str(_toggle(info.parent))}
    allowed = os.environ.get("SGLANG_PLUGINS")
    return {**variables, "SGLANG_PLUGINS": f"{allowed},faults"} if allowed else variables


def set_fault(folder: Path, name: str | None) -> None:
    """Let servers with the environment of ``folder`` commit this fault from their next layer on; None: none.

    Raises:
        ValueError: ``name`` is not one of ``FAULTS``.
    """
    if name is not None and name not in FAULTS:
        raise ValueError(f"fault is {name!r}, the limit is None or one of {', '.join(FAULTS)}; use one")
    toggle = _toggle(folder)
    fresh = toggle.with_suffix(".new")
    fresh.write_text(name or "")
    fresh.replace(toggle)


def register() -> None:
    """Entry point of the plugin: wrap what writes rows and swaps them in. A second call changes nothing."""
    from hisparse_sgl.integrations.sglang.coordinator import Coordinator

    if hasattr(Coordinator.before_forward, "__wrapped__"):
        return
    if VARIABLE not in os.environ:
        raise ValueError(f"{VARIABLE} is not set; start the server with what environment() answers")
    Faults(Path(os.environ[VARIABLE])).install()


class Toggle:
    """The name that a file holds, read when the file is another one than at the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp: tuple[int, int] | None = None
        self.name: str | None = None

    def read(self) -> str | None:
        """None while there is no file, or no name in it."""
        try:
            found = self.path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp != self.stamp:
                self.name = self.path.read_text().strip() or None
        except FileNotFoundError:
            stamp, self.name = None, None
        self.stamp = stamp
        return self.name


class Faults:
    """What the wrapped methods do. ``toggle`` is the file that names the fault."""

    def __init__(self, toggle: Path) -> None:
        self.toggle = Toggle(toggle)
        self.name: str | None = None
        self.slots: list[int] = []  # of position TOKEN of each request
        self.swapped: dict[str, int] = {}  # request id: how many hot rows were in its last exchange

    def install(self) -> None:
        """Wrap the methods of our classes, whether or not SGLang has them in place already."""
        from hisparse_sgl.integrations.sglang.coordinator import Coordinator
        from hisparse_sgl.integrations.sglang.kv_pool import KVPool

        _wrap(Coordinator, "before_forward", self.before_forward)
        _wrap(Coordinator, "swap_in_selected_pages", self.swap_in)
        _wrap(KVPool, "set_mla_kv_buffer", self.write)
        _wrap(KVPool, "set_kv_buffer", self.write)

    def active(self, layer: int) -> str | None:
        """The fault that this layer is to commit now."""
        if layer != LAYER:
            return None
        name = self.toggle.read()
        if name != self.name:
            logger.warning("seeded fault: %s", name)
            self.name = name
            self.swapped = {}
        return name

    def before_forward(self, original: Callable[..., None], coordinator: Any) -> None:
        """Around ``Coordinator.before_forward``: note where position ``TOKEN`` of each request lies."""
        original(coordinator)
        life = coordinator.lifecycle
        self.slots = [r.pages[0] * life.page_size + TOKEN for r in life.requests.values() if r.pages]

    def write(
        self, original: Callable[..., None], pool: Any, layer: Any, loc_info: Any, *data: Any, **named: Any
    ) -> None:
        """Around ``KVPool.set_mla_kv_buffer`` and ``set_kv_buffer``."""
        fault = self.active(layer.layer_id)
        slots = getattr(loc_info, "loc", loc_info)  # SGLang's KVWriteLoc, or a tensor
        original(pool, layer, slots.roll(-1) if fault == "shift_layer" else loc_info, *data, **named)
        if fault == "zero_row":
            self._zero(pool, slots)

    def swap_in(
        self,
        original: Callable[..., torch.Tensor],
        coordinator: Any,
        request_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        top_k_result: torch.Tensor,
        layer_id: int,
    ) -> torch.Tensor:
        """Around ``Coordinator.swap_in_selected_pages``."""
        found = original(coordinator, request_rows, seq_lens, top_k_result, layer_id)
        if self.active(layer_id) == "swap_hot_rows":
            real = coordinator.num_real_reqs.count
            for i, (row, length) in enumerate(
                zip(request_rows[:real].tolist(), seq_lens[:real].tolist(), strict=True)
            ):
                request = coordinator.lifecycle.rows.get(row)
                if request is not None:
                    self._exchange(coordinator, row, length, found[i], request.req.rid)
        return found

    def _zero(self, pool: Any, slots: torch.Tensor) -> None:
        """Of the rows just written to ``slots``, those that are position ``TOKEN`` of a request."""
        wanted = torch.tensor(self.slots, dtype=slots.dtype, device=slots.device)
        hit = slots[torch.isin(slots, wanted)]
        if hit.numel():
            rows = pool.translate_loc_to_hisparse_device(hit)
            row_bytes(pool, LAYER)[rows[rows >= pool.page_size].long()] = 0  # page 0 is no page
            logger.warning("seeded fault: layer %d: device rows %s zeroed", LAYER, rows.tolist())

    def _exchange(self, coordinator: Any, row: int, length: int, selected: torch.Tensor, rid: str) -> None:
        """Once a request, and again when more of the two rows can be hot ones. Not in each step: a pair twice
        would put things right."""
        kinds = (_hot_rows(coordinator, row), _resident_rows(coordinator, row, length))
        pair, num_hot = [], 0
        for wanted in (True, False):
            fitting = [rows[torch.isin(rows, selected) == wanted] for rows in kinds]
            kind = next((i for i, rows in enumerate(fitting) if rows.numel()), None)
            if kind is None:
                return
            pair.append(int(fitting[kind][0]))
            num_hot += kind == 0
        if num_hot <= self.swapped.get(rid, -1):
            return
        self.swapped[rid] = num_hot
        data = row_bytes(coordinator.mem_pool_device, LAYER)
        rows = torch.tensor(pair, device=data.device)
        data[rows] = data[rows.flip(0)]
        logger.warning(
            "seeded fault: request %s, layer %d: device rows %s exchanged, %d of them hot",
            rid, LAYER, pair, num_hot,
        )  # fmt: skip


def row_bytes(pool: Any, layer: int) -> torch.Tensor:
    """uint8 [device rows, bytes]: the rows of one layer, whatever their layout; a view."""
    rows = pool.rows[layer]
    return rows.view(torch.uint8).view(rows.shape[0], -1)


def _resident_rows(coordinator: Any, row: int, length: int) -> torch.Tensor:
    """int32 [n]: device rows of the positions of a request that are on resident pages, by position."""
    runtime = coordinator.runtime
    tables, size = runtime.tables, runtime.sizes.page_rows
    pages = tables.resident_page[tables.page_table[row, : -(-length // size)].long()]
    offsets = torch.arange(size, dtype=torch.int32, device=pages.device)
    rows = (pages[:, None] * size + offsets).flatten()[:length]
    return rows[rows >= size]  # page 0 is no page


def _hot_rows(coordinator: Any, row: int) -> torch.Tensor:
    """int32 [n]: device rows of a request's hot region whose row is nowhere else on the device."""
    runtime = coordinator.runtime
    tables, size, region = runtime.tables, runtime.sizes.page_rows, runtime.region_of[row]
    if region < 0:
        return torch.empty(0, dtype=torch.int32, device=runtime.where)
    keys = runtime.hot.keys[coordinator.group_of[LAYER], region]
    held = (keys >= 0) & (tables.resident_page[keys.clamp(min=0).long() // size] == 0)
    offsets = torch.arange(size, dtype=torch.int32, device=keys.device)
    return (tables.hot_pages[region][:, None] * size + offsets).flatten()[held]


def _toggle(folder: Path) -> Path:
    return folder / "fault"


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)
