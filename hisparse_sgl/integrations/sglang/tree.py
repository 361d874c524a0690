"""SGLang's radix tree behind a publication gate: only durable pages enter it, and all it holds is durable.

SGLang asks for a checkpoint when a prefill step or a request ends. A running request is published up to its
last checkpoint as soon as the copies of all pages before it are through. A request that ends with copies in
flight leaves its pages with a ``Publication``, which enters the tree when the last copy is through.

Values of the tree are slots on the CPU, so eviction waits for no GPU.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache

if TYPE_CHECKING:
    from hisparse_sgl.integrations.sglang.lifecycle import Lifecycle, ServedRequest


HIGHEST_PRIORITY = torch.iinfo(torch.int64).max
"""The Rust core of the tree keeps priorities in 64 bits."""


@dataclass(slots=True, eq=False)
class Publication:
    """Pages of a request that has ended: the first ``start`` are the tree's, the others its own."""

    key: RadixKey
    pages: list[int]
    start: int
    prompt_tokens: int
    params: dict[str, Any]
    lock: Any  # on the node where the tree's part ends


class GatedRadixCache(unified_radix_cache.UnifiedRadixCache):
    """``UnifiedRadixCache`` with SGLang's Rust or Python core, for the pages of a ``Lifecycle``."""

    def __init__(self, params: Any) -> None:
        self.lifecycle: Lifecycle = params.token_to_kv_pool_allocator.lifecycle
        self.open: dict[str, tuple[Any, int]] = {}  # running request and the tokens it may publish
        self.detached: deque[Publication] = deque()
        self.num_inserts = 0
        self._values: list[int] | None = None
        super().__init__(params)
        self.lifecycle.evict = self._evict_pages
        self.lifecycle.give_up = self._give_up
        self.lifecycle.evictable_pages = lambda: self.evictable_size() // self.page_size
        params.token_to_kv_pool_allocator.coordinator.attach_tree(self)

    def prefix_pages(self, req: Any) -> list[int]:
        """Host pages of the prefix that the request matched."""
        slots = self.tree_core.collect_full_device_indices(
            req.last_node, self.root_node_handle(req.extra_key)
        )
        return (slots[: req.prefix_len : self.page_size] // self.page_size).tolist()

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """SGLang wants the first ``up_to`` tokens in the tree; they enter it when they are durable."""
        if self.disable:
            return
        request = self.lifecycle.requests[req.rid]
        if req.finished():
            self.open.pop(req.rid, None)
            if not isinstance(req.finished_reason, FINISH_ABORT):
                self._publish(req, request, min(up_to, request.num_settled) // self.page_size)
        else:
            self.open[req.rid] = (req, up_to // self.page_size * self.page_size)

    @property
    def is_waiting(self) -> bool:
        """Something is to be published as soon as its copies are through."""
        return bool(self.open or self.detached)

    def publish(self) -> None:
        """Put into the tree what has become durable."""
        for rid, (req, tokens) in list(self.open.items()):
            request = self.lifecycle.requests[rid]
            if self.lifecycle.num_durable(request) * self.page_size >= tokens:
                del self.open[rid]
                self._publish_running(req, tokens)
        while self.detached and self._is_durable(self.detached[0]):
            self._insert(self.detached.popleft())

    def publish_retracted(self, req: Any, request: ServedRequest) -> None:
        """Publish what is durable of a request that is taken back, unless SGLang bars it from the tree."""
        self.open.pop(req.rid, None)
        if not (self.disable or req.skip_radix_cache_insert):
            req.refresh_fill_ids()
            self._publish(req, request, self.lifecycle.num_durable(request))

    def insert(self, params: InsertParams) -> Any:
        """As SGLang's, with slots that the CPU knows in place of those it read from the GPU."""
        self.num_inserts += 1
        if self._values is not None:
            tokens = len(params.key) // self.page_size * self.page_size
            params.value = torch.from_numpy(self.lifecycle.allocator.slots(self._values, 0, tokens))
        return super().insert(params)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Free the pages of these positions of a request, which needs nothing on the device any more."""
        request = self.lifecycle.rows[kv.req_pool_idx]
        self.lifecycle.release(request)
        spans = [range(start // self.page_size, -(-end // self.page_size)) for start, end in ranges]
        indices = dict.fromkeys(index for span in spans for index in span)
        self.lifecycle.pages.free([request.pages[index] for index in indices])

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self.open.pop(req.rid, None)
        self.lifecycle.forget(req.rid)

    def reset(self) -> None:
        """Forget every prefix and all that waits to be published; ``Lifecycle.clear`` frees the pages."""
        self.open.clear()
        self.detached.clear()
        super().reset()

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        return self._on_device(super().prefix_device_indices(req))

    def path_device_indices(self, node: Any) -> torch.Tensor:
        return self._on_device(super().path_device_indices(node))

    def _on_device(self, slots: torch.Tensor) -> torch.Tensor:
        where = self.req_to_token_pool.req_to_token.device
        return slots if slots.device == where else slots.pin_memory().to(where, non_blocking=True)

    def _publish_running(self, req: Any, tokens: int) -> None:
        request = self.lifecycle.requests[req.rid]
        if tokens <= req.kv.cache_protected_len or self._is_taken(req, tokens):
            return
        self._values = request.pages
        try:
            self.checkpoint_into_tree(req, up_to=tokens)
        finally:
            self._values = None

    def _is_taken(self, req: Any, tokens: int) -> bool:
        """Another request published the same tokens first: this one keeps its copy until it ends."""
        key = RadixKey(req.full_untruncated_fill_ids[:tokens], req.extra_key, cache_salt=req.cache_salt)
        return self.match_prefix(MatchPrefixParams(key=key)).device_prefix_len > req.kv.cache_protected_len

    def _publish(self, req: Any, request: ServedRequest, count: int) -> None:
        """Hand the first ``count`` pages of a request that ends over, to the tree or to a publication."""
        size = self.page_size
        start = req.kv.cache_protected_len // size
        if count <= start:
            return
        publication = Publication(
            key=RadixKey(
                req.full_untruncated_fill_ids[: count * size], req.extra_key, cache_salt=req.cache_salt
            ),
            pages=request.pages[:count],
            start=start,
            prompt_tokens=len(req.origin_input_ids),
            params={
                "inserted_len": req.kv.cache_inserted_len,
                "priority": req.priority or 0,
                "session_id": req.session_id,
            },
            lock=self.lock(req.last_node),
        )
        req.kv.cache_protected_len = count * size
        if self._is_durable(publication):
            self._insert(publication)
        else:
            self.lifecycle.counters.detached_publications += 1
            self.detached.append(publication)

    def _is_durable(self, publication: Publication) -> bool:
        return all(map(self.lifecycle.pages.is_durable, publication.pages[publication.start :]))

    def _insert(self, publication: Publication) -> None:
        """Give a publication's pages to the tree, which frees those it has already."""
        self._values = publication.pages
        try:
            prev = publication.start * self.page_size
            self.insert(InsertParams(key=publication.key, prev_prefix_len=prev, **publication.params))
            self._split_at_prompt(publication)
        finally:
            self._values = None
            self.unlock(publication.lock)

    def _split_at_prompt(self, publication: Publication) -> None:
        """As SGLang does: an answer can be evicted without its prompt."""
        tokens = publication.prompt_tokens // self.page_size * self.page_size
        if 0 < tokens < len(publication.key):
            params = publication.params | {
                "inserted_len": tokens,
                "priority": min(publication.params["priority"] + 1, HIGHEST_PRIORITY),
            }
            self.insert(InsertParams(key=publication.key[:tokens], prev_prefix_len=tokens, **params))

    def _evict_pages(self, pages: int) -> int:
        if self.disable:
            return 0
        freed = self.evict(EvictParams(num_tokens=pages * self.page_size)).num_tokens_evicted
        return freed // self.page_size

    def _give_up(self) -> bool:
        if not self.detached:
            return False
        publication = self.detached.popleft()
        self.lifecycle.pages.free(publication.pages[publication.start :])
        self.unlock(publication.lock)
        return True


def make_tree(ctx: Any) -> Any:
    """SGLang's factory for ``--radix-cache-backend hisparse``."""
    return create_unified_radix_cache(ctx, cache_class=GatedRadixCache)
