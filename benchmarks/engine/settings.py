"""The engines that are compared, and the argument list of ``sglang.launch_server`` for each of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

PAGE = 64
CONTEXT = 65_536

LAYERS = 6
INDEX_LAYERS = 3
ROW_BYTES = 1152
INDEX_BYTES = 132
"""Of the checkpoint ``glm`` in bf16, whose layers FFSSFS run three indexers: for sizes compared in bytes."""

BACKENDS = {"bf16": "flashmla_sparse", "fp8": "flashmla_kv"}
"""What SGLang's HiSparse takes on a Hopper card. Forced without HiSparse too, to compare like with like."""

KV_DTYPES = {"bf16": "bfloat16", "fp8": "fp8_e4m3"}


@dataclass(frozen=True)
class Engine:
    """One kind of server.

    ``tokens``: KV rows on the device. ``ratio``: host pool in device pools, None without HiSparse.
    ``plugin``: ours. ``why``: what it is there for.
    """

    tokens: int
    why: str
    ratio: int | None = None
    plugin: bool = False
    requests: int = 16
    fields: dict[str, Any] = field(default_factory=dict)  # more of --hisparse-config

    @property
    def caches(self) -> bool:
        """Whether it has a prefix cache: SGLang's HiSparse does not."""
        return self.plugin or self.ratio is None

    def device_bytes(self) -> int:
        """KV rows on the device and all indexer rows, of the checkpoint ``glm`` in bf16."""
        index_tokens = self.tokens * (self.ratio or 1)
        return LAYERS * ROW_BYTES * self.tokens + INDEX_LAYERS * INDEX_BYTES * index_tokens

    def host_bytes(self) -> int:
        """The host pool, of the same checkpoint."""
        return LAYERS * ROW_BYTES * self.tokens * (self.ratio or 0)


WORKING_SET = 16_384 + 32 * 6 * 2064
"""Tokens of the conversations (``conversations.py``) with their answers, the shared prefix once."""

ENGINES: dict[str, Engine] = {
    # Answers: the four prompts are 34,300 tokens, the crowd 54,000.
    "none": Engine(240_000, "no HiSparse, radix cache"),
    "stock": Engine(120_000, "SGLang's HiSparse, which has no radix cache", ratio=2),
    "resident": Engine(90_048, "ours, all prompts stay on the device", ratio=8, plugin=True),
    # 407 pages: 20,000 tokens (313) leave 94, so that 16,000 tokens beside it (250) turn it into a hot
    # region (64) and 2 pages, and then take 220 of its pages while it decodes.
    "tight": Engine(26_048, "ours, prompts push each other off the device", ratio=16, plugin=True),
    # Conversations: 64.0 GB of host memory, and all of the working set on the device.
    "roomy_none": Engine(462_976, "no HiSparse, room for the working set", requests=32),
    "roomy_stock": Engine(462_976, "SGLang's HiSparse, enough host for 32 contexts", ratio=3, requests=32),
    "roomy": Engine(462_976, "ours, room for the working set", ratio=20, plugin=True, requests=32),
    # The same device bytes: ours has indexer rows of 1.2 working sets there, and hot state that would hold
    # 2,000 tokens.
    "quarter_none": Engine(WORKING_SET // 4 // PAGE * PAGE, "no HiSparse, a quarter of it", requests=32),
    "quarter": Engine(75_776, "ours in the same device bytes", ratio=7, plugin=True, requests=32),
    "soak": Engine(100_032, "ours under random load", ratio=6, plugin=True, requests=24),
    "start_stock": Engine(462_976, "SGLang's HiSparse with 64 GB of host memory", ratio=20),
}


@dataclass(frozen=True)
class Launch:
    """How one server is started.

    Args:
        engine: a name of ``ENGINES``.
        model: folder of a DSA checkpoint.
        dtype: of the KV rows, ``bf16`` or ``fp8``.
        graphs: decode CUDA graphs.
        exact: answers are to be equal bit for bit. The top-k kernel is then torch's, whose choice does not
            vary; graphs are padded to 16 requests, and without graphs steps do not overlap, so that what else
            runs does not change the shapes of a request's decode steps.
        audit_every: byte audit of one request every so many steps; 0 is off.
        options: more fields of ``--hisparse-config``, over those of the engine.
    """

    engine: str
    model: str
    dtype: str = "bf16"
    graphs: bool = True
    exact: bool = True
    audit_every: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Engine:
        return ENGINES[self.engine]

    def arguments(self, port: int) -> list[str]:
        """After ``python -m sglang.launch_server``. The port above this one by 1,000 is taken too."""
        kind = self.kind
        given = [
            *("--model-path", self.model, "--host", "127.0.0.1", "--port", str(port)),
            *("--nccl-port", str(port + 1000), "--skip-tokenizer-init", "--log-level", "info"),
            *("--dtype", "bfloat16", "--kv-cache-dtype", KV_DTYPES[self.dtype], "--random-seed", "1"),
            *("--context-length", str(CONTEXT), "--chunked-prefill-size", "8192"),
            *("--max-running-requests", str(kind.requests), "--max-total-tokens", str(kind.tokens)),
            # Pools have explicit sizes. What is left of the card counts other servers on it, so that a small
            # fraction can be used up by them.
            *("--mem-fraction-static", "0.85", "--watchdog-timeout", "1200"),
            *("--enable-metrics", "--stream-interval", "1", "--incremental-streaming-output"),
            # A scheduler that has nothing to do spins otherwise, and slows the server that is being timed.
            "--sleep-on-idle",
            *("--cuda-graph-backend-prefill", "disabled"),
            *("--dsa-prefill-backend", BACKENDS[self.dtype], "--dsa-decode-backend", BACKENDS[self.dtype]),
        ]
        if self.exact:
            given += ["--dsa-topk-backend", "torch"]
        if not self.graphs:
            given += ["--cuda-graph-backend-decode", "disabled"]
            given += ["--disable-overlap-schedule"] if self.exact else []
        elif self.exact:
            given += ["--cuda-graph-bs-decode", str(kind.requests)]
        else:
            given += ["--cuda-graph-max-bs-decode", str(kind.requests)]
        if kind.ratio is not None:
            given += ["--enable-hisparse", "--hisparse-config", json.dumps(self.hisparse_config())]
        if kind.ratio is not None and not kind.plugin:
            given += ["--disable-radix-cache"]
        return given

    def hisparse_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"host_to_device_ratio": self.kind.ratio}
        if not self.kind.plugin:
            return config
        return config | {"audit_every": self.audit_every} | self.kind.fields | self.options

    def environment(self) -> dict[str, str]:
        """Variables to add for the server."""
        return {
            "HISPARSE_SGL": "1" if self.kind.plugin else "0",
            # The dense prefill of short prompts is another kernel (FA3, which not every machine has): all
            # prompts are to take the sparse one.
            "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
            "OMP_NUM_THREADS": "2",
            "MAX_JOBS": "2",  # of nvcc, for kernels that compile at their first use
            **({"SGLANG_DSA_FUSE_TOPK": "0"} if self.exact else {}),  # torch's top-k has no fused form
        }

    @property
    def name(self) -> str:
        """Like ``glm-bf16-graphs-tight``."""
        model = self.model.rstrip("/").rsplit("/", 1)[-1]
        return "-".join([model, self.dtype, "graphs" if self.graphs else "eager", self.engine])
