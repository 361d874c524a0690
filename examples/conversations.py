"""Conversations of two turns over one long system prompt, cut from the help texts that ship with Python."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pydoc_data.topics import topics

SYSTEM_TOKENS = 160
LARGEST_CONTEXT = 768
ANSWER_TOKENS = 24
_FIRST_QUESTION = (280, 400)  # fewest and most tokens
_SECOND_QUESTION = (48, 80)


@dataclass(eq=False)
class Request:
    """One turn. `tokens` are the greedy tokens so far; `abort_at` and `retract_at` count them (0: never)."""

    rid: str
    prompt: list[int]
    num_tokens: int
    follow_up: list[int] | None = None
    abort_at: int = 0
    retract_at: int = 0
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    cached_tokens: int = 0
    shortened_tokens: int = 0  # cached ones that could not be used, for want of a state
    hot: bool = False  # too large for the device: its prompt goes through the hot region, a token a step
    aborted: bool = False

    @property
    def context(self) -> list[int]:
        """Prompt and answer so far: what a prefill computes after an admission or a retraction."""
        return self.prompt + self.tokens

    @property
    def is_prefilling(self) -> bool:
        """More has to be computed than the newest token of the answer."""
        return not self.tokens or len(self.context) - self.num_computed > 1


def encode(text: str) -> list[int]:
    """One token a UTF-8 byte."""
    return list(text.encode())


def first_turns(num_requests: int, page_size: int, seed: int) -> list[Request]:
    """First turns of enough conversations for `num_requests` requests, of which one is aborted and one
    retracted.

    The first answer ends where its last page is sealed, so that the request finishes while a copy is in
    flight.
    """
    texts = random.Random(seed)
    system = _cut("Answer questions about Python from these notes.\n" + topics["assignment"], SYSTEM_TOKENS)
    follow_ups = (num_requests - 1) // 2  # the last conversation, which is aborted, has none
    requests = []
    for number in range(num_requests - follow_ups):
        question = _question(texts, "Explain", _FIRST_QUESTION)
        follow_up = _question(texts, "And this?", _SECOND_QUESTION) if number < follow_ups else None
        requests.append(Request(f"c{number}t0", system + question, ANSWER_TOKENS, follow_up))
    # The last token of an answer is never an input, so it has no row.
    requests[0].num_tokens += -(len(requests[0].prompt) + ANSWER_TOKENS - 1) % page_size
    requests[-1].abort_at = ANSWER_TOKENS // 2
    requests[1].retract_at = ANSWER_TOKENS // 3
    return requests


def next_turn(request: Request) -> Request | None:
    """The second turn of a finished first turn: all of the conversation so far and a new question."""
    if request.follow_up is None:
        return None
    return Request(request.rid[:-1] + "1", request.context + request.follow_up, ANSWER_TOKENS)


def _question(texts: random.Random, opening: str, size: tuple[int, int]) -> list[int]:
    topic = texts.choice(sorted(topics))
    text = f"\nUser: {opening} {topic}. " + topics[topic] * size[1]
    return _cut(text, texts.randint(*size)) + encode("\nBot: ")


def _cut(text: str, num_tokens: int) -> list[int]:
    return encode(text[:num_tokens])[:num_tokens]
