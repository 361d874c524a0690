"""benchmarks/engine against a server in this process that speaks as SGLang 0.5.23 does, and has no model."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("aiohttp", reason="benchmarks.engine talks through aiohttp, which comes with SGLang")
pytest.importorskip("prometheus_client", reason="benchmarks.engine reads metrics, as SGLang writes them")

from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.engine import __main__ as main
from benchmarks.engine import client as client_module
from benchmarks.engine import (
    compare,
    conversations,
    cores,
    matrix,
    rest,
    results,
    soak,
    timed_results,
    traces,
)
from benchmarks.engine.answers import ask_server, prompt, the_prompts
from benchmarks.engine.client import Answer, Client, parse_metrics
from benchmarks.engine.matrix import Job
from benchmarks.engine.server import Server, ServerDied
from benchmarks.engine.settings import ENGINES, WORKING_SET, Launch
from benchmarks.engine.steady import Batch
from benchmarks.engine.timed import TIMED, Run, Timed, plan

PAGE = 4
SCALE = 500


@pytest.fixture(autouse=True)
def servers_find_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is this file, run from another folder, imports ``benchmarks``."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics of the fake are never old."""
    monkeypatch.setattr(client_module, "METRICS_AGE", 0.0)


COUNTED = (
    "hot_lookups_total", "hot_hits_total", "pages_unpinned_total", "pages_reused_total",
    "pages_restored_total", "restored_bytes_total", "swapped_in_bytes_total", "host_to_device_bytes_total",
    "audit_mismatches_total", "prefix_hit_tokens_total", "prefix_query_tokens_total",
)  # fmt: skip


