"""KV events, with the field names and order of SGLang's and vLLM's own events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MEDIUM = "CPU"


def event_hash(page_hash: bytes) -> int:
    """Shorten a page hash to the signed 64-bit integer of SGLang's events: its first 8 bytes, big-endian."""
    return int.from_bytes(page_hash[:8], "big", signed=True)


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages that joined the tree, a chain below `parent_block_hash` (None at the root).

    `token_ids` are the tokens of all the blocks in order, empty when the publisher did not know them.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages that left the tree by eviction."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The tree was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Holds the newest `max_events` events until the publisher takes them.

    A full log drops its oldest event and counts it in `dropped`; a consumer that sees the counter move must
    start from an empty view. A disabled log keeps nothing.
    """

    def __init__(self, enabled: bool = False, max_events: int = 65536) -> None:
        if max_events < 1:
            raise ValueError(f"max_events={max_events} must be at least 1; disable the log instead")
        self.enabled = enabled
        self.dropped = 0
        self._events: deque[KVEvent] = deque(maxlen=max_events)

    def append(self, event: KVEvent) -> None:
        """Add an event when the log is enabled."""
        if not self.enabled:
            return
        if len(self._events) == self._events.maxlen:
            self.dropped += 1
        self._events.append(event)

    def take(self) -> list[KVEvent]:
        """Return the events since the last call, oldest first, and forget them."""
        events = list(self._events)
        self._events.clear()
        return events

    def __len__(self) -> int:
        return len(self._events)
