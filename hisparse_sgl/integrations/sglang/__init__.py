"""SGLang plugin: HiSparse together with the radix cache.

SGLang finds ``register`` through the entry point group ``sglang.srt.plugins`` and calls it in each of its
processes. Importing this package imports neither torch nor SGLang.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)

SWITCH = "HISPARSE_SGL"
"""Environment variable; 0 leaves SGLang as it is."""


def register() -> None:
    """Register the hooks of the plugin with SGLang; calling it again changes nothing.

    The hooks act only under ``--enable-hisparse``. The flags are not known yet when SGLang calls this, so
    what stands against the plugin is kept, and reported when a server wants HiSparse.
    """
    if os.environ.get(SWITCH, "1").strip() == "0":
        logger.info("hisparse_sgl is switched off by %s=0", SWITCH)
        return
    from hisparse_sgl.integrations.sglang import hooks

    hooks.register()