class Fake:
    """Answers are a hash of all tokens before; whole pages of what was served are cached until a flush."""

    def __init__(self, step: float = 0.0, salt: str = "") -> None:
        self.step = step
        self.salt = salt
        self.leak = 0
        self.cached: set[str] = set()
        self.counts: dict[str, float] = dict.fromkeys(COUNTED, 0.0)
        self.running = self.peak = 0
        self.bodies: list[dict[str, Any]] = []
        self.aborted: set[str] = set()
        self.refuse = False
        self.flushes = self.profiled = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.add_routes([
            web.post("/generate", self.generate),
            web.post("/abort_request", self.abort),
            web.post("/flush_cache", self.flush),
            web.post("/start_profile", self.profile),
            web.get("/health", self.health),
            web.get("/metrics/", self.metrics),
        ])  # fmt: skip
        return app

    def next(self, tokens: list[int]) -> tuple[int, float]:
        digest = hashlib.blake2b(json.dumps([self.salt, tokens]).encode(), digest_size=8).digest()
        return 3 + digest[0], -digest[1] / 16

    def prefix(self, tokens: list[int]) -> int:
        keys = [str(tokens[:end]) for end in range(PAGE, len(tokens), PAGE)]
        return PAGE * next((i for i, key in enumerate(keys) if key not in self.cached), len(keys))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        tokens, new = list(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        hit = self.prefix(tokens)
        self.count(hit, len(tokens))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            if self.refuse:
                await response.write(b'data: {"error":{"message":"too long"}}\n\n')
            else:
                await self.stream(response, body, tokens, new, hit)
        finally:
            self.running -= 1
        await response.write(b"data: [DONE]\n\n")
        return response

    def count(self, hit: int, asked: int) -> None:
        for name in ("hot_lookups_total", "pages_unpinned_total"):
            self.counts[name] += 2
        for name in ("pages_reused_total", "pages_restored_total"):
            self.counts[name] += 1
        self.counts["restored_bytes_total"] += 64
        self.counts["host_to_device_bytes_total"] += 64
        self.counts["prefix_hit_tokens_total"] += hit
        self.counts["prefix_query_tokens_total"] += asked

    async def stream(
        self, response: web.StreamResponse, body: dict[str, Any], tokens: list[int], new: int, hit: int
    ) -> None:
        for index in range(new):
            await asyncio.sleep(self.step)
            stop = body.get("rid") in self.aborted
            token, logprob = self.next(tokens)
            tokens.append(token)
            reason = {"type": "abort"} if stop else {"type": "length"} if index == new - 1 else None
            meta: dict[str, Any] = {"cached_tokens": hit, "finish_reason": reason}
            if body["return_logprob"]:
                meta["output_token_logprobs"] = [[logprob, token, None]]
            chunk = {"output_ids": [] if stop else [token], "meta_info": meta}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if stop:
                return
        self.cached |= {str(tokens[:end]) for end in range(PAGE, len(tokens), PAGE)}

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.add((await request.json())["rid"])
        return web.Response()

    async def flush(self, request: web.Request) -> web.Response:
        self.cached.clear()
        self.flushes += 1
        return web.Response()

    async def profile(self, request: web.Request) -> web.Response:
        self.profiled = self.running
        body = await request.json()
        folder = Path(body["output_dir"])
        folder.mkdir(parents=True)
        with gzip.open(folder / "1-TP-0.trace.json.gz", "wt") as out:
            json.dump({"traceEvents": trace(body["num_steps"])}, out)
        return web.Response()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        labels = 'model_name="m",tp_rank="0"'
        lines = [f"hisparse:{name}{{{labels}}} {value}" for name, value in self.counts.items()]
        for name in rest.IDLE_GAUGES:
            series, _, state = name.partition("/")
            kind = "mode" if series == "hisparse:requests" else "state"
            label = f'{labels},{kind}="{state}"' if state else labels
            lines.append(f"{series}{{{label}}} {self.leak if state == 'in_use' else 0}")
        return web.Response(text="\n".join(lines) + "\n")


def trace(steps: int) -> list[dict[str, Any]]:
    """Steps of a graph with two kernels that overlap, each beside a kernel outside of it."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for step in range(steps):
        kernels = [("void f<int, (Mode)1>(int*)", 0.0, 3.0), ("(anonymous namespace)::g(Params)", 2.0, 4.0)]
        for name, start, dur in [*kernels, ("void f<int>(int*)", 5.9, 0.1), ("small", 1.0, 0.5)]:
            args = {"correlation": 2 * step}
            event = {"ph": "X", "cat": "kernel", "name": name, "ts": 50.0 * step + start, "dur": dur}
            events.append(event | {"args": args})
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 50.0 * step, "dur": 1.0}
        events.append(launch | {"args": {"correlation": 2 * step}})
        other = {"ph": "X", "cat": "kernel", "name": "other", "ts": 50.0 * step + 20, "dur": 9.0}
        events.append(other | {"args": {"correlation": 2 * step + 1}})
    return events


def with_fake(fake: Fake, work: Callable[[str], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        server = TestServer(fake.app())
        await server.start_server()
        try:
            return await work(str(server.make_url("")).rstrip("/"))
        finally:
            await server.close()

    return asyncio.run(run())


def stub(url: str, engine: str = "tight", trouble: tuple[str, ...] = (), **launch: Any) -> Any:
    """What ``answers`` and ``soak`` need of a ``Server`` that is up."""
    return SimpleNamespace(
        url=url,
        launch=Launch(engine, "/models/glm", **launch),
        trouble=lambda: list(trouble),
        check_alive=lambda: None,
        sizes=list,
        describe=lambda: f"{engine}: up",
        host_pool_seconds=lambda: None,
        seconds_to_start=1.0,
    )


def test_an_answer_is_put_together_from_increments() -> None:
    fake = Fake(step=0.01)

    async def work(url: str) -> Answer:
        async with Client(url) as client:
            first = asyncio.Event()
            return await client.generate(list(range(9)), 5, logprobs=True, first=first)

    answer: Answer = with_fake(fake, work)
    tokens = list(range(9))
    for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
        assert (token, logprob) == fake.next(tokens)
        tokens.append(token)
    assert len(answer.gaps) == 4 and 0.009 < answer.ttft < answer.seconds
    assert answer.ttft + sum(answer.gaps) == pytest.approx(answer.seconds)


def test_several_tokens_of_one_chunk_share_its_gap() -> None:
    answer = Answer()
    answer.take({"output_ids": [1], "meta_info": {}}, 1.0)
    answer.take({"output_ids": [2, 3], "meta_info": {"cached_tokens": 8}}, 1.5)
    assert answer.gaps == [0.25, 0.25] and answer.tokens == [1, 2, 3] and answer.cached == 8


def test_an_error_in_the_stream_and_a_short_answer_raise() -> None:
    fake = Fake()
    fake.refuse = True

    async def work(url: str) -> None:
        async with Client(url) as client:
            await client.generate([1, 2], 2)

    with pytest.raises(RuntimeError, match="too long"):
        with_fake(fake, work)
    fake.refuse = False
    fake.stream = lambda *args: asyncio.sleep(0)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="0 tokens came back of the 2"):
        with_fake(fake, work)


def test_no_request_takes_a_connection_that_the_server_may_close() -> None:
    """The server ends a connection when a second request comes, as if it had closed it at that moment."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        while await reader.readuntil(b"\r\n\r\n"):
            connections[-1] += 1
            if connections[-1] > 1:
                break
            await reader.readexactly(len(json.dumps({"rid": "1"})))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n")
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Client(f"http://127.0.0.1:{port}") as client:
            for _ in range(3):
                await client.abort("1")

    asyncio.run(work())
    assert connections == [1, 1, 1]


def test_metrics_are_read_late_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "METRICS_AGE", 0.15)

    async def work(url: str) -> list[float]:
        async with Client(url) as client:
            seconds = []
            for _ in range(2):
                await client.generate([1, 2], 1)
                start = time.perf_counter()
                await client.metrics()
                seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            await client.metrics()
            return [*seconds, time.perf_counter() - start]

    late, again, at_once = with_fake(Fake(), work)
    assert min(late, again) > 0.14 > at_once


def test_metrics_keep_their_own_labels_only() -> None:
    text = 'a:x_total{tp_rank="0"} 2\na:x_total{tp_rank="1"} 3\na:p{state="hot",pid="4"} 1\nb:y 5\n'
    assert parse_metrics(text, ("a:",)) == {"a:x_total": 5, "a:p/hot": 1}


def test_the_prompts_stay_the_same() -> None:
    from random import Random

    rng = Random(0)
    assert the_prompts() == [[rng.randrange(3, 8000) for _ in range(n)] for n in (300, 5000, 9000, 20000)]


def records(part: str = "equal") -> compare.Group:
    """A record of each engine, of fakes that answer alike."""

    def record(engine: str) -> compare.Record:
        return with_fake(Fake(), lambda url: ask_server(stub(url, engine), part, scale=SCALE))

    return {engine: record(engine) for engine in ("none", "stock", "resident", "tight")}


def broken(group: compare.Group) -> list[str]:
    return [line for rule in compare.RULES for line in rule(group) if line.startswith("BROKEN")]


@pytest.fixture(scope="module")
def equal_group() -> compare.Group:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "METRICS_AGE", 0.0)
        return records()


