"""Lets the tests import the examples as the scripts import each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; install the extra 'transformers'")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
