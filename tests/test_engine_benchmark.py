"""benchmarks/engine against a server in this process that speaks as SGLang 0.5.23 does, and has no model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="benchmarks.engine talks through aiohttp, which comes with SGLang")
pytest.importorskip("prometheus_client", reason="benchmarks.engine reads metrics, as SGLang writes them")

from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.engine import client as client_module
from benchmarks.engine import compare, conversations, matrix, soak
from benchmarks.engine.answers import ask_server, prompt, the_prompts
from benchmarks.engine.client import Answer, Client, parse_metrics
from benchmarks.engine.matrix import Job
from benchmarks.engine.server import Server, ServerDied
from benchmarks.engine.settings import ENGINES, WORKING_SET, Launch

PAGE = 4
SCALE = 500


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

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.add_routes([
            web.post("/generate", self.generate),
            web.post("/abort_request", self.abort),
            web.post("/flush_cache", self.flush),
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
        return web.Response()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        labels = 'model_name="m",tp_rank="0"'
        lines = [f"hisparse:{name}{{{labels}}} {value}" for name, value in self.counts.items()]
        for name in soak.IDLE_GAUGES:
            series, _, state = name.partition("/")
            kind = "mode" if series == "hisparse:requests" else "state"
            label = f'{labels},{kind}="{state}"' if state else labels
            lines.append(f"{series}{{{label}}} {self.leak if state == 'in_use' else 0}")
        return web.Response(text="\n".join(lines) + "\n")


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


def test_metrics_keep_their_own_labels_only() -> None:
    text = 'a:x_total{tp_rank="0"} 2\na:x_total{tp_rank="1"} 3\na:p{state="hot",pid="4"} 1\nb:y 5\n'
    assert parse_metrics(text, ("a:",)) == {"a:x_total": 5, "a:p/hot": 1}


def test_the_prompts_are_those_of_serve_once() -> None:
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
    assert broken(group) == []
    group["resident"]["passes"]["ttft"] = [0.13] * 7
    group["tight"]["passes"]["ttft"] = [0.16] * 7
    group["tight"]["passes"]["batch_seconds"] = [0.6] * 3
    assert len(broken(group)) == 3


def test_records_are_read_by_group_and_judged(equal_group: compare.Group, tmp_path: Path) -> None:
    for engine, record in equal_group.items():
        (tmp_path / f"{engine}.json").write_text(json.dumps(record))
    lines, holds = compare.compare(tmp_path, brief=True)
    assert holds and len(lines) == 1 and "0 broken" in lines[0]
    (tmp_path / "empty").mkdir()
    assert compare.compare(tmp_path / "empty") == ([], False)


SHAPE = conversations.Shape(conversations=5, turns=3, shared=32, turn=8, answer=4)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_conversations_grow_and_keep_to_their_concurrency(concurrency: int) -> None:
    fake = Fake(step=0.002)

    async def work(url: str) -> dict[str, Any]:
        async with Client(url) as client:
            return await conversations.converse(client, SHAPE, concurrency, seed=1)

    run = with_fake(fake, work)
    assert fake.peak == concurrency and run["requests"] == 15
    lengths = sorted(len(body["input_ids"]) for body in fake.bodies[1:])
    assert lengths == sorted([32 + 8 * turn + 4 * (turn - 1) for turn in (1, 2, 3)] * 5)
    asked = sum(lengths)
    cached = [40, 52]  # all whole pages of the turn before and its answer, and the shared prefix at first
    assert run["cached_share"] == pytest.approx(
        5 * (32 + sum(n // PAGE * PAGE for n in cached)) / asked, abs=0.1
    )
    assert 1.5 < run["itl_p50"] < 20 and run["ttft_p95"] >= run["ttft_p50"]


def test_runs_alternate_and_are_written_at_once(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"

    async def work(url: str) -> list[dict[str, Any]]:
        servers = {"roomy": url, "roomy_none": url}
        return await conversations.alternate(servers, ["roomy"], file, 2, (2, 4), 60, SHAPE)

    lines = with_fake(Fake(), work)
    assert [(x["round"], x["concurrency"], x["engine"]) for x in lines[:3]] == [
        (0, 2, "roomy"), (0, 2, "roomy_none"), (0, 4, "roomy"),
    ]  # fmt: skip
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines and len(lines) == 8
    assert lines[0]["counts"]["restores"] == 16 and "counts" not in lines[1]
    found = conversations.medians(lines)
    assert found["roomy", 4]["runs"] == 2 and len(conversations.show(found)) == 5


def test_no_run_starts_after_the_budget(tmp_path: Path) -> None:
    async def work(url: str) -> list[dict[str, Any]]:
        return await conversations.alternate({"roomy": url}, [], tmp_path / "x", 1, (2,), -1.0, SHAPE)

    assert with_fake(Fake(), work) == []


def test_quantiles_and_aims() -> None:
    assert conversations.quantile(range(1, 101), 0.95) == 95 and conversations.quantile([3.0], 0.5) == 3.0
    figures = dict.fromkeys(conversations.FIGURES, 1.0)
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


QUICK = soak.Load(
    rate=200, burst=20, burst_every=0.2, longest=200, shortest=2, most_new=8, prefixes=3, abort=0.4,
    abort_within=0.02,
)  # fmt: skip


def soaked(fake: Fake, trouble: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    async def work(url: str) -> tuple[list[str], list[str]]:
        return await soak.soak(stub(url, "soak", trouble), 0.8, 3, QUICK)

    return with_fake(fake, work)


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(soak.asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.2)))


def test_soak_is_content_with_a_sound_server() -> None:
    fake = Fake(step=0.004)
    lines, wrong = soaked(fake)
    assert wrong == []
    assert len(fake.bodies) > 60 and fake.aborted and fake.peak >= 20
    assert " 0 aborted" not in lines[0] and " 0 cut" not in lines[0] and "(0 cached)" not in lines[0]


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


def test_a_job_starts_asks_and_stops_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is this file: see its end."""
    command = [sys.executable, __file__]
    monkeypatch.setattr(matrix, "Server", partial(Server, command=command))
    monkeypatch.setattr(matrix, "ask_server", partial(ask_server, scale=SCALE))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
