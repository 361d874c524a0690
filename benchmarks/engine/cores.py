"""Keep the busy threads of a server, and of the client, on cores of their own.

Steps of one server take up to half as long again in some runs as in others, more than engines differ. The
likely reason: a virtual machine does not show which of its cores are two threads of one, and the system puts
processes anywhere. With fixed cores all servers have the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import psutil

KINDS = ("client", "HTTP server", "scheduler", "detokenizer")
TITLES = {"sglang::scheduler": 2, "sglang::detokenizer": 3}
"""How SGLang names its processes, and which of ``KINDS`` they are."""


def check(cores: Sequence[int]) -> None:
    """Raise ``ValueError`` unless there is a different core for each of ``KINDS``."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(set(cores)) != len(KINDS) or not set(cores) <= set(allowed):
        raise ValueError(
            f"--cores={' '.join(map(str, cores))} must be {len(KINDS)} different ones of {allowed}, "
            f"for {', '.join(KINDS)}; correct them"
        )


def pin(servers: Iterable[int], cores: Sequence[int]) -> None:
    """Put the main thread of this process, and those of each server's, on a core: one a kind of process.

    All servers take the same cores: only one is asked at a time. Threads that are there already stay free.

    Args:
        servers: process ids.
        cores: one for each of ``KINDS``, see ``check``.
    """
    psutil.Process().cpu_affinity([cores[0]])
    for pid in servers:
        server = psutil.Process(pid)
        server.cpu_affinity([cores[1]])
        for child in server.children(recursive=True):
            title = " ".join(child.cmdline())
            for name, kind in TITLES.items():
                if title.startswith(name):
                    child.cpu_affinity([cores[kind]])
