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

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raise ``ValueError`` for a prompt that this pool can never hold."""
        if not 1 <= prompt_tokens <= self.config.context_len:
            raise ValueError(
                f"token_ids holds {prompt_tokens} tokens, it must be between 1 and context_len "
                f"{self.config.context_len}: shorten the prompt or raise context_len"
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
        needed, pinned = new, match.pages
        if self.is_hot(prompt_tokens):
            pinned = match.pages[-ACTIVE_TAIL_PAGES:]
            needed = ACTIVE_TAIL_PAGES + 1 - len(pinned)  # a tail, and the page that moves it on
        # Room for a hot region, its own or that of another, and a page for each request keeps all going.
        needed += self.sizes.hot_pages + len(requests)
        while True:  # giving hot regions can unpin or reuse pages of this very prefix
            target = needed + self.residency.cost(pinned)
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

    def _over_window(self, prompt_tokens: int, requests: Mapping[str, Request]) -> bool:
        window = self.config.admission_window
        if window is None or self.is_hot(prompt_tokens):
            return False
        unsettled = sum(r.prompt_tokens for r in requests.values() if r.prefilling and not r.hot_pages)
        return unsettled > 0 and unsettled + prompt_tokens > window

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self.sizes.page_size)
