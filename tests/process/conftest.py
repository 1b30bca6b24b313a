"""Real agents, real rank processes, real signals: what the process tests share."""

from __future__ import annotations

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

WORKERS = Path(__file__).with_name("workers.py")


def poll(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:  # noqa: ANN401
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
    shutil.rmtree(path)


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
class Ranks:
    """Rank processes of one job, started together."""

    processes: list[subprocess.Popen[str]]
    results: list[Path]
    logs: list[Path]

    def wait(self, timeout_s: float = 120.0, *, check: bool = True) -> list[Any]:
        """What each rank returned. With ``check``, a rank that failed fails the test."""
        deadline = time.monotonic() + timeout_s
        try:
            for process in self.processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"ranks still run after {timeout_s:g} s\n{self.log_tails()}")
        if check and any(process.returncode for process in self.processes):
            pytest.fail(f"ranks ended {[p.returncode for p in self.processes]}\n{self.log_tails()}")
        return [json.loads(r.read_text()) if r.exists() else None for r in self.results]

    def kill(self) -> None:
        """SIGKILL all ranks and reap them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(30)

    def log_tails(self) -> str:
        """The last lines of every rank's output."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in self.logs)


@pytest.fixture
def start_ranks(
    tmp_path: Path, runtime: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Ranks]]:
    """``start_ranks(worker, world_size, **arguments)`` runs a function of workers.py on each rank."""
    started: list[Ranks] = []

    def start(
        worker: str, world_size: int, *, local_size: int | None = None, **arguments: Any
    ) -> Ranks:  # noqa: ANN401
        home = tmp_path / f"ranks-{len(started)}"
        home.mkdir()
        local = local_size or world_size
        ranks = Ranks([], [], [])
        for rank in range(world_size):
            env = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % local),
                "LOCAL_WORLD_SIZE": str(local),
                "OMP_NUM_THREADS": "1",
                "RENDEZVOUS": str(home / "rendezvous"),
                "RESULT": str(home / f"result-{rank}.json"),
            }
            log = home / f"rank-{rank}.log"
            with log.open("w") as out:
                ranks.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKERS), worker, json.dumps(arguments)],
                        env=env,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        text=True,
                    )
                )
            ranks.results.append(home / f"result-{rank}.json")
            ranks.logs.append(log)
        started.append(ranks)
        return ranks

    yield start
    for ranks in started:
        ranks.kill()
