"""The device pool that SGLang's attention reads and writes, in one tensor for all layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache import hisparse_memory_pool
from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

from hisparse_sgl.kernels.rows import RowFormat
from hisparse_sgl.kernels.translate import translate
from hisparse_sgl.mem_pool.device_pool import DevicePool
from hisparse_sgl.mem_pool.layout import CacheGroup, KVLayout, group_layers


class KVPool(hisparse_memory_pool.HiSparseDSATokenToKVPool):
    """DSA rows on the device and the indexer's keys of every slot.

    SGLang passes slots (its "logical" locations); they become device rows by the residency table, which is
    known from ``attach`` on. Slots of page 0 are padding and stay in page 0.
    """

    # In a tuple: SGLang puts this very class in the place of the one that it replaces, in every module.
    _stock = (hisparse_memory_pool.HiSparseDSATokenToKVPool,)
    resident_page: torch.Tensor | None = None
    kernels: str | None = None

    def _create_buffers(self) -> None:
        pages = self.size // self.page_size + 1
        shape = (self.layer_num, pages * self.page_size, 1, self.kv_cache_dim)
        mem_pool = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.custom_mem_pool else nullcontext()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), mem_pool:
            self.rows = torch.zeros(shape, dtype=self.store_dtype, device=self.device)
        self.kv_buffer = list(self.rows.unbind(0))
        self._written: tuple[Any, torch.Tensor] | None = None

    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        del self.rows

    @property
    def row_bytes(self) -> int:
        return self.kv_cache_dim * self.store_dtype.itemsize

    @property
    def num_pages(self) -> int:
        """Device pages, page 0 included."""
        return self.rows.shape[1] // self.page_size

    def layout(self, shared_index_layers: list[bool] | None) -> KVLayout:
        """What is kept for each token; a layer marked as shared follows the one before it."""
        groups = group_layers([not shared for shared in shared_index_layers or [False] * self.layer_num])
        row = RowFormat.make((self.row_bytes,), self.page_size)
        # The indexer's keys lie in SGLang's own buffer.
        return KVLayout((CacheGroup("kv", self.layer_num, row, groups, 0),), self.page_size)

    def attach(self, resident_page: torch.Tensor, kernels: str | None) -> None:
        """Where slots are from now on: int32 [host pages], device page or 0; and the kernels to ask with."""
        self.resident_page = resident_page
        self.kernels = kernels

    def translate_loc_to_hisparse_device(self, compressed_indices: torch.Tensor) -> torch.Tensor:
        """Device rows int32 of slots of any shape; -1 where a slot is not resident."""
        assert self.resident_page is not None, "a slot was translated before the coordinator was built"
        return translate(compressed_indices, self.resident_page, self.page_size, backend=self.kernels)

    def _translate_loc_to_hisparse_device(self, compressed_indices: torch.Tensor) -> torch.Tensor:
        return self.translate_loc_to_hisparse_device(compressed_indices)

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        rows = self._write_rows(layer, loc_info)
        # Past SGLang's HiSparse pool, which would translate once more.
        super(self._stock[0], self).set_kv_buffer(layer, rows, cache_k, cache_v)

    def set_mla_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        rows = self._write_rows(layer, loc_info)
        super(self._stock[0], self).set_mla_kv_buffer(layer, rows, cache_k_nope, cache_k_rope)

    def _write_rows(self, layer: Any, loc_info: Any) -> torch.Tensor:
        """Device rows int64 of the slots a layer writes, the same in all layers of a forward."""
        loc, _, _ = unwrap_write_loc(loc_info)
        if layer.layer_id == self.start_layer or self._written is None or self._written[0] is not loc:
            # A row that is not resident would be a fault of ours; the null page takes it.
            rows = self.translate_loc_to_hisparse_device(loc).clamp_(min=0).long()
            self._written = (loc, rows)
        return self._written[1]


class BorrowedDevicePool(DevicePool):
    """A ``KVPool``'s rows as the copies and kernels of this package see them."""

    def __init__(self, pool: KVPool, layout: KVLayout) -> None:
        self.layout = layout
        self.num_pages = pool.num_pages
        self._row = layout.host_group.row
        self._buffer = pool.rows.view(torch.uint8).view(pool.layer_num, pool.num_pages, -1)
        self._index_rows = None
