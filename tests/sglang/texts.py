"""What requests say: token ids and, for each position, a number that stands for all of the text so far.

The generated part is a function of the prompt, of the tenant key and of a salt (the seed of the sampling), so
it is known whenever it is asked for. The number of a position does not depend on the salt: equal texts of a
tenant are equal rows, whoever computed them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STOP = 1  # the token that ends an answer
MASK = (1 << 62) - 1


def mix(number: int, value: int) -> int:
    number = (number ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    return number ^ number >> 29


class Text:
    """The text of one request: ``tokens[p]`` and ``numbers[p]``; grows as far as it is asked for."""

    def __init__(self, prompt: Sequence[int], tenant: str | None, salt: int, stop_every: int) -> None:
        self.num_prompt = len(prompt)
        self.salt = salt
        self.stop_every = stop_every
        self.tokens: list[int] = []
        self.numbers: list[int] = []
        self.seed = sum(map(ord, tenant or "")) + 1
        for token in prompt:
            self._append(token)

    def token(self, position: int) -> int:
        self.grow(position + 1)
        return self.tokens[position]

    def grow(self, length: int) -> None:
        while len(self.tokens) < length:
            draw = mix(self.numbers[-1], self.salt)
            self._append(STOP if draw % self.stop_every == 0 else 2 + draw // self.stop_every % 40)

    def slice(self, start: int, end: int) -> np.ndarray:
        """int64 [end - start]: the numbers of positions [start, end)."""
        self.grow(end)
        return np.array(self.numbers[start:end], dtype=np.int64)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.numbers.append(mix(self.numbers[-1] if self.numbers else self.seed, token))


def rows(numbers: np.ndarray, layer: int, words: int) -> np.ndarray:
    """int64 [n, words]: the bytes of the rows of these positions in a layer."""
    factors = (2 * np.arange(1, words + 1, dtype=np.int64) + 1) * (0x9E3779B1 + 2 * layer)
    return numbers[:, None] * factors + layer
