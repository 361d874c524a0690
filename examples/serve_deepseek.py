"""Serves a small `deepseek_v32` model through the pool and checks every answer against the model alone."""

from __future__ import annotations

import sys

from options import parse

if __name__ == "__main__":
    options = parse(__doc__)
    # Not at the top: what these import reads the environment that `parse` sets.
    from serving import serve
    from tiny_models import deepseek_config

    sys.exit(serve(deepseek_config(), options))
