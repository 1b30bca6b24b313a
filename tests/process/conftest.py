"""Real agents, real rank processes, real signals: what the process tests share."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from forebay.format.messages import AGENT_SOCKET
from tests.process import strace
from tests.process.agents import Agents

WORKERS = Path(__file__).with_name("workers.py")


def poll(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Wait until ``condition`` gives something true; fail naming ``what`` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"after {timeout_s:g} s still waiting for {what}")
        time.sleep(0.02)


def agent_pids(runtime: Path) -> list[int]:
    """Processes that serve a job below ``runtime``."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or []
        if "forebay.drain.agent" in command and any(str(runtime) in part for part in command):
            found.append(process.info["pid"])
    return found


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of this test alone; its agents are ended and it is removed afterwards."""
    path = Path("/dev/shm") / f"forebay-test-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("FOREBAY_RUNTIME_DIR", str(path))
    monkeypatch.setenv("FOREBAY_AGENT_LINGER_S", "20")
    yield path
    for pid in agent_pids(path):
        os.kill(pid, signal.SIGKILL)
    poll(lambda: not agent_pids(path), "agents to end")
    shutil.rmtree(path, ignore_errors=True)  # the last agent may have removed it


def kill_agent(runtime: Path) -> int:
    """SIGKILL the one agent below ``runtime`` and wait until it is gone."""
    (pid,) = agent_pids(runtime)
    os.kill(pid, signal.SIGKILL)
    poll(lambda: pid not in agent_pids(runtime), f"agent {pid} to end")
    return pid


def agent_socket(runtime: Path) -> Path:
    """Socket of the only job below ``runtime``."""
    (found,) = runtime.glob(f"*/{AGENT_SOCKET}")
    return found


@dataclass
class Faults:
    """A script of faults for a directory store; ``url`` is the store that follows it."""

    directory: Path
    script: Path
    rules: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """URL of the faulty store."""
        return f"faulty+file://{self.directory}?script={self.script}"

    def set(self, *rules: dict[str, Any]) -> None:
        """Replace the rules from now on."""
        temporary = self.script.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(list(rules)))
        temporary.rename(self.script)


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    """A faulty store over a directory, without faults at first."""
    made = Faults(tmp_path / "run", tmp_path / "faults.json")
    made.set()
    return made


@dataclass
class Said:
    """What a command said: exit status, both streams, and the document of ``--json``."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)


@pytest.fixture
def cli() -> Callable[..., Said]:
    """Run ``forebay`` with arguments in a process of its own."""

    def run(*arguments: object, timeout_s: float = 60.0) -> Said:
        done = subprocess.run(
            [sys.executable, "-m", "forebay.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return Said(done.returncode, done.stdout, done.stderr)

    return run


class Nursery:
    """A process that has torch loaded and forks rank processes (see workers.py)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKERS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def start(self, order: dict[str, Any]) -> int:
        """Fork one rank; returns its pid."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One nursery for all tests."""
    made = Nursery()
    yield made
    made.close()


@dataclass
class Ranks:
    """Rank processes of one job, started together."""

    pids: list[int]
    results: list[Path]
    logs: list[Path]

    def alive(self) -> list[int]:
        """Pids of ranks that still run."""
        return [pid for pid in self.pids if psutil.pid_exists(pid)]

    def wait(self, timeout_s: float = 120.0, *, check: bool = True) -> list[Any]:
        """What each rank returned. With ``check``, a rank that failed fails the test."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                tails = self.log_tails()
                self.kill()
                pytest.fail(f"ranks still run after {timeout_s:g} s\n{tails}")
            time.sleep(0.02)
        statuses = [self._status(result) for result in self.results]
        if check and any(status != "0" for status in statuses):
            pytest.fail(f"ranks ended {statuses}\n{self.log_tails()}")
        return [json.loads(r.read_text()) if r.exists() else None for r in self.results]

    @staticmethod
    def _status(result: Path) -> str:
        path = result.with_name(result.name + ".status")
        return path.read_text() if path.exists() else "killed"

    def kill(self) -> None:
        """SIGKILL all ranks and wait until they are gone."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        poll(lambda: not self.alive(), "killed ranks to end")

    def log_tails(self) -> str:
        """The last lines of every rank's output."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in self.logs if p.exists())


@pytest.fixture
def start_ranks(tmp_path: Path, runtime: Path, nursery: Nursery) -> Iterator[Callable[..., Ranks]]:
    """``start_ranks(worker, world_size, **arguments)``: a function of workers.py on each rank."""
    started: list[Ranks] = []
    passed = {k: v for k, v in os.environ.items() if k.startswith(("FOREBAY_", "AWS_"))}

    def start(
        worker: str, world_size: int, *, local_size: int | None = None, **arguments: Any
    ) -> Ranks:
        home = tmp_path / f"ranks-{len(started)}"
        home.mkdir()
        local = local_size or world_size
        ranks = Ranks([], [], [])
        for rank in range(world_size):
            env = passed | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % local),
                "LOCAL_WORLD_SIZE": str(local),
                "RENDEZVOUS": str(home / "rendezvous"),
                "RESULT": str(home / f"result-{rank}.json"),
            }
            log = home / f"rank-{rank}.log"
            order = {"worker": worker, "arguments": arguments, "env": env, "log": str(log)}
            ranks.pids.append(nursery.start(order))
            ranks.results.append(home / f"result-{rank}.json")
            ranks.logs.append(log)
        started.append(ranks)
        return ranks

    yield start
    for ranks in started:
        ranks.kill()


@pytest.fixture(scope="session")
def agents() -> Iterator[Agents]:
    """Node agents that start at once."""
    made = Agents()
    yield made
    made.close()


@pytest.fixture(scope="session")
def traced_calls() -> list[str]:
    """The calls at which faults are put, where strace may be used; else the test is skipped."""
    why = strace.why_not()
    if why:
        pytest.skip(why)
    return strace.known_calls()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in shared memory."""
    path = Path("/dev/shm") / f"forebay-test-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)
