"""Start and stop a real SGLang server, and read its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from benchmarks.engine.client import Client
from benchmarks.engine.settings import Launch

TROUBLE = re.compile(
    r"hisparse_sgl audit:|memory leak|Traceback \(most recent call last\)|Scheduler hit an exception"
    r"|CUDA error"
)
"""Lines of the log that no run may have."""


STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
PINNED = re.compile(r" of \S+ GiB in (\S+) s")
"""Ours says it chunk by chunk, with the seconds since the first."""


class ServerDied(RuntimeError):
    """The server ended, or was not up in time. The message has the end of its log."""


class Server:
    """A server of its own process group, whose output goes to ``folder/NAME.log``.

    Args:
        launch: which one.
        port: it listens here; ``port + 1000`` must be free too.
        folder: of the log.
        variables: more environment; ``PYTHONPATH`` is put in front of the one that is there.
        command: what runs instead of ``python -m sglang.launch_server``, for tests.
    """

    def __init__(
        self,
        launch: Launch,
        port: int,
        folder: Path,
        variables: dict[str, str] | None = None,
        command: list[str] | None = None,
    ) -> None:
        self.launch = launch
        self.port = port
        self.log = folder / f"{launch.name}.log"
        self.variables = variables or {}
        self.command = command or [sys.executable, "-m", "sglang.launch_server"]
        self.process: subprocess.Popen[bytes] | None = None
        self.seconds_to_start = 0.0
        self.first_line = 1  # of the log, behind the command and what the start had to say

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        found = dict(os.environ)
        found.pop("PROMETHEUS_MULTIPROC_DIR", None)  # each server makes its own
        given = self.launch.environment() | self.variables
        if "PYTHONPATH" in given and found.get("PYTHONPATH"):
            given["PYTHONPATH"] = f"{given['PYTHONPATH']}{os.pathsep}{found['PYTHONPATH']}"
        return found | given

    async def start(self, timeout: float) -> None:
        """Returns when the server answers.

        Raises:
            ServerDied: it ended, or did not answer within ``timeout`` seconds.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [*self.command, *self.launch.arguments(self.port)]
        begin = time.perf_counter()
        with self.log.open("wb") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            self.process = _spawn(command, self.environment(), log, self.log.parent)
        async with Client(self.url) as client:
            while not await client.is_up():
                waited = time.perf_counter() - begin
                if self.process.poll() is not None or waited > timeout:
                    code = self.process.poll()
                    await self.stop()
                    what = f"is not up after {waited:.0f} s" if code is None else f"ended with status {code}"
                    raise ServerDied(f"{self.launch.name} {what}:\n{self.tail()}")
                await asyncio.sleep(0.25)
        self.seconds_to_start = time.perf_counter() - begin
        self.first_line = len(self.lines())

    def check_alive(self) -> None:
        """Raise ``ServerDied`` if the server has ended."""
        if self.process is None or self.process.poll() is not None:
            raise ServerDied(f"{self.launch.name} has ended:\n{self.tail()}")

    async def stop(self, patience: float = 4.0) -> None:
        """End the process group: politely, then not. Safe to call twice."""
        if self.process is None:
            return
        _signal_group(self.process.pid, signal.SIGTERM)
        end = time.perf_counter() + patience
        while self.process.poll() is None and time.perf_counter() < end:
            await asyncio.sleep(0.1)
        _signal_group(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def tail(self, lines: int = 15) -> str:
        return "\n".join(line[:300] for line in self.lines()[-lines:])

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def trouble(self) -> list[str]:
        """Lines since the server was up that tell of a mismatch, a leak or an exception."""
        return [line[:300] for line in self.lines()[self.first_line :] if TROUBLE.search(line)]

    def sizes(self) -> list[str]:
        """What the log says of the pools."""
        words = ("hisparse_sgl: ", "KV Cache is allocated", "KV host pool")
        return [x for x in self.lines() if any(word in x for word in words) and not PINNED.search(x)]

    def host_pool_seconds(self) -> float | None:
        """How long the log says that allocating and pinning the host pool took; None without one.

        SGLang's own says when it begins: the time until its next line, in whole seconds.
        """
        lines = self.lines()
        if pinned := [found[1] for line in lines if (found := PINNED.search(line))]:
            return float(pinned[-1])
        begin = next((i for i, line in enumerate(lines) if "KV host pool" in line), len(lines))
        stamps = [datetime.fromisoformat(x[1]) for line in lines[begin:] if (x := STAMP.match(line))]
        return (stamps[1] - stamps[0]).total_seconds() if len(stamps) > 1 else None

    def describe(self) -> str:
        """One line: seconds to start, and sizes of the checkpoint ``glm`` in bf16."""
        kind, pool = self.launch.kind, self.host_pool_seconds()
        host, device = f"{kind.host_bytes() / 1e9:.1f} GB", f"{kind.device_bytes() / 2**20:.0f} MiB"
        line = f"{self.launch.engine}: up in {self.seconds_to_start:.1f} s"
        line += f", host pool in {pool:.1f} s" if pool is not None else ""
        sizes = f"; {device} of rows and keys on the device" + (
            f", {host} of host memory" if kind.ratio else ""
        )
        return line + (sizes if self.launch.dtype == "bf16" else "")


def machine() -> dict[str, Any]:
    """Card, versions and date, for the records."""
    versions = {}
    for name in ("sglang", "torch", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        card = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        card = ""
    return {"card": card or None, "versions": versions, "date": time.strftime("%Y-%m-%d")}


def _spawn(
    command: list[str], environment: dict[str, str], log: IO[bytes], folder: Path
) -> subprocess.Popen[bytes]:
    """``folder`` is the server's: in a checkout it would import the packages that lie there."""
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _signal_group(group: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, what)