def test_equal_servers_break_no_rule(equal_group: compare.Group) -> None:
    assert broken(equal_group) == []
    passes = equal_group["tight"]["passes"]
    assert list(passes) == ["cold", "warm", "batch", "pressed", "crowd cold", "crowd warm"]
    assert "pressed" not in equal_group["none"]["passes"]
    assert [len(a["tokens"]) for a in passes["cold"]["answers"]] == [48] * 4
    assert all(a["cached"] == 0 for a in passes["cold"]["answers"])
    assert passes["warm"]["answers"][3]["cached"] > 0


def change_token(answers: list[Any]) -> None:
    answers[2]["tokens"][7] += 1


def change_logprob(answers: list[Any]) -> None:
    answers[0]["logprobs"][-1] += 1e-6


@pytest.mark.parametrize("change", [change_token, change_logprob])
@pytest.mark.parametrize(
    ("engine", "name", "message"),
    [
        ("resident", "cold", "resident cold / stock cold"),
        ("tight", "cold", "tight cold / resident cold"),
        ("tight", "pressed", "tight pressed / resident cold"),
        ("resident", "cold", "resident cold / none cold"),
        ("tight", "warm", "tight warm:"),
    ],
)
def test_one_value_that_differs_breaks_a_rule(
    equal_group: compare.Group, engine: str, name: str, message: str, change: Callable[[list[Any]], None]
) -> None:
    group = deepcopy(equal_group)
    change(group[engine]["passes"][name]["answers"])
    assert any(message in line for line in broken(group))


def test_ours_may_be_as_far_from_no_hisparse_as_sglangs_is(equal_group: compare.Group) -> None:
    group = deepcopy(equal_group)
    group["none"]["passes"]["cold"]["answers"][3]["logprobs"][5] += 0.01
    group["none"]["passes"]["warm"]["answers"][3]["logprobs"][5] += 0.01
    assert broken(group) == []


def test_counts_cached_tokens_and_the_log_are_looked_at(equal_group: compare.Group) -> None:
    group = deepcopy(equal_group)
    group["tight"]["counts"]["pressed"]["misses"] = group["tight"]["counts"]["batch"]["misses"]
    assert ["tight counts" in line for line in broken(group)] == [True]
    group = deepcopy(equal_group)
    group["tight"]["scale"] = 1
    assert ["tokens cached" in line for line in broken(group)] == [True]
    group = deepcopy(equal_group)
    group["resident"]["counts"]["crowd warm"]["mismatches"] = 1
    group["stock"]["trouble"] = ["memory leak"]
    assert ["resident audit" in line or "stock" in line for line in broken(group)] == [True, True]


