"""Bytes of the tensors in ``state.py``, for those who plan with them: imports no torch."""

from __future__ import annotations

KEY_BYTES = 4  # int32
ORDER_BYTES = 2  # int16
HINT_BYTES = 2  # int16


def hot_state_bytes(hot_rows: int, context: int, groups: int) -> int:
    """Bytes of a ``HotState`` for one region of ``hot_rows`` rows, contexts of that many positions, and
    ``groups`` index groups."""
    return groups * (hot_rows * (KEY_BYTES + ORDER_BYTES) + context * HINT_BYTES)
