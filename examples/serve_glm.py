"""Serves a small `glm_moe_dsa` model, whose layers share indexers, through the pool and checks every
answer."""

from __future__ import annotations

import sys

from options import parse

if __name__ == "__main__":
    options = parse(__doc__)
    # Not at the top: what these import reads the environment that `parse` sets.
    from serving import serve
    from tiny_models import glm_config

    sys.exit(serve(glm_config(), options))