def test_faults_must_change_answers_and_leave_none_behind(
    equal_group: compare.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.engine import faults

    fake = Fake()

    def set_fault(folder: Path, name: str | None) -> None:
        fake.salt = name or ""

    monkeypatch.setattr(faults, "set_fault", set_fault)
    record = with_fake(fake, lambda url: ask_server(stub(url), faults=tmp_path, scale=SCALE))
    group = {"tight": record}
    assert broken(group) == []
    fault, cleared = f"fault {faults.FAULTS[0]}", "fault cleared"
    record["passes"][fault]["answers"], record["passes"][cleared]["answers"] = (
        record["passes"]["cold"]["answers"],
        record["passes"][fault]["answers"],
    )
    assert len(broken(group)) == 2


def test_times_are_held_against_their_limits() -> None:
    group = records("timed")
    for record in group.values():
        record["passes"]["ttft"] = [0.1] * 7
        record["passes"]["batch_seconds"] = [0.4 if record["engine"] != "stock" else 1.0] * 3
    assert not any(line.startswith("BROKEN") for line in compare.times(group))
    assert set(group["tight"]["counts"]) == {"batch", "ttft"}
    group["resident"]["passes"]["ttft"] = [0.13] * 7
    group["tight"]["passes"]["ttft"] = [0.16] * 7
    group["tight"]["passes"]["batch_seconds"] = [0.6] * 3
    assert sum(line.startswith("BROKEN") for line in compare.times(group)) == 3


def write_records(group: compare.Group, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for engine, record in group.items():
        (folder / f"{engine}.json").write_text(json.dumps(record))


def test_records_are_read_by_group_and_judged(equal_group: compare.Group, tmp_path: Path) -> None:
    write_records(equal_group, tmp_path)
    lines = compare.compare(tmp_path, brief=True)
    assert len(lines) == 1 and "0 broken" in lines[0] and "14 rules hold" in lines[0]
    assert main.summary(tmp_path, [], brief=True) == 0 and main.summary(tmp_path, ["x"], brief=True) == 1
    (tmp_path / "empty").mkdir()
    assert compare.compare(tmp_path / "empty") == [] and main.summary(tmp_path / "empty", [], True) == 1


def test_results_have_a_line_for_each_server(equal_group: compare.Group, tmp_path: Path) -> None:
    group = deepcopy(equal_group)
    group["tight"]["passes"]["cold"]["answers"][1]["logprobs"][3] += 0.25
    passes = group["tight"]["passes"]
    passes["fault zero_row"] = deepcopy(passes["cold"])
    passes["fault zero_row"]["answers"][0]["logprobs"][0] += 0.5
    for record in group.values():
        record["graphs"] = False
    write_records(group, tmp_path / "records")
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps({"engine": "old"}) + "\n")
    lines = results.rewrite(tmp_path / "records", file, {"card": "a card"})
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines
    assert [line["engine"] for line in lines] == ["none", "resident", "stock", "tight"]
    assert lines[3]["cold"]["stock cold"] == [0.0, 0.25, 0.0, 0.0] and lines[3]["card"] == "a card"
    assert lines[1]["pressed"]["resident cold"] == [0.0] * 4 and "resident cold" not in lines[1]["cold"]
    counts = lines[3]["counts"]
    assert sum(counts[name]["restores"] for name in counts if name != "total") == counts["total"]["restores"]
    text = list(results.table(lines))
    assert len(text) == 2 + 2 + 4 and "| 3 of 4, 4 of 4 |" in text[3] and "no CUDA graphs" in text[3]
    assert text[-1] == "| zero_row | 5.0e-01 | equal | equal | equal |"


SHAPE = conversations.Shape(conversations=5, turns=3, shared=32, turn=8, answer=4)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_conversations_grow_and_keep_to_their_concurrency(concurrency: int) -> None:
    fake = Fake(step=0.002)

    async def work(url: str) -> dict[str, Any]:
        async with Client(url) as client:
            return await conversations.converse(client, SHAPE, concurrency, seed=1)

    run = with_fake(fake, work)
    assert fake.peak == concurrency and run["requests"] == 15
    asked = [(len(b["input_ids"]), b["sampling_params"]["max_new_tokens"]) for b in fake.bodies[1:]]
    drawn = {new_tokens for _, new_tokens in asked}
    assert drawn <= {2, 3, 4, 5, 6} and len(drawn) > 2, "answers of one length lock in step"
    first, last = sorted(asked)[:5], sorted(asked)[-5:]
    assert {prompt for prompt, _ in first} == {32 + 8}
    assert all(32 + 3 * 8 + 2 * 2 <= prompt <= 32 + 3 * 8 + 2 * 6 for prompt, _ in last)
    tokens = sum(prompt for prompt, _ in asked)
    cached = [40, 52]  # all whole pages of the turn before and its answer, and the shared prefix at first
    assert run["cached_share"] == pytest.approx(
        5 * (32 + sum(n // PAGE * PAGE for n in cached)) / tokens, abs=0.1
    )
    assert 1.5 < run["itl_p50"] < 20 and run["ttft_p95"] >= run["ttft_p50"]


def test_the_plan_takes_turns_and_leaves_slow_runs_for_the_end() -> None:
    runs = plan([4, 16, 32], 3)
    assert len(runs) == len(set(runs)) == 3 * (3 + 3 + 2)
    close, slow, small = ("roomy_none", "roomy"), ("roomy_stock",), ("quarter_none", "quarter")
    first = [Run(close, 4, 0), Run(close, 16, 0), Run(close, 32, 0), Run(slow, 4, 0), Run(slow, 16, 0)]
    assert runs[:8] == [*first, Run(slow, 32, 0), Run(small, 32, 0), Run(small, 16, 0)]
    assert [run.engines for run in runs[-6:]] == [slow] * 6
    assert plan([4], 1) == [Run(close, 4, 0), Run(slow, 4, 0)]
    longer = plan([4, 16, 32], 3, more=2)
    assert [run for run in longer if run.round < 3] == runs
    assert longer[-8:-6] == [Run(close, 4, 3), Run(close, 4, 4)], (
        "before those for which there may be no time"
    )


def test_a_run_may_be_held_in_parts() -> None:
    """The load is the same, and between the parts nothing is flushed."""

    async def work(url: str) -> dict[str, Any]:
        async with Client(url) as client:
            run = conversations.Conversations(client, SHAPE, 2, seed=1)
            await run.begin()
            for number in (2, 2, 1):
                await run.hold(number)
            return run.figures()

    def bodies(fake: Fake) -> list[Any]:
        return sorted((body["input_ids"], body["sampling_params"]["max_new_tokens"]) for body in fake.bodies)

    async def whole(url: str) -> dict[str, Any]:
        async with Client(url) as client:
            return await conversations.converse(client, SHAPE, 2, seed=1)

    parts, one = Fake(step=0.005), Fake(step=0.005)
    in_parts, in_one = with_fake(parts, work), with_fake(one, whole)
    assert bodies(parts) == bodies(one) and parts.flushes == one.flushes == 1
    assert in_parts["requests"] == in_one["requests"] == 15
    assert 0.6 < in_parts["seconds"] / in_one["seconds"] < 2.5, "of all parts"
    assert in_parts["cached_share"] == pytest.approx(in_one["cached_share"], abs=0.1)


def timed_server(url: str, engine: str, ends_after: int = 10**9) -> Any:
    """Its check fails from that call on; so does its start if that is the first."""
    server, calls = stub(url, engine, exact=False), [0]

    def check() -> None:
        calls[0] += 1
        if calls[0] > ends_after:
            raise ServerDied(f"{engine} has ended")

    async def start(limit: float) -> None:
        if ends_after == 0:
            raise ServerDied(f"{engine} did not start")

    async def stop() -> None:
        pass

    server.check_alive, server.start, server.stop = check, start, stop
    return server


def run_timed(
    servers: dict[str, int], out: Path, budget: float = 60.0, rounds: int = 2, refuse: bool = False
) -> list[str]:
    """``servers``: see ``timed_server``; each with a fake of its own. Answers what failed."""

    async def serve(stack: AsyncExitStack) -> str:
        fake = Fake()
        fake.refuse = refuse
        server = await stack.enter_async_context(TestServer(fake.app()))
        return str(server.make_url("")).rstrip("/")

    async def work() -> list[str]:
        async with AsyncExitStack() as stack:
            found = [timed_server(await serve(stack), name, ends) for name, ends in servers.items()]
            timed = Timed(found, out, budget, 30, SHAPE, SHAPE, Batch(shared=20, own=3, answer=6, edge=2))
            await timed.start()
            await timed.answers()
            await timed.steady([1, 2], rounds)
            await timed.conversations([2, 16], rounds)
            await timed.graphs(2)
            await timed.stop()
            return timed.failures

    return asyncio.run(work())


def test_timed_runs_are_written_at_once_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.engine import timed

    monkeypatch.setattr(timed, "ask_server", partial(ask_server, scale=SCALE))
    assert run_timed(dict.fromkeys(TIMED, 99), tmp_path) == []
    assert "16 of 16 conversation runs" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "conversations.jsonl").read_text().splitlines()]
    runs = [line for line in lines if "counts" not in line]
    order = [(run["engine"], run["concurrency"], run["round"]) for run in runs]
    assert order == [(name, run.concurrency, run.round) for run in plan([2, 16], 2) for name in run.engines]
    started = [json.loads(line) for line in (tmp_path / "start.jsonl").read_text().splitlines()]
    assert {line["engine"] for line in started} == set(TIMED)
    counted = {(x["engine"], x["concurrency"], x["round"]): x["counts"] for x in lines if "counts" in x}
    assert len(counted) == 4 + 2 and counted["roomy", 2, 0]["restores"] == 16
    assert set(counted["roomy", 2, 0]) >= {"misses", "unpins", "reuses"}
    steps = [json.loads(line) for line in (tmp_path / "steady.jsonl").read_text().splitlines()]
    asked = [(step["engine"], step["batch"], step["round"]) for step in steps]
    assert asked[:3] == [("roomy_none", 1, 0), ("roomy", 1, 0), ("roomy_stock", 1, 0)]
    assert asked[6:] == [("roomy", 1, 1), ("roomy_none", 1, 1), ("roomy", 2, 1), ("roomy_none", 2, 1)]
    assert main.summary(tmp_path, [], brief=False) in (0, 1)
    printed = capsys.readouterr().out.splitlines()
    assert sum("x roomy_none" in line for line in printed if line.startswith("decode steps, batch")) == 4
    assert len(printed) < 42 and "(mean " in printed[-3] and "quarter" in printed[-1]
    assert sum("counts, all runs" in line for line in printed) == 2
    assert any("tight TTFT" in line for line in printed) and not any("audit" in line for line in printed)
    kept = timed_results.append(tmp_path, tmp_path / "kept.jsonl", {"commit": "c"})
    assert kept == [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    graphs = [line for line in kept if line["part"] == "graph"]
    assert [line["engine"] for line in graphs] == ["roomy_none", "roomy"]
    assert all(line["batch"] == 2 and line["launches"] == 60 for line in graphs)
    assert graphs[0]["span_us"] == 6.0 and graphs[0]["kernels"] == 4
    assert graphs[0]["span_us_p10_p90"] == [6.0, 6.0]
    assert graphs[0]["kernels_us"] == {"g": 4.0, "f": 3.1}
    assert any(line.startswith("decode graph") and "1.000 x roomy_none" in line for line in printed)
    number = {"answers": 4, "start": 6, "steady": len(steps), "conversations": 16, "counts": 6, "graph": 2}
    assert {part: sum(line["part"] == part for line in kept) for part in number} == number
    assert {line["engine"] for line in kept[:4]} == {"roomy_none", "roomy_stock", "roomy", "tight"}
    assert len(kept) == sum(number.values()) and all(line["commit"] == "c" for line in kept)
    assert all(
        line["card"] == "a card"
        for line in timed_results.append(tmp_path, tmp_path / "kept.jsonl", {"card": "a card"})
    )
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 2 * len(kept)


def test_the_profile_is_of_decode_steps_alone(tmp_path: Path) -> None:
    fake = Fake(step=0.03)
    shape = Batch(shared=20, own=3, answer=8, edge=2)

    async def work(url: str) -> Path:
        async with Client(url) as client:
            return await traces.record(client, shape, 3, tmp_path / "traces", steps=5)

    file = with_fake(fake, work)
    assert fake.profiled == 3 and traces.decode_graph(file)["launches"] == 5
    with gzip.open(file, "wt") as out:
        json.dump({"traceEvents": []}, out)
    with pytest.raises(RuntimeError, match="no CUDA graph"):
        traces.decode_graph(file)


def test_engines_take_turns_within_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.engine import timed

    monkeypatch.setattr(timed, "HELD", 2)
    order: list[str] = []

    class Noted(Fake):
        async def generate(self, request: web.Request) -> web.StreamResponse:
            order.append(self.salt)
            return await super().generate(request)

    async def work() -> Timed:
        async with AsyncExitStack() as stack:
            servers = []
            for name in ("roomy_none", "roomy"):
                server = await stack.enter_async_context(TestServer(Noted(salt=name).app()))
                servers.append(timed_server(str(server.make_url("")).rstrip("/"), name))
            found = Timed(servers, tmp_path, 60, 30, SHAPE)
            await found.conversations([2], 1)
            return found

    found = asyncio.run(work())
    assert found.failures == [] and found.done == 2
    turns = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    one, two = "roomy_none", "roomy"  # the first two turns are the shared prefix
    assert turns == [one, two, one, two, one, two] and order.count(one) == order.count(two) == 1 + 15
    assert order[2:26] == [one] * 6 + [two] * 12 + [one] * 6, "two conversations a turn, the last one alone"


def test_rounds_differ_and_a_server_that_ends_in_its_turn_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.engine import timed

    monkeypatch.setattr(timed, "HELD", 2)
    fakes = {name: Fake() for name in ("roomy_none", "roomy")}

    async def work() -> Timed:
        async with AsyncExitStack() as stack:
            servers = []
            for name, fake in fakes.items():
                server = await stack.enter_async_context(TestServer(fake.app()))
                servers.append(timed_server(str(server.make_url("")).rstrip("/"), name))
            found = Timed(servers, tmp_path, 60, 30, SHAPE)
            await found.conversations([2], 2)
            calls = len(fakes["roomy"].bodies)

            def ended() -> None:
                raise ServerDied("roomy has ended")

            real = conversations.Conversations.hold

            async def hold(self: conversations.Conversations, number: int) -> None:
                if self.client.url == servers[1].url and self.answers:
                    raise ServerDied("roomy has ended")
                await real(self, number)

            monkeypatch.setattr(conversations.Conversations, "hold", hold)
            servers[1].check_alive = ended
            await found.conversations([2], 1)
            assert len(fakes["roomy"].bodies) == calls + 1 + 6, "the shared prefix, and one turn of two"
            return found

    found = asyncio.run(work())
    assert found.dead == {"roomy"} and found.done == 4 + 1
    written = [json.loads(line) for line in (tmp_path / "conversations.jsonl").read_text().splitlines()]
    assert [line["engine"] for line in written if "counts" not in line].count("roomy") == 2
    first, second = (fakes["roomy_none"].bodies[start : start + 16] for start in (0, 16))
    assert [body["input_ids"] for body in first] != [body["input_ids"] for body in second]
    assert [b["input_ids"] for b in fakes["roomy"].bodies[:1]] == [b["input_ids"] for b in first[:1]]


def test_each_kind_of_process_has_its_core() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    with pytest.raises(ValueError, match="4 different ones of"):
        cores.check([allowed[0]] * 4)
    with pytest.raises(ValueError, match="correct them"):
        cores.check([*range(10**6, 10**6 + 4)])
    script = """if True:
        import subprocess
        titles = ["sglang::scheduler_TP0", "sglang::detokenizer", "sglang::other"]
        for child in [subprocess.Popen([title, "60"], executable="/bin/sleep") for title in titles]:
            child.wait()"""
    server = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        found = psutil.Process(server.pid)
        while len(found.children()) < 3 or any("python" in child.name() for child in found.children()):
            time.sleep(0.01)
        last = [allowed[-1]]
        cores.pin([server.pid], [allowed[0], *last, allowed[0], *last])
        placed = {child.cmdline()[0]: child.cpu_affinity() for child in found.children()}
        assert psutil.Process().cpu_affinity() == placed["sglang::scheduler_TP0"] == [allowed[0]]
        assert found.cpu_affinity() == placed["sglang::detokenizer"] == last
        assert placed["sglang::other"] == allowed
    finally:
        psutil.Process().cpu_affinity(allowed)
        os.killpg(server.pid, 9)
        server.wait()


def test_servers_that_end_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures = run_timed({"quarter_none": 0, "quarter": 99}, tmp_path, rounds=1)
    assert failures == ["quarter_none, start: quarter_none did not start"]
    assert "quarter_none is left out" in capsys.readouterr().out
    failures = run_timed({"roomy_none": 0, "roomy": 1}, tmp_path, rounds=1, refuse=True)
    assert len(failures) == 3 and all("too long" in line for line in failures[1:])  # start, then the answers
    lines = (tmp_path / "conversations.jsonl").read_text().splitlines()
    assert {json.loads(line)["engine"] for line in lines} == {"quarter"}


def test_nothing_is_timed_after_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_timed({"roomy": 99}, tmp_path, budget=-1.0) == []
    assert "0 of 4 conversation runs" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["start.jsonl"]


def test_quantiles_and_aims() -> None:
    assert conversations.latencies(range(1, 101))["itl_deciles"] == [*range(10, 100, 10)]
    assert conversations.quantile(range(1, 101), 0.95) == 95 and conversations.quantile([3.0], 0.5) == 3.0
    figures: dict[str, float] = dict.fromkeys(conversations.FIGURES, 1.0)
    found = {
        (engine, 4): dict(figures)
        for engine in ("roomy", "roomy_none", "roomy_stock", "quarter", "quarter_none")
    }
    found["roomy", 4]["itl_p50"] = 1.02
    found["roomy_stock", 4]["ttft_p50"] = 3.1
    found["quarter", 4]["tokens_per_second"] = 1.4
    assert all(line.startswith("ok") for line in conversations.verdicts(found))
    found["roomy", 4]["itl_p50"] = 1.04
    found["roomy_stock", 4]["ttft_p50"] = 2.9
    found["quarter", 4]["tokens_per_second"] = 1.2
    assert all(line.startswith("BROKEN") for line in conversations.verdicts(found))


def test_ratios_within_rounds() -> None:
    values = {"roomy_none": [1.0, 2.0, 4.0], "roomy": [1.1, 2.1, 3.0, 9.0]}
    lines = [
        {"engine": engine, "concurrency": 4, "round": round_, "itl_p50": value}
        for engine, runs in values.items()
        for round_, value in enumerate(runs)
    ]
    assert conversations.in_pairs(lines, "itl_p50", "roomy", "roomy_none") == {4: 1.05}
    one, two = ([line | {"commit": commit} for line in lines] for commit in "ab")
    two = [line | {"itl_p50": line["itl_p50"] * (1 if line["engine"] == "roomy" else 2)} for line in two]
    found = conversations.in_pairs([*one, *two], "itl_p50", "roomy", "roomy_none")
    assert found[4] == pytest.approx((0.55 + 0.75) / 2), "rounds of two records are not mixed"
    figures = dict.fromkeys(conversations.FIGURES, 1.0)
    sizes: dict[tuple[str, int], dict[str, float]] = {("roomy", 4): figures, ("roomy_none", 4): figures}
    assert "within rounds 1.050)" in conversations.verdicts(sizes, {4: 1.05})[0]


QUICK = soak.Load(
    rate=200, burst=20, burst_every=0.2, longest=200, shortest=2, most_new=8, prefixes=3, abort=0.4,
    abort_within=0.02,
)  # fmt: skip


def soaked(fake: Fake, trouble: tuple[str, ...] = (), load: soak.Load = QUICK) -> tuple[list[str], list[str]]:
    async def work(url: str) -> tuple[list[str], list[str]]:
        return await soak.soak(stub(url, "soak", trouble), 0.8, 3, load)

    return with_fake(fake, work)


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(soak.asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.2)))


