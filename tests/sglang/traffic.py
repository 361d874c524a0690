"""What clients do: random requests with shared prefixes, duplicates, conversations, aborts, flushes, bursts.

Every answer is compared with the text that the model must say.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from texts import STOP, Text

TENANTS = (None, None, "adapter-1")


@dataclass(frozen=True)
class Load:
    """How much is asked for. Probabilities are per scheduler step."""

    arrival: float = 0.12
    burst: float = 0.01
    abort: float = 0.02
    flush: float = 0.004
    most_live: int = 20
    prefix_tokens: tuple[int, int] = (40, 420)
    tail_tokens: tuple[int, int] = (1, 260)
    new_tokens: tuple[int, int] = (0, 120)
    stop_every: int = 70
    longest: int = 900  # tokens of a prompt and its answer


@dataclass(eq=False)
class Client:
    """One request that was sent and not answered yet."""

    rid: str
    text: Text
    tenant: str | None
    max_new_tokens: int
    said: list[int]
    aborted: bool = False


class Traffic:
    """Clients of one engine. ``texts`` is told what each request must say."""

    def __init__(self, rng: Random, load: Load, texts: dict[str, Text], cached: dict[str, int]) -> None:
        self.rng = rng
        self.load = load
        self.texts = texts
        self.cached = cached
        self.live: dict[str, Client] = {}
        self.finished: list[Client] = []
        self.prefixes = [self._words(self.rng.randint(*load.prefix_tokens)) for _ in range(4)]
        self.num_sent = 0
        self.closed = False
        self.flushing = False
        self.seen: Counter[str] = Counter()

    def inbox(self) -> list[Any]:
        """What clients send before this step."""
        if self.closed:
            return []
        load, sent = self.load, []
        if self.rng.random() < load.burst:
            for _ in range(self.rng.randint(3, 10)):
                sent += self._ask()
        elif self.rng.random() < load.arrival:
            sent += self._ask()
        if self.live and self.rng.random() < load.abort:
            sent.append(self._abort())
        if not self.flushing and self.rng.random() < load.flush:
            self.flushing = True
            sent.append(FlushCacheReqInput(timeout_s=1000.0))
        return sent

    def outbox(self, output: Any) -> None:
        """Take an answer in and compare it."""
        if isinstance(output, AbortReq):
            client = self.live.pop(output.rid)
            assert client.aborted, f"{output.rid} was aborted and nobody asked for it: {output}"
            self.seen["aborted in the queue"] += 1
        elif isinstance(output, FlushCacheReqOutput):
            self.flushing = False
            self.seen["flushes"] += output.success
        elif isinstance(output, BatchTokenIDOutput):
            for i in range(len(output.rids)):
                self._hear(output, i)
        else:
            raise AssertionError(f"an unexpected output: {output}")

    def _ask(self) -> list[Any]:
        if len(self.live) >= self.load.most_live:
            return []
        rng, load = self.rng, self.load
        tenant = rng.choice(TENANTS)
        if self.finished and rng.random() < 0.35:
            client = rng.choice(self.finished[-20:])
            prompt, tenant = [*client.text.tokens[: client.text.num_prompt], *client.said], client.tenant
            self.seen["next turns"] += 1
        else:
            prefix = rng.choice(self.prefixes)
            prompt = prefix[: rng.choice((0, len(prefix) // 2, len(prefix), len(prefix)))]
        room = load.longest - len(prompt)
        if room < 4:
            return []
        prompt = prompt + self._words(rng.randint(1, min(room - 2, rng.choice((8, load.tail_tokens[1])))))
        most = min(load.longest - len(prompt), rng.randint(*load.new_tokens))
        copies = rng.choice((1, 1, 1, 1, 2, 3))
        self.seen["duplicates"] += copies - 1
        return [self._send(prompt, tenant, most) for _ in range(copies)]

    def _send(self, prompt: list[int], tenant: str | None, most: int) -> TokenizedGenerateReqInput:
        rng = self.rng
        self.num_sent += 1
        rid = f"{self.num_sent:06d}"
        text = Text(prompt, tenant, rng.choice((0, rng.randrange(1000))), self.load.stop_every)
        self.texts[rid] = text
        self.live[rid] = Client(rid, text, tenant, most, [])
        self.seen["requests"] += 1
        params = SamplingParams(max_new_tokens=most, temperature=1.0, stop_token_ids={STOP})
        params.normalize(None)
        return TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=rng.random() < 0.5,
            extra_key=tenant,
            priority=rng.randrange(3) if self.priorities else None,
        )

    priorities = False

    def _abort(self) -> AbortReq:
        if self.rng.random() < 0.03:
            for client in self.live.values():
                client.aborted = True
            return AbortReq(rid="", abort_all=True)
        client = self.rng.choice(list(self.live.values()))
        client.aborted = True
        return AbortReq(rid=client.rid)

    def _hear(self, output: BatchTokenIDOutput, i: int) -> None:
        client = self.live[output.rids[i]]
        client.said += output.output_ids[i]
        start = client.text.num_prompt
        client.text.grow(start + len(client.said))
        expected = client.text.tokens[start : start + len(client.said)]
        assert client.said == expected, f"{client.rid} says {client.said}, not {expected}"
        reason = output.finished_reasons[i]
        if reason is None:
            return
        del self.live[client.rid]
        kind = reason["type"]
        self.seen[f"ended by {kind}"] += 1
        if kind == "abort":
            assert client.aborted, f"{client.rid} was aborted and nobody asked for it: {reason}"
            return
        stop = kind == "stop"
        full = client.said[-1:] == [STOP] if stop else len(client.said) == client.max_new_tokens
        assert full, f"{client.rid} ended by {reason} after {client.said}"
        if not output.retraction_counts[i]:
            cached = output.cached_tokens[i]
            assert cached == self.cached[client.rid], (
                f"{client.rid} reports {cached} cached tokens, its first prefill began at {self.cached[client.rid]}"
            )
            self.seen["cached tokens"] += cached
            self.seen["prompt tokens"] += start
        else:
            self.seen["retracted requests"] += 1
        self.finished.append(client)

    def _words(self, n: int) -> list[int]:
        return [self.rng.randrange(2, 42) for _ in range(n)]
