"""SGLang's view of the slots: it allocates by batch, frees by slot and asks what there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator import hisparse
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from hisparse_sgl.transfers import upload

if TYPE_CHECKING:
    from hisparse_sgl.integrations.sglang.coordinator import Coordinator
    from hisparse_sgl.integrations.sglang.lifecycle import Lifecycle


class Allocator(hisparse.HiSparseTokenToKVPoolAllocator):
    """Slots of host pages. A slot id is the row of its token in host memory and of its indexer key.

    The free lists lie on the CPU, and so do the values of the tree, which asks ``device`` where to keep
    them: nothing here waits for the GPU. Device pages are no part of the sizes: eviction frees host pages,
    and admission asks for the device on its own (``PrefillAdder``).
    """

    coordinator: Coordinator | None = None

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: Any,
        kvcache: Any,
        need_sort: bool,
        host_to_device_ratio: int = 2,
    ) -> None:
        # The base class builds two allocators with their lists on the device; none of it is used here.
        self._kvcache = kvcache
        self._size_full = int(size * host_to_device_ratio) // page_size * page_size
        self._size_hisparse = size
        self.compress_ratio = 1
        self.dtype = dtype
        self.device = "cpu"
        self.slots_device = torch.device(device)
        self.page_size = page_size
        self.need_sort = need_sort
        self.free_pages = None
        self.release_pages = None
        self.free_group = None

    def attach(self, coordinator: Coordinator) -> None:
        """Who owns the pages from now on."""
        self.coordinator = coordinator

    @property
    def lifecycle(self) -> Lifecycle:
        assert self.coordinator is not None, "the allocator was used before the coordinator was built"
        return self.coordinator.lifecycle

    def available_size(self) -> int:
        return self._size_full if self.coordinator is None else self.lifecycle.available_tokens

    def alloc(self, need_size: int) -> torch.Tensor | None:
        raise NotImplementedError("slots are allocated by batch: alloc_extend and alloc_decode")

    def alloc_logical_only(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        raise NotImplementedError("speculative decoding and PD disaggregation are refused at start-up")

    def alloc_device_buffer(self, allocated_indices: torch.Tensor, need_size: int) -> torch.Tensor:
        raise NotImplementedError("hot regions are given by the coordinator")

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Slots int64 of a prefill batch, whose rows ``allocate_spec_scratch`` was told."""
        assert self.coordinator is not None
        slots = self.coordinator.extend(seq_lens_cpu.tolist())
        assert slots is None or len(slots) == extend_num_tokens, (len(slots), extend_num_tokens)
        return None if slots is None else upload(slots, torch.int64, self.slots_device)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Slots int64 of a decode step, prepared by ``prepare_decode``."""
        assert self.coordinator is not None
        slots = self.coordinator.take_decode_slots()
        assert len(slots) == len(seq_lens_cpu), f"{len(slots)} slots for a batch of {len(seq_lens_cpu)}"
        return slots

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return None
        shortfall = num_tokens - self.available_size()
        if shortfall > 0:
            tree_cache.evict_for_alloc(EvictParams(num_tokens=shortfall))
        return None

    def request_slot_reserve(self, *, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        return 0  # a hot region is no part of an admission

    def get_extend_allocation_demand(
        self,
        prefix_lens_cpu: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        *,
        conservative_num_tokens: int,
        shard_size: int,
    ) -> int:
        return 0  # alloc_extend evicts exactly what it lacks

    def check_decode_capacity(
        self,
        *,
        num_tokens: int,
        tree_cache: Any,
        requests: Sequence[Any] | None = None,
        spec_algorithm: Any = None,
    ) -> bool:
        assert self.coordinator is not None and requests is not None
        return self.coordinator.can_decode(requests)

    def max_new_tokens_for_memory(
        self, input_tokens: int, max_new_tokens: int, *, token_capacity: int, **kwargs: Any
    ) -> int | None:
        """Clip an answer to what one request can hold; None: the prompt alone is too long."""
        limit = min(token_capacity, self.lifecycle.longest_request)
        if input_tokens >= limit:
            return None
        return min(max_new_tokens, limit - input_tokens)

    def free(self, free_index: torch.Tensor) -> None:
        """Free the pages of these slots. Those of the tree lie on the CPU."""
        pages = torch.unique_consecutive(free_index // self.page_size).tolist()
        self.lifecycle.pages.free(pages)

    def free_hisparse(self, free_indices: torch.Tensor) -> None:
        """Device pages go with their host pages."""

    def free_hisparse_indices(self, buffer_indices: torch.Tensor) -> None:
        """Device pages go with their host pages."""

    def clear(self) -> None:
        self.lifecycle.clear()