def test_soak_is_content_with_a_sound_server() -> None:
    fake = Fake(step=0.01)
    lines, wrong = soaked(fake)
    assert wrong == []
    assert len(fake.bodies) > 60 and fake.aborted and fake.peak >= 20
    assert " 0 aborted" not in lines[0] and " 0 cut" not in lines[0] and "(0 cached)" not in lines[0]


def test_soak_ends_in_time_and_counts_what_it_cut() -> None:
    fake, start = Fake(), time.perf_counter()
    fake.stream = lambda *args: asyncio.Event().wait()  # type: ignore[method-assign]
    lines, wrong = soaked(fake, load=replace(QUICK, abort=0.0))
    assert time.perf_counter() - start < 4.0
    words = lines[0].split(" in the drain, of them ")
    waiting, unanswered = int(words[0].split()[-1]), int(words[1].split()[0])
    assert waiting == unanswered > 40 and " 0 cut" in lines[0]
    assert wrong == [f"none of {waiting} requests was answered in the drain"]


def test_soak_finds_leaks_mismatches_and_refusals() -> None:
    fake = Fake()
    fake.leak = 3
    assert "hisparse:host_pages/in_use is 3 at rest" in soaked(fake)[1]
    fake = Fake()
    fake.counts["audit_mismatches_total"] = 2
    assert "audit_mismatches_total is 2" in soaked(fake)[1]
    fake = Fake()
    fake.counts["swapped_in_bytes_total"] = 5
    assert any("its parts" in line for line in soaked(fake)[1])
    fake = Fake()
    fake.refuse = True
    assert any("too long" in line for line in soaked(fake)[1])
    assert "memory leak detected" in soaked(Fake(), ("memory leak detected",))[1]


