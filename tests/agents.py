"""Node agents within milliseconds: a process that has their modules loaded and forks them.

Run as a program this is that process: for each line of JSON on its standard input,
``{"directory", "log"}``, it forks an agent of that job's directory and answers with its pid. Its
agents are the product's own, apart from waits that would only make a test slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 60.0


class Nursery:
    """Forks agents. Used by one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, directory: Path, log: Path) -> Child:
        """An agent of a job's directory, which says what it does at the end of ``log``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"directory": str(directory), "log": str(log)}) + "\n")
        self._process.stdin.flush()
        return Child(int(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process; its agents live on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._process.stdout.close()


class Child:
    """A forked agent, known by a descriptor, so that its pid cannot be another's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already, and the kernel has reaped it
            self._fd = -1

    def ended(self, timeout_s: float = 0.0) -> bool:
        """True once it is gone, for which it is waited ``timeout_s``."""
        return self._fd < 0 or bool(select.select([self._fd], [], [], timeout_s)[0])

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._fd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        assert self.ended(DEADLINE_S), f"agent {self.pid} does not end"
        os.close(self._fd)
        self._fd = -1


def _hasten() -> None:
    """Shorter waits for what cannot come any more: the same code, sooner."""
    from forebay.commit import gather
    from forebay.drain import finish, missing, service

    missing.GRACE_S = 0.05
    service._POLL_S = 0.02
    finish.ORPHAN_GATHER_S = 0.3
    finish._LONGEST_WAIT_S = gather._LONGEST_WAIT_S = 0.05


def main() -> None:
    """Fork agents until standard input ends."""
    from forebay.drain import agent
    from forebay.format import index  # noqa: F401 - a committer loads it, with pyarrow

    _hasten()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                null = os.open(os.devnull, os.O_RDONLY)
                for fd, onto in ((null, 0), (log, 1), (log, 2)):
                    os.dup2(fd, onto)
                status = agent.main([order["directory"]])
            finally:
                os._exit(status)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
