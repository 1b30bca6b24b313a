"""Faults at one chosen system call of a running process, by strace."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

DISK_CALLS = (
    "openat",
    "write",
    "writev",
    "pwrite64",
    "pwritev",
    "fsync",
    "fdatasync",
    "link",
    "linkat",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "rmdir",
    "mkdir",
    "mkdirat",
    "truncate",
    "ftruncate",
    "fallocate",
    "chmod",
    "fchmod",
    "bind",
)
"""Calls that change what is on a disk or in a job's directory, on any architecture."""

_LINE = re.compile(r"(?P<pid>\d+) +(?P<call>\w+)\((?P<rest>.*)")
_NO_DISK = re.compile(r"\d+<(?:socket|pipe|anon_inode|UNIX|/dev/(?:null|pts)|[^>]*agent\.log)")
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """The ``number``-th call of this name (from 1) in one thread; ``what`` is for people."""

    call: str
    number: int
    what: str = ""

    def __str__(self) -> str:
        return f"{self.call} {self.number} {self.what}".rstrip()


def known_calls() -> list[str]:
    """Those of DISK_CALLS that this machine's strace knows: some architectures lack the old."""
    found = []
    for call in DISK_CALLS:
        command = ["strace", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "true"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            found.append(call)
    return found


def why_not() -> str:
    """Why strace cannot be used here, or empty."""
    if shutil.which("strace") is None:
        return "strace is not installed (Debian: strace)"
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with Strace(sleeper.pid, Path("/dev/null"), ["fsync"]):
            return ""
    except OSError as error:
        return f"strace may not attach here: {error}"
    finally:
        assert sleeper.stdin is not None
        sleeper.stdin.close()
        sleeper.kill()
        sleeper.wait()


class Strace:
    """Attached to a process and all its threads while it lasts. ``inject`` is as in strace(1)."""

    def __init__(self, pid: int, log: Path, calls: list[str], *inject: str) -> None:
        options = [f"trace={','.join(calls)}", *(f"inject={one}" for one in inject)]
        self._process = subprocess.Popen(
            ["strace", "-f", "-y", "-s", "4", "-o", str(log), "-p", str(pid)]
            + [word for option in options for word in ("-e", option)],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.log = log
        assert self._process.stderr is not None
        said = self._process.stderr.readline()
        if "attached" not in said:
            self.close()
            raise OSError(said.strip() or "it ended")

    def close(self) -> None:
        """Detach; what it traced goes on."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(TIMEOUT_S)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_points(log: Path) -> list[Point]:
    """The calls of a finished recording that change a disk, each by its number in its thread."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    found: dict[tuple[str, int], Point] = {}
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        call, rest = match["call"], match["rest"]
        number = counts[match["pid"], call] = counts[match["pid"], call] + 1
        if call == "openat" and "O_CREAT" not in rest:
            continue
        if call in ("write", "writev") and _NO_DISK.match(rest):
            continue
        found.setdefault((call, number), Point(call, number, _names(rest)))
    return list(found.values())


def _names(rest: str) -> str:
    """The last parts of the paths that a call names."""
    paths = re.findall(r'["<](/[^">]+)[">]', rest)
    return " ".join("/".join(path.split("/")[-2:]) for path in paths[:2])


def injected(log: Path) -> str:
    """The call that was hit, as strace wrote it; empty when none was. For a log that is closed."""
    lines = log.read_text(errors="replace").splitlines()
    hit = [line for line in lines if "INJECTED" in line]
    if not hit and any("killed by SIGKILL" in line for line in lines):
        hit = [line for line in lines if "unfinished" in line or line.endswith("= ?")]
    return hit[-1] if hit else ""