def test_the_matrix_has_every_engine_of_every_kind_once(tmp_path: Path) -> None:
    jobs = matrix.all_jobs(tmp_path, 20)
    names = [job.launch.name for job in jobs]
    assert len(names) == len(set(names)) == 20
    kinds = {name.rsplit("-", 1)[0] for name in names}
    models = ("deepseek_v32-bf16-graphs", "glm-fp8-graphs", "glm-bf16-graphs", "glm_full-bf16-graphs")
    assert kinds == {*models, "glm-bf16-eager"}
    assert [job.launch.name for job in jobs if job.faults] == ["glm-bf16-eager-tight"]
    assert {name.rsplit("-", 1)[0] for name in names[:3]} >= {"deepseek_v32-bf16-graphs", "glm-fp8-graphs"}
    assert all(job.launch.exact for job in jobs)


def test_argument_lists() -> None:
    stock = Launch("stock", "/models/glm", dtype="fp8")
    words = stock.arguments(31000)
    assert "--disable-radix-cache" in words and words[words.index("--kv-cache-dtype") + 1] == "fp8_e4m3"
    assert stock.environment()["HISPARSE_SGL"] == "0" and "audit_every" not in " ".join(words)
    tight = Launch("tight", "/models/glm", graphs=False, audit_every=20, options={"poison": True})
    config = json.loads(tight.arguments(31000)[tight.arguments(31000).index("--hisparse-config") + 1])
    assert config == {"host_to_device_ratio": 16, "audit_every": 20, "poison": True}
    assert "--disable-overlap-schedule" in tight.arguments(31000)
    timed = Launch("none", "/models/glm", exact=False)
    assert "SGLANG_DSA_FUSE_TOPK" not in timed.environment()
    assert "--dsa-topk-backend" not in timed.arguments(1) and "--enable-hisparse" not in timed.arguments(1)


