"""The demo's processes: start torchrun, watch it under a deadline, kill ranks, leave none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.config import LINGER_VARIABLE
from forebay.errors import DeadlineError, ForebayError
from forebay.format.messages import AGENT_LOCK
from forebay.locks import lock_owner

LINGER_S = 5
POLL_S = 0.002
GRACE_S = 10.0
_MODULE = "forebay.demo.train"
_LAUNCHER = "torch.distributed.run"
# Another launcher's variables would tell our ranks a wrong place; a fixed attempt would mix starts.
_FOREIGN = ("SLURM_", "TORCHELASTIC_", "FOREBAY_ATTEMPT")


def child_environment() -> dict[str, str]:
    """Our environment, with one thread a rank, the CPU only, and the loopback device."""
    env = {key: text for key, text in os.environ.items() if not key.startswith(_FOREIGN)}
    env |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        LINGER_VARIABLE: str(LINGER_S),
    }
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One start of the training job: what it is called, its own directory, its log, its process."""

    name: str
    out: Path
    log: Path
    process: subprocess.Popen[bytes]
    deadline_s: float

    def workers(self) -> list[int]:
        """Pids of the ranks that run now, from the process table."""
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        return [pid for pid in pids if is_rank(pid, self.out)]

    def wait_until(self, done: Callable[[], bool], what: str, tick: Callable[[], None]) -> None:
        """Poll ``done``. Raises ForebayError when the job ends first, DeadlineError when late."""
        while not done():
            if self.process.poll() is not None:
                if done():
                    return
                raise ForebayError(
                    f"demo: {self.name}: the job ended with exit code {self.process.returncode} "
                    f"while waiting for {what}: see {self.log}"
                )
            if time.monotonic() > self.deadline_s:
                raise DeadlineError(f"demo: {self.name}: no {what} in time: see {self.log}")
            tick()
            time.sleep(POLL_S)

    def wait(self, tick: Callable[[], None]) -> None:
        """Wait for a good end. Raises ForebayError on any other, DeadlineError when late."""
        while self.process.poll() is None:
            if time.monotonic() > self.deadline_s:
                raise DeadlineError(f"demo: {self.name}: not done in time: see {self.log}")
            tick()
            time.sleep(0.05)
        tick()
        if self.process.returncode != 0:
            raise ForebayError(
                f"demo: {self.name}: the job ended with exit code {self.process.returncode}: "
                f"see {self.log}"
            )

    def kill_ranks(self, pids: list[int]) -> None:
        """SIGKILL the ranks, then their launcher; returns when all are dead."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(GRACE_S)
        wait_dead(pids, GRACE_S)

    def end(self) -> None:
        """End whatever is left of this start: politely, then not."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        workers = self.workers()
        if self.process.poll() is None or workers:
            self.kill_ranks(workers)


@contextlib.contextmanager
def start(
    name: str, *, ranks: int, out: Path, log: Path, timeout_s: float, arguments: list[str]
) -> Iterator[Run]:
    """Start the training job under torchrun; on leaving, nothing of it is left but its agent."""
    for stale in [*out.glob("saved-*"), *out.glob("report-*.json")]:
        stale.unlink()
    command = [
        *(sys.executable, "-m", _LAUNCHER, "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), "-m", _MODULE),
        *("--out", str(out), *arguments),
    ]
    with log.open("ab") as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=child_environment(),
            start_new_session=True,
        )
    deadline_s = time.monotonic() + timeout_s
    run = Run(name=name, out=out, log=log, process=process, deadline_s=deadline_s)
    try:
        yield run
    finally:
        run.end()


def _state(pid: int) -> str:
    """State letter of a process, "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_alive(pid: int) -> bool:
    """True for a process that runs; a dead one that nobody collected does not count."""
    return _state(pid) not in ("", "Z", "X")


def is_rank(pid: int, out: Path) -> bool:
    """True when the process is a rank of the demo that writes into ``out``: never a stranger's."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    ours = _MODULE.encode() in words and _LAUNCHER.encode() not in words
    return ours and os.fsencode(out) in words and is_alive(pid)


def wait_dead(pids: list[int], timeout_s: float) -> None:
    """Return when none of ``pids`` runs any more. Raises DeadlineError naming those that do."""
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() > deadline:
            raise DeadlineError(f"demo: processes {alive} still run after {timeout_s:g} s")
        time.sleep(POLL_S)


def agent_pid(job_directory: Path) -> int | None:
    """Pid of the node agent of a job: who holds its lock. None when nobody does."""
    return lock_owner(job_directory / AGENT_LOCK)


def wait_for_agent(job_directory: Path, timeout_s: float) -> None:
    """Return when the job's agent has ended by itself. Raises DeadlineError."""
    deadline = time.monotonic() + timeout_s
    while (pid := agent_pid(job_directory)) is not None:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"demo: node agent, pid {pid}, still runs {timeout_s:g} s after its job: "
                f"see {job_directory / 'agent.log'}"
            )
        time.sleep(0.05)


def end_agent(job_directory: Path) -> None:
    """End the job's agent if it runs: for a demo that failed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        pid = agent_pid(job_directory)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        with contextlib.suppress(DeadlineError):
            wait_for_agent(job_directory, GRACE_S)


def last_lines(path: Path, count: int = 25) -> list[str]:
    """The end of a log, for a person."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").splitlines()[-count:]
    return []
