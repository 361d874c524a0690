"""What the pool must answer: a plain record of every row written and of who may share it.

Each token written gets a number of its own. The bytes of a row in each layer are the number of its last
token, the layer's and, where a row has two parts, the number again: a wrong row says what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hisparse_sgl.radix.page_hash import ExtraKey

Prefix = tuple[ExtraKey, tuple[int, ...]]  # tenant key, all tokens up to the end of a page


class WrongBytes(AssertionError):
    """A reader was given other bytes than were written."""


@dataclass(eq=False)
class Record:
    """One request as its owner knows it: ``writes[p]`` is the number of the row written at position p."""

    rid: str
    tenant: ExtraKey
    tokens: list[int]
    num_tokens: int
    num_prompt: int
    tells: str  # when the owner tells the pool of generated tokens: "before", "after", "seldom" or "never"
    known: int = 0  # tokens that the pool was told
    unwritten: list[int] = field(default_factory=list)  # slots handed out, whose rows no forward wrote yet
    may_publish: bool = True
    writes: list[int] = field(default_factory=list)


class Oracle:
    """Rows by number, and the prefixes that may be found."""

    def __init__(self, num_layers: int, num_slots: int, page_size: int, columns: int = 2) -> None:
        self.num_layers = num_layers
        self.columns = columns
        self.page_size = page_size
        self.last_write = np.full(num_slots, -1, dtype=np.int64)
        self.next_write = 1
        self.shareable: dict[
            tuple[int, ...], Prefix
        ] = {}  # numbers of a page's tokens -> what they stand for
        self.kept: dict[
            tuple[int, ...], Prefix
        ] = {}  # the same -> the state that was handed over for its end

    def write(self, record: Record, slots: Sequence[int]) -> np.ndarray:
        """Number the rows that a request writes behind the ones it has."""
        numbers = np.arange(self.next_write, self.next_write + len(slots))
        self.next_write += len(slots)
        self.last_write[list(slots)] = numbers
        record.writes += numbers.tolist()
        return numbers

    def rows(self, numbers: np.ndarray, layer: int) -> np.ndarray:
        """int64 [n, columns]: the bytes of those rows in a layer."""
        return np.stack([numbers, np.full_like(numbers, layer + 1), -numbers][: self.columns], axis=-1)

    def compare(self, what: str, found: np.ndarray, numbers: np.ndarray) -> None:
        """``found`` int64 [layers, n, columns] must be the rows ``numbers`` [n] of all layers."""
        for layer in range(self.num_layers):
            self.compare_layer(what, found[layer], numbers, layer)

    def compare_layer(self, what: str, found: np.ndarray, numbers: np.ndarray, layer: int) -> None:
        expected = self.rows(numbers, layer)
        if not np.array_equal(found, expected):
            at = int((found != expected).any(-1).nonzero()[0][0])
            raise WrongBytes(f"{what}, layer {layer}, entry {at}: {found[at]} instead of {expected[at]}")

    def settle(self, record: Record) -> None:
        """The whole pages of a request that are written and whose tokens the pool knows may be shared."""
        if not record.may_publish:
            return
        size = self.page_size
        for end in range(size, min(len(record.writes), record.known) + 1, size):
            page = tuple(record.writes[end - size : end])
            if page not in self.shareable:
                self.shareable[page] = (record.tenant, tuple(record.tokens[:end]))

    def rewind(self, record: Record, num_tokens: int) -> None:
        """Positions from ``num_tokens`` on are void, with the rows written there and their tokens."""
        size = self.page_size
        for end in range((num_tokens // size + 1) * size, len(record.writes) + 1, size):
            self.shareable.pop(tuple(record.writes[end - size : end]), None)
        if num_tokens < record.num_tokens:
            record.known = min(record.known, num_tokens)
            del record.tokens[num_tokens:]
        del record.unwritten[max(0, num_tokens - len(record.writes)) :]
        del record.writes[num_tokens:]
        record.num_tokens = num_tokens

    def forbid(self, record: Record, kept: set[tuple[int, ...]]) -> None:
        """Nothing more of a request may be published than the pages ``kept``."""
        size = self.page_size
        for end in range(size, len(record.writes) + 1, size):
            page = tuple(record.writes[end - size : end])
            if page not in kept:
                self.shareable.pop(page, None)
        record.may_publish = False

    def forbid_all(self, records: Iterable[Record]) -> None:
        self.shareable.clear()
        for record in records:
            record.may_publish = False

    def page_writes(self, page: int) -> tuple[int, ...]:
        """Numbers of the rows last written to a host page."""
        first = page * self.page_size
        return tuple(self.last_write[first : first + self.page_size].tolist())