def test_sizes_of_the_load_are_those_asked_for() -> None:
    assert ENGINES["quarter_none"].tokens == WORKING_SET // 4 // 64 * 64 == 103_168
    assert ENGINES["quarter"].device_bytes() < 0.98 * ENGINES["quarter_none"].device_bytes()
    assert ENGINES["quarter"].tokens * (ENGINES["quarter"].ratio or 0) > 1.2 * WORKING_SET
    assert 64e9 <= ENGINES["roomy"].host_bytes() < 64.1e9
    assert all(engine.tokens % 64 == 0 for engine in ENGINES.values())


def test_a_queue_goes_on_when_a_job_fails() -> None:
    jobs = [
        Job(Launch(engine, f"/models/{i}")) for i, engine in enumerate(["none", "stock", "tight", "none"])
    ]
    ports: list[int] = []
    live: list[int] = []

    async def run(job: Job, port: int) -> None:
        ports.append(port)
        live.append(port)
        assert len(live) <= 2
        await asyncio.sleep(0.01)
        live.remove(port)
        if job.launch.engine == "stock":
            raise ServerDied("it died\nlast line")

    lines: list[str] = []
    failures = asyncio.run(matrix.queue(jobs, 2, 60, run, lines.append))
    assert len(set(ports)) == 4 and len(lines) == 4
    assert len(failures) == 1 and "last line" in failures[0]
    late = asyncio.run(matrix.queue(jobs, 2, -1, run, lines.append))
    assert len(late) == 4 and "budget" in late[0]


