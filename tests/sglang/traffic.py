"""What clients do: random requests with shared prefixes, duplicates, conversations, aborts, flushes, bursts.

Every answer is compared with the text that the model must say.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from forwards import Forwards
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from texts import STOP, Text

SALTED = "salt-1"  # a cache salt keeps it apart, an extra key the others
TENANTS = (None, None, "adapter-1", SALTED)
PRIORITIES = (0, 20, 40)  # farther apart than SGLang's threshold for preemption


def tokenized(
    rid: str, prompt: Iterable[int], params: SamplingParams, **more: Any
) -> TokenizedGenerateReqInput:
    """A request as the tokenizer sends it: token ids, and no log probabilities."""
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
        **more,
    )


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
    too_long: float = 0.01  # how likely a request asks for more than one can have


@dataclass(eq=False)
class Client:
    """One request that was sent and not answered yet."""

    rid: str
    text: Text
    tenant: str | None
    max_new_tokens: int
    said: list[int] = field(default_factory=list)
    aborted: bool = False
    too_long: bool = False


class Traffic:
    """Clients of one engine. ``chunking`` answers which request is between two chunks of its prompt."""

    def __init__(self, rng: Random, load: Load, forwards: Forwards, priorities: bool, context: int) -> None:
        self.rng = rng
        self.load = load
        self.forwards = forwards
        self.priorities = priorities
        self.context = context
        self.live: dict[str, Client] = {}
        self.finished: list[Client] = []
        self.given_up: set[str] = set()
        self.prefixes = [self._words(self.rng.randint(*load.prefix_tokens)) for _ in range(4)]
        self.num_sent = 0
        self.closed = False
        self.flushing = False
        self.chunking: Callable[[], str | None] = lambda: None
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
        chunking = self.live.get(self.chunking() or "")
        if chunking and self.rng.random() < 4 * load.abort:
            self.seen["aborts between chunks"] += 1
            sent.append(self._abort(chunking))
        elif self.live and self.rng.random() < load.abort:
            sent.append(self._abort(self.rng.choice(list(self.live.values()))))
        if not self.flushing and self.rng.random() < load.flush:
            self.flushing = True
            sent.append(FlushCacheReqInput(timeout_s=1000.0))
        return sent

    def outbox(self, output: Any) -> None:
        """Take an answer in and compare it."""
        if isinstance(output, AbortReq):
            client = self.live.pop(output.rid)
            self.given_up.add(output.rid)
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
        if rng.random() < load.too_long:
            most += self.context
        copies = rng.choice((1, 1, 1, 1, 2, 3))
        self.seen["duplicates"] += copies - 1
        return [self.send(prompt, tenant, most) for _ in range(copies)]

    def send(self, prompt: list[int], tenant: str | None, most: int) -> TokenizedGenerateReqInput:
        rng = self.rng
        self.num_sent += 1
        rid = f"{self.num_sent:06d}"
        text = Text(prompt, tenant, rng.choice((0, rng.randrange(1000))), self.load.stop_every)
        client = self.live[rid] = Client(rid, text, tenant, most)
        if rng.random() < self.load.too_long:
            prompt = self._words(self.context + 1)
            client.text = Text([0], tenant, 0, self.load.stop_every)  # what SGLang makes of it
            client.too_long = True
        self.forwards.texts[rid] = client.text
        self.seen["requests"] += 1
        params = SamplingParams(
            max_new_tokens=most, temperature=1.0, stop_token_ids={STOP}, ignore_eos=rng.random() < 0.15
        )
        params.normalize(None)
        return tokenized(
            rid,
            prompt,
            params,
            stream=rng.random() < 0.5,
            extra_key=None if tenant == SALTED else tenant,
            cache_salt=tenant if tenant == SALTED else None,
            priority=rng.choice(PRIORITIES) if self.priorities else None,
        )

    def _abort(self, client: Client) -> AbortReq:
        client.aborted = True
        if self.rng.random() > 0.03:
            return AbortReq(rid=client.rid)
        for other in self.live.values():
            other.aborted = True
        return AbortReq(abort_all=True)

    def _hear(self, output: BatchTokenIDOutput, i: int) -> None:
        rid = output.rids[i]
        if rid in self.given_up:  # a step of it was in flight
            return
        client = self.live[rid]
        stand_in = client.max_new_tokens == 0 and client.aborted  # nothing is sampled: SGLang says 0
        client.said += [] if stand_in else output.output_ids[i]
        start = client.text.num_prompt
        client.text.grow(start + len(client.said))
        expected = client.text.tokens[start : start + len(client.said)]
        assert client.too_long or client.said == expected, f"{client.rid} says {client.said}, not {expected}"
        reason = output.finished_reasons[i]
        if reason is None:
            return
        del self.live[client.rid]
        kind = reason["type"]
        self.seen[f"ended by {kind}"] += 1
        if kind == "abort":
            expected = client.aborted or client.too_long
            assert expected, f"{client.rid} was aborted and nobody asked for it: {reason}"
            return
        most = client.max_new_tokens
        if kind == "stop":
            whole = client.said[-1:] == [STOP]
        else:
            whole = len(client.said) == reason["length"] and (len(client.said) == most or most > self.context)
        assert whole, f"{client.rid} ended by {reason} after {client.said}"
        if not output.retraction_counts[i]:
            cached, first = output.cached_tokens[i], self.forwards.cached[client.rid]
            assert cached == first, f"{client.rid} reports {cached} cached tokens, prefill began at {first}"
            self.seen["cached tokens"] += cached
            self.seen["prompt tokens"] += start
        else:
            self.seen["retracted requests"] += 1
        self.finished.append(client)

    def _words(self, n: int) -> list[int]:
        return [self.rng.randrange(2, 42) for _ in range(n)]
