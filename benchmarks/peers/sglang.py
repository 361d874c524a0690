"""SGLang's single-step swap-in kernel (``load_cache_to_device_buffer_mla``), on the inputs of a case.

Only SGLang's ``kernels`` folder is needed, with apache-tvm-ffi, msgspec, ninja and nvcc: the packages above
it are stand-ins here, because their own set-up imports a serving engine.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from benchmarks import timing
from benchmarks.cells import PAGE_SIZE, Cell
from benchmarks.workload import Workload

KERNEL = "sglang.kernels.ops.kvcache.hisparse"
BLOCKS = (960, 1024)
"""Threads a block: SGLang's default, and one that is a little faster."""


class _Settings:
    """Every setting of SGLang: what the environment says, else unset."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: os.environ.get(name))


def load(folder: str) -> ModuleType:
    """The module with SGLang's swap-in launchers.

    Args:
        folder: holds ``sglang/kernels/jit`` and ``sglang/kernels/ops/kvcache/hisparse.py``; "installed" takes
            the installed package.

    Raises:
        ValueError: the folder lacks them, or another ``sglang`` is imported already.
    """
    if folder == "installed":
        return importlib.import_module(KERNEL)
    root = Path(folder).resolve() / "sglang"
    if not (root / "kernels/ops/kvcache/hisparse.py").exists():
        raise ValueError(f"--sglang={folder} has no sglang/kernels/ops/kvcache/hisparse.py; correct it")
    if "sglang" in sys.modules:
        raise ValueError(f"--sglang={folder} comes after an import of sglang; use --sglang installed")
    _find_cuda()
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.kvcache"):
        _stand_in(name, [str(root.joinpath(*name.split(".")[1:]))])
    for name in ("sglang.srt", "sglang.srt.utils"):
        _stand_in(name, [])
    _stand_in("sglang.srt.environ", None, envs=_Settings())
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split("."))
    _stand_in("sglang.srt.utils.common", None, is_cuda=lambda: True, get_cuda_version=lambda: version)
    return importlib.import_module(KERNEL)


def _find_cuda() -> None:
    """Point SGLang's build at the toolkit, also where nvcc on the PATH is a wrapper or the runtime library
    lies outside lib64. Mutates the environment; what is set already stays."""
    on_path = shutil.which("nvcc")
    roots = [Path(on_path).resolve().parents[1]] if on_path else []
    roots += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    found = [root for root in roots if (root / "include/cuda_runtime.h").exists()]
    if found:
        os.environ.setdefault("CUDA_HOME", str(found[0]))
    libraries = [str(root / name) for root in found for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
    searched = [*os.environ.get("LIBRARY_PATH", "").split(os.pathsep), *libraries]
    os.environ["LIBRARY_PATH"] = os.pathsep.join(path for path in searched if path)


def _stand_in(name: str, path: list[str] | None, **members: Any) -> None:
    module = ModuleType(name)
    if path is not None:
        module.__path__ = path
    vars(module).update(members)
    sys.modules[name] = module


class Peer:
    """Builds the kernels for the chosen cells (all at the same time) and times them.

    Raises:
        ValueError: see `load`.
        RuntimeError: a kernel did not compile.
    """

    def __init__(self, folder: str, chosen: Iterable[Cell]) -> None:
        self.module: Any = load(folder)
        build = self.module._jit_sparse_module
        # The row size only names a build, it changes no code: one build serves all row sizes.
        self.module._jit_sparse_module = lambda item_size_bytes, *rest, **flags: build(0, *rest, **flags)
        kinds = {(cell.top_k, cell.hot_rows, len(cell.parts) > 1) for cell in chosen if self.supports(cell)}
        variants = [
            (block, *kind, skip_io) for block in BLOCKS for kind in kinds for skip_io in (False, True)
        ]
        with ThreadPoolExecutor(max(1, len(variants))) as executor:
            list(executor.map(self._build, variants))

    def _build(self, variant: tuple[int, int, int, bool, bool]) -> None:
        block, top_k, hot_rows, two_parts, skip_io = variant
        self.module._jit_sparse_module(
            0,
            block,
            top_k,
            hot_rows,
            is_mla=True,
            is_dsv4_layout=two_parts,
            record_miss_plan=False,
            skip_io=skip_io,
        )

    def supports(self, cell: Cell) -> bool:
        """One query row only: SGLang has another kernel, with other state, for several."""
        return cell.query_rows == 1 and not cell.resident

    def run(self, work: Workload) -> dict[str, Any]:
        """Check and time a case: for each block size ``plan_us`` and ``whole_us``.

        Raises:
            RuntimeError: a selected row has wrong bytes, or the misses are not those of the case.
        """
        return {str(block): self._run_block(work, block) for block in BLOCKS}

    def _run_block(self, work: Workload, block: int) -> dict[str, Any]:
        state = State(self.module, work, block)
        state.check_gate()
        times = {}
        for name, skip_io in (("plan_us", True), ("whole_us", False)):

            def body(skip_io: bool = skip_io) -> None:
                for step in range(1, work.steps + 1):
                    state.step(step, skip_io)

            state.restore()
            body()
            times[name] = timing.measure(body, state.restore, work.steps, work.mirror.device)._asdict()
        wrong = work.count_wrong(work.steps, state.out_rows, state.device)
        if wrong:
            raise RuntimeError(f"SGLang, {work.cell.name}: the replayed graph left {wrong} wrong rows")
        return times


class State:
    """SGLang's tensors for a case: the same pages, hot rows and selections."""

    def __init__(self, module: Any, work: Workload, block: int) -> None:
        cell, where = work.cell, work.mirror.device
        two_parts = len(cell.parts) > 1
        self.work = work
        self.block = block
        self.launch = (
            module.load_cache_to_device_buffer_dsv4_mla
            if two_parts
            else module.load_cache_to_device_buffer_mla
        )
        requests = work.tables.page_table.shape[0]
        # One more page a request, for the newest token: no case selects it, so its rows are never used.
        width = cell.hot_rows + PAGE_SIZE
        self.tokens = torch.full((requests, width), -1, dtype=torch.int32, device=where)
        inside = torch.arange(PAGE_SIZE, dtype=torch.int32, device=where)
        self.device_locs = torch.zeros_like(self.tokens)
        hot = work.tables.hot_pages[:, :, None] * PAGE_SIZE + inside
        self.device_locs[:, : cell.hot_rows] = hot.flatten(1)
        host = work.tables.page_table[:, :, None].long() * PAGE_SIZE + inside
        self.host_locs = host.flatten(1).contiguous()
        self.lru = torch.arange(cell.hot_rows, device=where).to(torch.int16).repeat(requests, 1)
        self.out_rows = torch.full_like(work.out_rows, -1)
        self.owners = work.request_rows.long()
        self.lengths = torch.full((cell.batch,), cell.context + 1, dtype=torch.int64, device=where)
        self.count = torch.tensor([cell.batch], dtype=torch.int32, device=where)
        self.device = torch.full_like(work.device, 0xFF)
        shape = (-1, 1, cell.row_bytes)
        self.host_rows = work.hosts if two_parts else [host.view(shape) for host in work.hosts]
        self.device_rows = self.device if two_parts else self.device.view(shape)
        self.start = (self.tokens.clone(), self.lru.clone())

    def step(self, step: int, skip_io: bool = False) -> None:
        """One step; mutates the hot state, ``out_rows`` and (unless ``skip_io``) the rows."""
        cell = self.work.cell
        self.launch(
            top_k_tokens=self.work.positions[step],
            device_buffer_tokens=self.tokens,
            host_cache_locs=self.host_locs,
            device_buffer_locs=self.device_locs,
            host_cache=self.host_rows[step % len(self.host_rows)],
            device_buffer=self.device_rows,
            top_k_device_locs=self.out_rows,
            req_pool_indices=self.owners,
            seq_lens=self.lengths,
            lru_slots=self.lru,
            item_size_bytes=cell.row_bytes,
            num_top_k=cell.top_k,
            hot_buffer_size=cell.hot_rows,
            page_size=PAGE_SIZE,
            block_size=self.block,
            num_real_reqs=self.count,
            skip_io=skip_io,
        )

    def restore(self) -> None:
        """Back to the state after the warm-up step."""
        self.tokens.copy_(self.start[0])
        self.lru.copy_(self.start[1])

    def check_gate(self) -> None:
        """Run all steps once and keep the state after the first.

        Raises:
            RuntimeError: a selected row has wrong bytes, or the misses are not those of the case.
        """
        cell = self.work.cell
        for step in range(self.work.steps + 1):
            before = self.tokens.clone()
            self.step(step)
            wrong = self.work.count_wrong(step, self.out_rows, self.device)
            loaded = (self.tokens != before)[self.owners].sum(1)
            expected = cell.misses if step else cell.selected
            if wrong or bool((loaded != expected).any()):
                raise RuntimeError(
                    f"SGLang, {cell.name}: step {step}: {wrong} wrong rows, {int(loaded.min())} to "
                    f"{int(loaded.max())} misses a request, not {expected}"
                )
            if step == 0:
                self.start = (self.tokens.clone(), self.lru.clone())
