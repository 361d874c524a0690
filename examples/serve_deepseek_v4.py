"""Serves a small `deepseek_v4` model, whose rows stand for 4 or 128 tokens, through the pool and checks every
answer."""

from __future__ import annotations

import sys

from options import V4, parse

if __name__ == "__main__":
    options = parse(__doc__, shape=V4)
    # Not at the top: what these import reads the environment that `parse` sets.
    from serving import serve
    from tiny_models import deepseek_v4_config

    from hisparse_sgl.integrations import deepseek_v4

    sys.exit(serve(deepseek_v4_config(), options, deepseek_v4))
