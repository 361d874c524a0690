"""Whether a request can be let in: rows, host pages, device pages, each its own budget (rules 6 and 10)."""

from __future__ import annotations

from collections.abc import Mapping

from hisparse_sgl.config import ACTIVE_TAIL_PAGES, HiSparseConfig, Sizes
from hisparse_sgl.mem_pool.allocator import TokenToKVAllocator
from hisparse_sgl.pages import Pages
from hisparse_sgl.radix.tree import Match, PrefixTree
from hisparse_sgl.requests import Request
from hisparse_sgl.residency import Residency


class AdmissionControl:
    """Answers what an admission lacks. To make room it evicts prefixes and gives hot regions, no more."""

    def __init__(
        self,
        config: HiSparseConfig,
        sizes: Sizes,
        allocator: TokenToKVAllocator,
        tree: PrefixTree,
        pages: Pages,
        residency: Residency,
    ) -> None:
        self.config = config
        self.sizes = sizes
        self.allocator = allocator
        self.tree = tree
        self.pages = pages
        self.residency = residency
        self.step_pages = self._num_pages(config.query_rows)

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raise ``ValueError`` for a prompt that this pool can never hold."""
        if prompt_tokens < 1:
            raise ValueError("token_ids is empty, the limit is at least 1 token: pass the prompt")
        if prompt_tokens > self.config.context_len:
            raise ValueError(
                f"token_ids holds {prompt_tokens} tokens, the limit is context_len {self.config.context_len}"
                ": shorten the prompt or raise context_len"
            )

    def is_hot(self, prompt_tokens: int) -> bool:
        """The prompt does not fit on the device beside a hot region: it can only be computed out of one."""
        return self._num_pages(prompt_tokens) > self.config.device_pages - 1 - self.sizes.hot_pages

    def lacks(self, match: Match, prompt_tokens: int, requests: Mapping[str, Request]) -> str | None:
        """What there is too little of; None if the request can be let in now."""
        if len(requests) == self.config.max_requests:
            return "request rows"
        if self._over_window(prompt_tokens, requests):
            return "admission window"
        new = self._num_pages(prompt_tokens) - len(match.pages)
        if not self.make_host_room(new):
            return "host pages"
        while True:  # giving hot regions can take pages of this very prefix, and the last region
            if self.is_hot(prompt_tokens) and not self.residency.free_regions:
                return "device pages"
            target = self._device_pages(match, prompt_tokens, requests)
            if self.residency.available >= target:
                return None
            if not self.residency.relieve(target, requests.values()):
                return "device pages"

    def make_host_room(self, pages: int) -> bool:
        """Evict prefixes until ``pages`` host pages are free and not promised; False if that cannot be."""

        def missing() -> int:
            return pages + self.residency.promised_host - self.allocator.num_free

        while 0 < missing() <= self.tree.num_evictable:
            self.pages.free(self.tree.evict(missing()))
        return missing() <= 0

    def _device_pages(self, match: Match, prompt_tokens: int, requests: Mapping[str, Request]) -> int:
        """Device pages that must be available: besides its own, room for the others to go on.

        That is a step of each, and the next hot region. Whoever waits for one when a large prompt takes its
        own would have to wait until that has ended.
        """
        room = self.step_pages * len(requests) + self.sizes.hot_pages
        if not self.is_hot(prompt_tokens):
            new = self._num_pages(prompt_tokens) - len(match.pages)
            return new + self.residency.cost(match.pages) + room
        tail = match.pages[-ACTIVE_TAIL_PAGES:]
        if any(map(self._outgrows, requests.values())):
            room += self.sizes.hot_pages
        return ACTIVE_TAIL_PAGES + self.step_pages - len(tail) + self.residency.cost(tail) + room

    def _outgrows(self, request: Request) -> bool:
        """The request cannot take a step more without a hot region."""
        most = self.sizes.hot_pages + ACTIVE_TAIL_PAGES
        return not request.hot_pages and len(request.pages) + request.promised + self.step_pages > most

    def _over_window(self, prompt_tokens: int, requests: Mapping[str, Request]) -> bool:
        window = self.config.admission_window
        if window is None or self.is_hot(prompt_tokens):
            return False
        unsettled = sum(r.prompt_tokens for r in requests.values() if r.prefilling and not r.hot_pages)
        return unsettled > 0 and unsettled + prompt_tokens > window

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self.sizes.page_size)
