"""The requests that wait: whether one has room on the device, and when to ask again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hisparse_sgl.integrations.sglang.lifecycle import Lifecycle


class Admission:
    """Answers ``adder.py`` in SGLang's scheduler.

    Nobody is asked about after an answer of no until something has changed that it depends on: to look for
    the prefix of a waiting request in each step takes half as long as the step.
    """

    def __init__(self, lifecycle: Lifecycle, tree: Any) -> None:
        self.lifecycle = lifecycle
        self.tree = tree
        self.asked: tuple[Any, list[int]] = None, []  # last asked for room, and its prefix
        self.deferred_at: tuple[Any, ...] | None = None  # ``_room`` when a request was deferred
        self.full_at: int | None = None  # ``host_room`` when SGLang found too little for a request
        self.queued = (0, "")  # how many wait, and the id of the last one

    @property
    def is_waiting(self) -> bool:
        """A request was deferred, and nothing has changed since."""
        return self.deferred_at is not None

    def has_room(self, req: Any) -> bool:
        """Whether a waiting request, whose prefix is locked, can be on the device as a whole.

        Clients choose ids, and those of two tokenizers may be alike: the second request waits for the first.
        """
        life, tokens, cached = self.lifecycle, len(req.full_untruncated_fill_ids), req.prefix_len
        prefix: list[int] = []
        room = req.rid not in life.requests and life.has_room_beside(cached // life.page_size, tokens)
        if room:
            prefix = self.tree.prefix_pages(req)
            room = life.has_room(prefix, tokens)
        self.asked = req, prefix
        self.deferred_at = None if room else self._room()
        life.counters.deferred_admissions += not room
        return room

    def admit(self, req: Any) -> None:
        """The request is in the next prefill batch: pin its prefix, start to restore what is missing.

        ``has_room`` was just asked about it, and its prefix is locked since.
        """
        (asked, prefix), self.asked = self.asked, (None, [])
        cached = len(prefix) * self.lifecycle.page_size
        assert asked is req and cached == req.prefix_len, (req.rid, cached, req.prefix_len)
        self.lifecycle.admit(req.rid, req, prefix, len(req.full_untruncated_fill_ids))

    def host_is_full(self) -> None:
        """SGLang found too few host pages for a request, and asks about none until one has left."""
        self.full_at = self.lifecycle.host_room

    def may_have_room(self, queue: Sequence[Any]) -> bool:
        """Whether one of the queued requests may find room now that there was none for."""
        self.queued = len(queue), queue[-1].rid if queue else ""
        changed = self.deferred_at is not None and (not queue or self.deferred_at != self._room())
        changed |= self.full_at is not None and (not queue or self.full_at < self.lifecycle.host_room)
        if changed:
            self.deferred_at = self.full_at = None
        return changed

    def _room(self) -> tuple[Any, ...]:
        """As long as this stays the same, so do the answers of ``has_room``."""
        return *self.queued, self.tree.num_inserts, *self.lifecycle.room()
