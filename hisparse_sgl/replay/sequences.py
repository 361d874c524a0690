"""The pages a request fills, by block id: its prompt's, then its answer's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from hisparse_sgl.replay.traces import Trace, TraceRequest


class PageIds(NamedTuple):
    """Block ids of the pages of one request.

    ``answer[0]`` is open when the prefill ends; its first ``offset`` tokens belong to the prompt (0 unless
    the next turn is known).
    """

    prompt: Sequence[int]
    answer: list[int]
    offset: int


class Sequences:
    """Page ids of each request of a trace.

    An answer's pages get ids that nobody else has and begin on a new page. Where the trace names the next
    turn, the answer goes on in the prompt's last block and its full blocks have the ids that the next prompt
    calls them by, so that the next turn finds them.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.block_size = trace.block_size
        pages = (self._shape(request)[2] for request in trace.requests)
        self.first_fresh = [*accumulate(pages, initial=trace.num_blocks)]

    @property
    def num_pages(self) -> int:
        """Pages of all requests, shared ones counted each time."""
        fresh = self.first_fresh[-1] - self.trace.num_blocks
        return fresh + sum(len(request.blocks) for request in self.trace.requests)

    @property
    def most_pages(self) -> int:
        """Pages of the longest request."""
        shapes = map(self._shape, self.trace.requests)
        return max(prompt + answer for prompt, _, answer in shapes)

    @property
    def most_prompt_pages(self) -> int:
        """Blocks of the longest prompt."""
        return max(len(request.blocks) for request in self.trace.requests)

    def of(self, index: int) -> PageIds:
        """The page ids of request ``index``."""
        request = self.trace.requests[index]
        prompt, offset, num_answer = self._shape(request)
        known: list[int] = []
        if request.next_turn is not None:
            after = self.trace.requests[request.next_turn]
            ends = min(request.input_tokens + request.output_tokens, after.input_tokens) // self.block_size
            known = list(after.blocks[prompt:ends])[:num_answer]
        first = self.first_fresh[index]
        fresh = range(first, first + num_answer - len(known))
        return PageIds(request.blocks[:prompt], [*known, *fresh], offset)

    def cached_tokens(self, index: int, cached_pages: int) -> int:
        """Prompt and answer tokens in the first ``cached_pages`` pages of a request."""
        request = self.trace.requests[index]
        prompt, offset, _ = self._shape(request)
        beyond = max(0, cached_pages - prompt)
        if beyond:
            return request.input_tokens - offset + beyond * self.block_size
        return self.prompt_tokens(index, cached_pages)

    def prompt_tokens(self, index: int, num_blocks: int) -> int:
        """Tokens in the first ``num_blocks`` blocks of a prompt."""
        request = self.trace.requests[index]
        if request.block_tokens is not None:
            return sum(request.block_tokens[:num_blocks])
        return min(num_blocks * self.block_size, request.input_tokens)

    def _shape(self, request: TraceRequest) -> tuple[int, int, int]:
        """Pages of the prompt, prompt tokens in the answer's first page, pages of the answer."""
        prompt, offset = len(request.blocks), 0
        if request.next_turn is not None:
            prompt, offset = divmod(request.input_tokens, self.block_size)
        return prompt, offset, -(-(offset + max(1, request.output_tokens)) // self.block_size)
