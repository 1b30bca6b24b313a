"""Node agents that start at once: a process that has imported what an agent needs, and forks them.

Run as a program this is the nursery: for each line of JSON on its standard input it forks a child
that is an agent, ``{"directory", "log", "gate", "ordered", "short"}``, and answers with its pid.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_PTRACER = 0x59616D61
_SHORT_BYTES = 1000


class Inline:
    """Stands in for a pool of threads and does the work at once.

    The calls of such an agent then come in one order, and a number names one of them.
    """

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **named))
        except BaseException as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_: object) -> None:
        pass


def _write_short() -> None:
    """From now on no write takes more than some bytes, as a disk that fills or a signal does."""
    write, pwrite = os.write, os.pwrite
    os.write = lambda fd, data: write(fd, memoryview(data)[:_SHORT_BYTES])
    os.pwrite = lambda fd, data, at: pwrite(fd, memoryview(data)[:_SHORT_BYTES], at)


def _be_agent(order: dict[str, Any]) -> None:
    from forebay.drain import agent, work

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, onto in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, onto)
    if order["ordered"]:
        work.ThreadPoolExecutor = Inline  # type: ignore[assignment,misc]
    if order["short"]:
        _write_short()
    if order["gate"]:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_long(-1), 0, 0, 0)
        while not Path(order["gate"]).exists():
            time.sleep(0.002)
    os._exit(agent.main([order["directory"]]))


def main() -> None:
    """Be the nursery until standard input ends."""
    import forebay.drain.agent
    import forebay.format.index  # noqa: F401 - the commit's, and slow

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _be_agent(json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(70)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


@dataclass
class Agent:
    """One agent that was forked. ``fd`` becomes readable when it has ended."""

    pid: int
    fd: int

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return not select.select([self.fd], [], [], 0)[0]

    def ended(self, timeout_s: float) -> bool:
        """Wait for its end."""
        return bool(select.select([self.fd], [], [], timeout_s)[0])

    def signal(self, number: int) -> None:
        """Send it a signal; one that has ended gets none."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.fd, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        assert self.ended(60), f"agent {self.pid} outlives SIGKILL"

    def close(self) -> None:
        """End it if need be and forget it."""
        self.kill()
        os.close(self.fd)


class Agents:
    """The nursery, seen from a test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(
        self,
        directory: Path,
        log: Path,
        *,
        gate: Path | None = None,
        ordered: bool = False,
        short: bool = False,
    ) -> Agent:
        """Fork an agent for a job's directory; with a ``gate``, it begins once that file exists."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {
            "directory": str(directory),
            "log": str(log),
            "gate": "" if gate is None else str(gate),
            "ordered": ordered,
            "short": short,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        try:
            return Agent(pid, os.pidfd_open(pid))
        except ProcessLookupError:  # it has ended already
            read, write = os.pipe()
            os.close(write)
            return Agent(pid, read)

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


if __name__ == "__main__":
    main()
