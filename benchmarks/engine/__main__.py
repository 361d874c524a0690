"""``python -m benchmarks.engine COMMAND``: real SGLang servers on one card, asked the same things."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine import compare, conversations, cores, matrix, results, steady, timed_results, traces
from benchmarks.engine.checkpoints import CHECKPOINTS, write_checkpoint
from benchmarks.engine.matrix import BASE_PORT
from benchmarks.engine.server import Server, ServerDied
from benchmarks.engine.settings import ENGINES, Launch
from benchmarks.engine.soak import soak
from benchmarks.engine.timed import BATCHES, TIMED, Timed

PARTS = ("answers", "steady", "conversations", "graphs")
"""Of ``timed``, in their order."""

FULL_FAILURES = 1
"""So many are printed with the end of their log, the others with its last line: the logs lie in --out."""


def print_failures(failures: list[str]) -> None:
    for index, failure in enumerate(failures):
        lines = [line[:160] for line in failure.splitlines()]
        print("\n".join(lines if index < FULL_FAILURES else [*lines[:1], *lines[1:][-1:]]), flush=True)


def summary(folder: Path, failures: list[str], brief: bool) -> int:
    """Print what the results in ``folder`` say, the verdicts last; 0 if all rules hold and nothing failed."""
    print_failures(failures)
    table, verdicts = conversations.report(folder / "conversations.jsonl")
    graphs = traces.report(folder / "graphs.jsonl", base="roomy_none")
    table = [*steady.report(folder / "steady.jsonl", base="roomy_none"), *graphs, *table]
    verdicts = [*compare.compare(folder, brief), *verdicts]
    print("\n".join([*table, *verdicts]))
    return 1 if failures or not verdicts or any(line.startswith("BROKEN") for line in verdicts) else 0


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


async def run_timed(args: argparse.Namespace) -> int:
    if args.cores is not None:
        try:
            cores.check(args.cores)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    args.out = args.out / "timed"
    args.out.mkdir(exist_ok=True)
    shape = conversations.Shape(answer=args.answer)
    timed = Timed(build_servers(args), args.out, args.budget_seconds, args.limit, shape)
    try:
        await timed.start()
        if args.cores is not None:
            cores.pin(timed.process_ids(), args.cores)
        if args.wait_for is not None:
            await timed.wait_for(args.wait_for)
        if "answers" not in args.skip:
            await timed.answers()
        if "steady" not in args.skip:
            await timed.steady(BATCHES, args.rounds + args.more_rounds)
        if "conversations" not in args.skip:
            await timed.conversations(args.concurrency, args.rounds, args.more_rounds)
        if "graphs" not in args.skip:
            await timed.graphs(min(args.concurrency))
    finally:
        await timed.stop()
    return summary(args.out, timed.failures, brief=False)


def launches(args: argparse.Namespace) -> list[Launch]:
    found = []
    for engine in args.engines:
        audit, options = args.audit_every * ENGINES[engine].plugin, json.loads(args.options)
        found.append(Launch(engine, str(args.model), args.dtype, not args.no_graphs, False, audit, options))
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
            print(server.describe(), flush=True)
        finally:
            await server.stop()
    return 0


async def run_checkpoints(args: argparse.Namespace) -> int:
    for name in args.names:
        try:
            write_checkpoint(name, args.models / name)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"{name}: {args.models / name}", flush=True)
    return 0


async def run_compare(args: argparse.Namespace) -> int:
    return summary(args.out, [], args.brief)


async def run_results(args: argparse.Namespace) -> int:
    lines = results.rewrite(args.out, args.to, about(args))
    print("\n".join(results.table(lines)))
    return 0


async def run_timed_results(args: argparse.Namespace) -> int:
    lines = timed_results.append(args.out / "timed", args.to, about(args))
    print(f"{len(lines)} lines more in {args.to}")
    return 0 if lines else 1


def about(args: argparse.Namespace) -> dict[str, Any]:
    """What is given to be said of each line of a record."""
    versions = dict(word.split("=", 1) for word in args.versions)
    given = {name: getattr(args, name) for name in ("card", "date", "command", "commit")}
    return {key: value for key, value in (given | {"versions": versions}).items() if value}


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
        if engines:
            one.add_argument("--model", type=Path, required=True, help="folder of a DSA checkpoint")
            one.add_argument("--engines", nargs="+", choices=ENGINES, default=engines)
            one.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="of the KV rows")
            one.add_argument("--no-graphs", action="store_true", help="without decode CUDA graphs")
            one.add_argument("--options", default="{}", help="more fields of --hisparse-config, JSON")
        return one

    one = command("checkpoints", run_checkpoints, "write the models that the other commands serve")
    one.add_argument("--models", type=Path, required=True, help="folder to write them to")
    one.add_argument("--names", nargs="+", choices=CHECKPOINTS, default=list(CHECKPOINTS))
    one = command("matrix", run_matrix, "all checkpoints, KV dtypes and engines: answers that must be equal")
    one.add_argument(
        "--models", type=Path, required=True, help="folder of checkpoints: glm, glm_full, deepseek_v32"
    )
    one.add_argument("--jobs", type=int, default=8, help="servers at one time")
    one.add_argument("--stagger", type=float, default=2.0, help="seconds between the first starts")
    one.add_argument("--only", nargs="*", help="jobs whose name contains one of these")
    one.add_argument("--again", action="store_true", help="also jobs whose record is in --out")
    one = command("compare", run_compare, "the rules over what is in --out")
    one.add_argument("--brief", action="store_true", help="of rules that hold, only a count")
    kept = Path("benchmarks/results")
    for name, run, text, file in (
        ("results", run_results, "the record of a matrix, anew, and as a table", "engine_equal.jsonl"),
        (
            "timed-results",
            run_timed_results,
            "what timed measured, added to its record",
            "engine_timed.jsonl",
        ),
    ):
        one = command(name, run, text)
        one.add_argument("--to", type=Path, default=kept / file)
        one.add_argument("--card", help="these over what the results say")
        one.add_argument("--versions", nargs="+", default=[], help="like sglang=0.5.23")
        for word in ("--date", "--command", "--commit"):
            one.add_argument(word)
    one = command("timed", run_timed, "times of answers and of multi-turn load", list(TIMED))
    one.set_defaults(audit_every=0)
    one.add_argument("--skip", nargs="+", default=[], choices=PARTS)
    one.add_argument("--concurrency", type=int, nargs="+", default=[4, 16, 32])
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument(
        "--more-rounds",
        type=int,
        default=7,
        help="of decode steps, and of roomy_none and roomy at the least concurrency",
    )
    one.add_argument("--answer", type=int, default=64, help="mean tokens of an answer in a conversation")
    one.add_argument(
        "--cores",
        type=int,
        nargs=len(cores.KINDS),
        metavar="CORE",
        help=f"one each for the main threads of {', '.join(cores.KINDS)}",
    )
    one.add_argument("--wait-for", type=Path, help="time nothing before this file is there")
    one = command("soak", run_soak, "random load with the byte audit", ["soak"])
    one.add_argument("--seconds", type=float, default=300, help="of load and drain together")
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
