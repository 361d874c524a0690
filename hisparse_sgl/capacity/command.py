"""The commands ``plan`` and ``config``."""

from __future__ import annotations
