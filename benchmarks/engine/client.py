"""A client of SGLang's HTTP server that speaks in token ids: ``--skip-tokenizer-init`` on the other side."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

METRICS_AGE = 2.5
"""Seconds until metrics are up to date: exported once a second, and counts of the kernels one read later."""

_PROCESS_LABELS = {
    "le", "pid", "model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank", "priority",
}  # fmt: skip


COUNTS = {
    "misses": ("hisparse:hot_lookups_total", "hisparse:hot_hits_total"),
    "unpins": ("hisparse:pages_unpinned_total",),
    "reuses": ("hisparse:pages_reused_total",),
    "restores": ("hisparse:pages_restored_total",),
    "mismatches": ("hisparse:audit_mismatches_total",),
    "retractions": ("hisparse:retractions_total",),
}
"""Short names of the plugin's counters; the second series is subtracted."""


@dataclass
class Answer:
    """What came back. Seconds count from the sending of the request; gaps lie between tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    ttft: float = 0.0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    aborted: bool = False

    def take(self, chunk: dict[str, Any], elapsed: float) -> None:
        """Add a chunk of an incremental stream: its tokens and log probabilities are those since the last."""
        if "error" in chunk:
            raise RuntimeError(f"the server answered {chunk['error']}")
        new, meta = chunk.get("output_ids") or [], chunk["meta_info"]
        self.logprobs += [entry[0] for entry in meta.get("output_token_logprobs") or []]
        self.cached = meta.get("cached_tokens", self.cached)
        finish = meta.get("finish_reason")
        self.aborted = self.aborted or (isinstance(finish, dict) and finish.get("type") == "abort")
        if not new:
            return
        if self.tokens:
            self.gaps += [(elapsed - self.seconds) / len(new)] * len(new)
        else:
            self.ttft = elapsed
        self.tokens += new
        self.seconds = elapsed


class Client:
    """Requests to one server. ``async with Client(url) as client``.

    Args:
        caches: the server has a prefix cache; without one ``flush`` does nothing.
        timeout: seconds of one request.
    """

    def __init__(self, url: str, caches: bool = True, timeout: float = 600.0) -> None:
        self.url = url
        self.caches = caches
        self.timeout = aiohttp.ClientTimeout(total=timeout)
        self.last_work = time.perf_counter()

    async def __aenter__(self) -> Client:
        # The server closes a connection that rested for 5 s, and a request that is on its way then is lost.
        # So each takes a connection of its own.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(
            self.url, connector=connector, timeout=self.timeout, read_bufsize=2**20
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    async def generate(
        self,
        input_ids: list[int],
        new_tokens: int,
        logprobs: bool = False,
        rid: str | None = None,
        first: asyncio.Event | None = None,
        exact_length: bool = True,
    ) -> Answer:
        """Greedy tokens after ``input_ids``. ``first`` is set with the first token (and at the end).

        Raises:
            RuntimeError: the server refuses the request, or ends it with fewer tokens and no abort.
        """
        body: dict[str, Any] = {
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": logprobs,
            "stream": True,
        }
        if rid is not None:
            body["rid"] = rid
        payload, headers = json.dumps(body), {"Content-Type": "application/json"}
        answer, start = Answer(), time.perf_counter()
        try:
            async with self.session.post("/generate", data=payload, headers=headers) as response:
                if response.status != 200:
                    raise RuntimeError(
                        f"/generate answers {response.status}: {(await response.text())[:300]}"
                    )
                async for line in response.content:
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                        answer.take(json.loads(line[6:]), time.perf_counter() - start)
                        if first is not None and answer.tokens:
                            first.set()
        finally:
            self.last_work = time.perf_counter()
            if first is not None:
                first.set()
        if exact_length and not answer.aborted and len(answer.tokens) != new_tokens:
            raise RuntimeError(f"{len(answer.tokens)} tokens came back of the {new_tokens} asked for")
        return answer

    async def abort(self, rid: str) -> None:
        async with self.session.post("/abort_request", json={"rid": rid}) as response:
            response.raise_for_status()

    async def flush(self, patience: float = 30.0) -> None:
        """Empty the prefix cache. Waits for requests that still run."""
        if not self.caches:
            return
        async with self.session.post("/flush_cache", params={"timeout": str(patience)}) as response:
            self.last_work = time.perf_counter()
            if response.status != 200:
                raise RuntimeError(f"/flush_cache answers {response.status}: {await response.text()}")

    async def profile(self, folder: Path, steps: int) -> None:
        """Have the server write a torch trace of its next steps to ``folder``."""
        body = {"output_dir": str(folder), "num_steps": steps, "activities": ["CPU", "GPU"]}
        async with self.session.post("/start_profile", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"/start_profile answers {response.status}: {await response.text()}")

    async def is_up(self) -> bool:
        try:
            async with self.session.get("/health", timeout=aiohttp.ClientTimeout(total=25)) as response:
                return response.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False

    async def metrics(self, prefixes: Iterable[str] = ("hisparse:",)) -> dict[str, float]:
        """Series by name and own labels, like ``hisparse:device_pages/free``, with all that was asked for.

        Returns ``METRICS_AGE`` seconds after the last answer or flush at the earliest.
        """
        await asyncio.sleep(self.last_work + METRICS_AGE - time.perf_counter())
        async with self.session.get("/metrics/") as response:
            response.raise_for_status()
            return parse_metrics(await response.text(), tuple(prefixes))


def parse_metrics(text: str, prefixes: tuple[str, ...]) -> dict[str, float]:
    """Buckets of histograms are left out; samples that differ by process alone are added up."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(prefixes) and not sample.name.endswith(("_bucket", "_created")):
                labels = [v for k, v in sample.labels.items() if k not in _PROCESS_LABELS]
                key = "/".join([sample.name, *labels])
                values[key] = values.get(key, 0.0) + sample.value
    return values


def counts_of(metrics: dict[str, float]) -> dict[str, float]:
    counts = {}
    for name, (series, *less) in COUNTS.items():
        counts[name] = metrics.get(series, 0.0) - sum(metrics.get(other, 0.0) for other in less)
    return counts