def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('what went wrong'); sys.exit(3)"]
    server = Server(Launch("none", "/models/glm"), 1, tmp_path, command=command)
    with pytest.raises(ServerDied, match=r"ended with status 3:\n(.|\n)*what went wrong"):
        asyncio.run(server.start(20))


@pytest.mark.parametrize(
    ("engine", "log", "seconds"),
    [
        ("none", "[2026-12-01 00:29:08] KV Cache is allocated. #tokens: 9\n", None),
        (
            "roomy",
            "[2026-12-01 00:29:08] host memory pinned: 1.0 of 2.7 GiB in 0.3 s, 9.5 GiB/s\n"
            "[2026-12-01 00:29:09] hisparse_sgl: 2.7 of 2.7 GiB in 1.4 s, 9.5 GiB/s\nmore\n",
            1.4,
        ),
        (
            "start_stock",
            "[2026-12-01 00:30:56] Allocating kv hierarchical KV host pool: 9 tokens, 64.0 GB host memory.\n"
            "a line of another process\n[2026-12-01 00:31:06] HiSparse: prefetch enabled\n"
            "[2026-12-01 00:31:30] later\n",
            10.0,
        ),
    ],
)
def test_seconds_of_the_host_pool_are_in_the_log(
    tmp_path: Path, engine: str, log: str, seconds: float | None
) -> None:
    server = Server(Launch(engine, "/models/glm"), 1, tmp_path)
    server.log.write_text(log)
    assert server.host_pool_seconds() == seconds
    assert (f"host pool in {seconds} s" in server.describe()) == (seconds is not None)
    assert (" 64.0 GB of host memory" in server.describe()) == (seconds is not None)
    assert not any("GiB in" in line for line in server.sizes())


def test_a_server_that_hangs_is_stopped(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import time; print('hisparse_sgl audit: x', flush=True); time.sleep(60)",
    ]
    server = Server(Launch("none", "/models/glm"), 1, tmp_path, {"EXTRA": "1"}, command)
    with pytest.raises(ServerDied, match="is not up after"):
        asyncio.run(server.start(1.0))
    assert server.process is None and server.trouble() == ["hisparse_sgl audit: x"]
    with pytest.raises(ServerDied, match="has ended"):
        server.check_alive()


def free_port(count: int = 1) -> int:
    """The first of so many in a row. Not of those that the system gives to other tests at this moment."""
    while True:
        port = random.randrange(20_000, 30_000)
        with ExitStack() as stack, contextlib.suppress(OSError):
            for offset in range(count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port


def test_the_timed_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The servers are this file."""
    monkeypatch.setattr(main, "Server", partial(Server, command=[sys.executable, __file__]))
    monkeypatch.setattr(main, "Timed", partial(Timed, warm_up=SHAPE))
    monkeypatch.setattr(conversations, "Shape", lambda answer: replace(SHAPE, answer=answer))
    words = f"timed --model {tmp_path}/glm --out {tmp_path} --engines roomy_none roomy --port {free_port(2)}"
    words += " --concurrency 4 --rounds 1 --more-rounds 0 --skip answers steady graphs --answer 5"
    monkeypatch.setattr(sys, "argv", ["benchmarks.engine", *words.split()])
    assert main.main() in (0, 1)  # whatever a fake's speed is
    printed = capsys.readouterr().out.splitlines()
    assert sorted(line.split(":")[0] for line in printed[:2]) == ["roomy", "roomy_none"]
    assert printed[2] == "2 of 2 conversation runs" and "ITL p50" in printed[-1] and len(printed) == 8
    lines = [json.loads(line) for line in (tmp_path / "timed/conversations.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(line["answer"] == 5 and "versions" in line for line in lines)
    assert sorted(file.name for file in (tmp_path / "timed/logs").iterdir()) == [
        "glm-bf16-graphs-roomy.log", "glm-bf16-graphs-roomy_none.log",
    ]  # fmt: skip


def test_a_checkpoint_that_cannot_be_written_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, folder: Path) -> None:
        raise ValueError(f"transformers has no {name}; install 5.19")

    monkeypatch.setattr(main, "write_checkpoint", write)
    words = f"checkpoints --models {tmp_path} --out {tmp_path} --names glm"
    monkeypatch.setattr(sys, "argv", ["benchmarks.engine", *words.split()])
    assert main.main() == 2
    assert capsys.readouterr().err == "transformers has no glm; install 5.19\n"


def test_a_job_starts_asks_and_stops_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is this file: see its end."""
    command = [sys.executable, __file__]
    monkeypatch.setattr(matrix, "Server", partial(Server, command=command))
    monkeypatch.setattr(matrix, "ask_server", partial(ask_server, scale=SCALE))
    port = free_port()
    job = Job(Launch("tight", "/models/glm", audit_every=20))
    asyncio.run(matrix.run_job(job, port, tmp_path, 60))
    record = json.loads((tmp_path / "glm-bf16-graphs-tight.json").read_text())
    assert broken({"tight": record}) == [] and record["seconds_to_start"] > 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server still listens"


def test_prompts_of_one_seed_are_the_same() -> None:
    from random import Random

    assert prompt(Random(4), 9) == prompt(Random(4), 9) != prompt(Random(5), 9)


if __name__ == "__main__":
    web.run_app(Fake().app(), host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]))
