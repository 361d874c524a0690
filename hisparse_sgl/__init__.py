"""A host-backed KV memory pool with a radix prefix cache for sparse-attention models.

The public names resolve on first use, so that importing a part of the package that needs no torch (the
coordinator, the block pool, the prefix tree) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hisparse_sgl.config import HiSparseConfig
    from hisparse_sgl.kernels.rows import RowFormat
    from hisparse_sgl.mem_pool.layout import CacheGroup, IndexGroup, KVLayout, StateGroup
    from hisparse_sgl.pool import HiSparsePool
    from hisparse_sgl.requests import Admission, Deferred

    __version__: str

__all__ = [
    "Admission",
    "CacheGroup",
    "Deferred",
    "HiSparseConfig",
    "HiSparsePool",
    "IndexGroup",
    "KVLayout",
    "RowFormat",
    "StateGroup",
]

_HOMES = {
    "Admission": "hisparse_sgl.requests",
    "CacheGroup": "hisparse_sgl.mem_pool.layout",
    "Deferred": "hisparse_sgl.requests",
    "HiSparseConfig": "hisparse_sgl.config",
    "HiSparsePool": "hisparse_sgl.pool",
    "IndexGroup": "hisparse_sgl.mem_pool.layout",
    "KVLayout": "hisparse_sgl.mem_pool.layout",
    "RowFormat": "hisparse_sgl.kernels.rows",
    "StateGroup": "hisparse_sgl.mem_pool.layout",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("hisparse-sgl")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
