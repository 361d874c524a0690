"""``python -m benchmarks.engine COMMAND``: real SGLang servers on one card, asked the same things."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from benchmarks.engine import compare, conversations, matrix
from benchmarks.engine.answers import ask_server
from benchmarks.engine.matrix import BASE_PORT, Job
from benchmarks.engine.server import Server, ServerDied
from benchmarks.engine.settings import ENGINES, Launch
from benchmarks.engine.soak import soak

FULL_FAILURES = 2
"""So many are printed with the end of their log, the others with its last line: the logs lie in --out."""


def print_failures(failures: list[str]) -> None:
    for index, failure in enumerate(failures):
        lines = [line[:160] for line in failure.splitlines()]
        print("\n".join(lines if index < FULL_FAILURES else [*lines[:1], *lines[1:][-1:]]), flush=True)


def summary(folder: Path, failures: list[str], brief: bool) -> int:
    print_failures(failures)
    lines, holds = compare.compare(folder, brief)
    print("\n".join(lines))
    return 0 if holds and not failures else 1


async def run_matrix(args: argparse.Namespace) -> int:
    jobs = matrix.all_jobs(args.models, args.audit_every)
    jobs = [job for job in jobs if not args.only or any(word in job.launch.name for word in args.only)]
    jobs = [job for job in jobs if args.again or not (args.out / f"{job.launch.name}.json").exists()]
    failures = await matrix.queue(
        jobs,
        args.jobs,
        args.budget_seconds,
        lambda job, port: matrix.run_job(job, port, args.out, args.limit),
        lambda line: print(line, flush=True),
        stagger=args.stagger,
        port=args.port,
    )
    return summary(args.out, failures, brief=True)


async def run_answers(args: argparse.Namespace) -> int:
    """The timed part, in a folder of its own: servers start side by side, and are asked in turn."""
    args.out = args.out / "timed"
    jobs = [Job(launch) for launch in launches(args)]
    lock = asyncio.Lock()

    async def run(job: Job, port: int) -> None:
        server = Server(job.launch, port, args.out / "logs")
        try:
            await server.start(args.limit)
            started.append(job)
            await everybody_started(len(jobs))
            async with lock:
                record = await ask_server(server, "timed")
            (args.out / f"{job.launch.name}.json").write_text(json.dumps(record))
        finally:
            ended.append(job)
            await server.stop()

    started: list[Job] = []
    ended: list[Job] = []

    async def everybody_started(count: int) -> None:
        # A server that starts would disturb the one that is timed.
        while len(set(map(id, started)) | set(map(id, ended))) < count:
            await asyncio.sleep(0.2)

    report = lambda line: print(line, flush=True)  # noqa: E731
    failures = await matrix.queue(jobs, len(jobs), args.budget_seconds, run, report, port=args.port)
    return summary(args.out, failures, brief=False)


def launches(args: argparse.Namespace) -> list[Launch]:
    found = []
    for engine in args.engines:
        audit = args.audit_every if ENGINES[engine].plugin else 0
        graphs = not getattr(args, "no_graphs", False)
        exact = getattr(args, "exact", False)
        found.append(
            Launch(engine, str(args.model), args.dtype, graphs, exact, audit, json.loads(args.options))
        )
    return found


async def start_all(servers: list[Server], limit: float) -> None:
    """Raises ``ServerDied`` if one does not start; the others are stopped."""
    done = await asyncio.gather(*(server.start(limit) for server in servers), return_exceptions=True)
    died = [error for error in done if isinstance(error, BaseException)]
    if died:
        await stop_all(servers)
        raise died[0]


async def stop_all(servers: list[Server]) -> None:
    await asyncio.gather(*(server.stop() for server in servers))


def build_servers(args: argparse.Namespace) -> list[Server]:
    return [Server(launch, args.port + i, args.out / "logs") for i, launch in enumerate(launches(args))]


async def run_conversations(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    servers = build_servers(args)
    await start_all(servers, args.limit)
    try:
        for server in servers:
            kind = server.launch.kind
            sizes = f"{kind.device_bytes() / 2**20:.0f} MiB of rows and keys on the device"
            host = f"{kind.host_bytes() / 1e9:.1f} GB of host memory"
            up = f"up in {server.seconds_to_start:.0f} s"
            print(f"{server.launch.engine}: {up}, {sizes}, {host}", flush=True)
        names = [server.launch.engine for server in servers]
        lines = await conversations.alternate(
            dict(zip(names, [server.url for server in servers], strict=True)),
            [name for name in names if ENGINES[name].plugin],
            args.out / "conversations.jsonl",
            args.rounds,
            args.concurrency,
            args.budget_seconds - (time.perf_counter() - begin),
            about={"date": time.strftime("%Y-%m-%d"), "model": str(args.model.name)},
        )
        trouble = [line for server in servers for line in server.trouble()]
    finally:
        await stop_all(servers)
    found = conversations.medians(lines)
    verdicts = conversations.verdicts(found)
    print("\n".join([*conversations.show(found), *verdicts, *trouble[:5]]))
    return 1 if trouble or any(line.startswith("BROKEN") for line in verdicts) else 0


async def run_soak(args: argparse.Namespace) -> int:
    servers = build_servers(args)
    await start_all(servers, args.limit)
    try:
        each = [soak(server, args.seconds, args.seed + i) for i, server in enumerate(servers)]
        results = await asyncio.gather(*each)
    finally:
        await stop_all(servers)
    for lines, wrong in results:
        print("\n".join([*lines, *(f"  BROKEN {line}" for line in wrong)]))
        print(f"  {'nothing is wrong' if not wrong else f'{len(wrong)} things are wrong'}")
    return 1 if any(wrong for _, wrong in results) else 0


async def run_start(args: argparse.Namespace) -> int:
    """Seconds to start, one server at a time."""
    for server in build_servers(args):
        try:
            await server.start(args.limit)
            host = server.launch.kind.host_bytes() / 1e9
            print(
                f"{server.launch.engine}: up in {server.seconds_to_start:.1f} s, {host:.1f} GB of host memory"
            )
            print("\n".join(f"  {line[-160:]}" for line in server.sizes()[-4:]), flush=True)
        finally:
            await server.stop()
    return 0


async def run_compare(args: argparse.Namespace) -> int:
    return summary(args.out, [], args.brief)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(
        name: str, run: object, text: str, engines: list[str] | None = None
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.set_defaults(run=run)
        one.add_argument(
            "--out", type=Path, default=Path("benchmarks/results/engine"), help="folder of results"
        )
        one.add_argument("--limit", type=float, default=420, help="seconds that one server may take")
        one.add_argument("--budget-seconds", type=float, default=540, help="start nothing after this time")
        one.add_argument("--port", type=int, default=BASE_PORT, help="first of the servers' ports")
        one.add_argument("--audit-every", type=int, default=20, help="byte audit every so many steps")
        if engines is not None:
            one.add_argument("--model", type=Path, required=True, help="folder of a DSA checkpoint")
            one.add_argument("--engines", nargs="+", choices=ENGINES, default=engines)
            one.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="of the KV rows")
            one.add_argument("--no-graphs", action="store_true", help="without decode CUDA graphs")
            one.add_argument("--options", default="{}", help="more fields of --hisparse-config, JSON")
        return one

    one = command("matrix", run_matrix, "all checkpoints, KV dtypes and engines: answers that must be equal")
    one.add_argument(
        "--models", type=Path, required=True, help="folder of checkpoints: glm, glm_full, deepseek_v32"
    )
    one.add_argument("--jobs", type=int, default=8, help="servers at one time")
    one.add_argument("--stagger", type=float, default=2.0, help="seconds between the first starts")
    one.add_argument("--only", nargs="*", help="jobs whose name contains one of these")
    one.add_argument("--again", action="store_true", help="also jobs whose record is in --out")
    one = command(
        "answers", run_answers, "time to first token and batch", ["none", "stock", "resident", "tight"]
    )
    one = command("compare", run_compare, "the rules over what is in --out")
    one.add_argument("--brief", action="store_true", help="of rules that hold, only a count")
    one = command(
        "conversations", run_conversations, "multi-turn load", ["roomy_none", "roomy_stock", "roomy"]
    )
    one.set_defaults(audit_every=0)
    one.add_argument("--concurrency", type=int, nargs="+", default=[4, 16, 32])
    one.add_argument("--rounds", type=int, default=3)
    one = command("soak", run_soak, "random load with the byte audit", ["soak"])
    one.add_argument("--seconds", type=float, default=300)
    one.add_argument("--seed", type=int, default=0)
    command("start", run_start, "seconds to start with 64 GB of host memory", ["roomy", "start_stock"])
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    for name in {"out", "model", "models"} & set(vars(args)):
        setattr(args, name, getattr(args, name).resolve())
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        return asyncio.run(args.run(args))
    except ServerDied as error:
        print(error)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
