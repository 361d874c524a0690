"""Many servers one after the other, several at a time: each is started, asked, recorded, and stopped."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.answers import ask_server
from benchmarks.engine.server import Server
from benchmarks.engine.settings import Launch

BASE_PORT = 31_000


@dataclass(frozen=True)
class Job:
    """One server and what it is asked."""

    launch: Launch
    faults: bool = False


def all_jobs(models: Path, audit_every: int) -> list[Job]:
    """Every checkpoint with every engine; those first whose kernels take longest to compile."""

    def job(model: str, engine: str, **kwargs: Any) -> Job:
        faults = kwargs.pop("faults", False)
        ours = engine in ("resident", "tight")
        audit = audit_every if ours else 0
        return Job(Launch(engine, str(models / model), audit_every=audit, **kwargs), faults)

    groups: list[tuple[str, dict[str, Any]]] = [
        ("deepseek_v32", {}),
        ("glm", {"dtype": "fp8"}),
        ("glm", {}),
        ("glm_full", {}),
    ]
    jobs = [job(model, engine, **more) for engine in ("tight", "none") for model, more in groups[:3]]
    jobs += [job("glm", "tight", graphs=False, faults=True)]
    jobs += [job(model, engine, **more) for engine in ("resident", "stock") for model, more in groups[:3]]
    jobs += [job("glm", engine, graphs=False) for engine in ("resident", "stock", "none")]
    jobs += [job("glm_full", engine) for engine in ("tight", "resident", "stock", "none")]
    return jobs


async def run_job(job: Job, port: int, out: Path, limit: float, part: str = "equal") -> dict[str, Any]:
    """Start, ask, stop; the record is written to ``out``.

    Raises:
        ServerDied: the server ended, or took longer than ``limit`` to start.
        TimeoutError: the rest took longer.
    """
    folder = out / "faults" / str(port)
    variables: dict[str, str] = {}
    if job.faults:
        from benchmarks.engine.faults import environment

        variables = environment(folder)
    server = Server(job.launch, port, out / "logs", variables)
    begin = time.perf_counter()
    try:
        await server.start(limit)
        work = ask_server(server, part, folder if job.faults else None)
        record = await asyncio.wait_for(work, max(1.0, limit - (time.perf_counter() - begin)))
    finally:
        await server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    (out / f"{job.launch.name}.json").write_text(json.dumps(record))
    return record


async def queue(
    jobs: Sequence[Job],
    at_once: int,
    budget: float,
    run: Callable[[Job, int], Awaitable[Any]],
    report: Callable[[str], None],
    stagger: float = 0.0,
    port: int = BASE_PORT,
) -> list[str]:
    """Run all jobs, ``at_once`` at a time, in order; answers what went wrong.

    Args:
        budget: seconds after which no job is started.
        run: runs one job at a port that no other job has.
        report: called with one line a job.
        stagger: seconds between the first starts.
        port: of the first job; the others have those above.
    """
    end = time.perf_counter() + budget
    waiting = list(enumerate(jobs))
    failures: list[str] = []

    async def worker(number: int) -> None:
        await asyncio.sleep(stagger * number)
        while waiting:
            index, job = waiting.pop(0)
            if time.perf_counter() > end:
                failures.append(f"{job.launch.name}: not started, the budget is used up")
                continue
            begin = time.perf_counter()
            try:
                await run(job, port + index)
                report(f"{job.launch.name}: {time.perf_counter() - begin:.0f} s")
            except Exception as error:
                what = str(error) or type(error).__name__
                failures.append(f"{job.launch.name} after {time.perf_counter() - begin:.0f} s: {what}")
                report(f"{job.launch.name}: FAILED")

    await asyncio.gather(*(worker(number) for number in range(at_once)))
    return failures
