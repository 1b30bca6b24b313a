"""What holds for every test: the session leaves no process and no shared memory behind.

Processes are known by a variable they inherit, directories by who made them, so that another
session on the same machine, or another xdist worker, is not blamed.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.servers import (  # noqa: F401 - fixtures for all
    azurite,
    azurite_endpoint,
    google,
    moto,
    moto_port,
    proxy,
    seaweed,
    shared_filesystem,
    weed,
)

# Begins with FOREBAY_, since rank processes are started with these variables alone.
SESSION_VARIABLE = "FOREBAY_TEST_SESSION"
SHARED = "/dev/shm/forebay"
SETTLE_S = 15.0

_made: set[str] = set()


def _watch_directories(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: remember the directories of ours that this process makes in shared memory."""
    if event == "os.mkdir" and str(arguments[0]).startswith(SHARED):
        _made.add(str(arguments[0]))


def _left_processes(token: str) -> list[str]:
    """Processes that descend from this session; zombies are their parent's, and hold nothing."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(SESSION_VARIABLE) == token:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())}")
        except (psutil.Error, OSError):
            continue  # it has ended, or is not ours to look at
    return found


def _left_directories() -> list[str]:
    return [f"directory {path}" for path in sorted(_made) if Path(path).exists()]


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails the session when something is still there after its last test."""
    token = secrets.token_hex(8)
    sys.addaudithook(_watch_directories)
    os.environ[SESSION_VARIABLE] = token
    yield
    del os.environ[SESSION_VARIABLE]
    deadline = time.monotonic() + SETTLE_S
    while left := [*_left_processes(token), *_left_directories()]:
        if time.monotonic() > deadline:
            pytest.fail(
                f"{SETTLE_S:g} s after the last test the session has left behind:\n"
                + "\n".join(left),
                pytrace=False,
            )
        time.sleep(0.05)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures of the tests that count what they tried: lines with ``violations``."""
    lines = [
        f"{report.nodeid}: {line}"
        for report in terminalreporter.stats.get("passed", [])
        for title, text in report.sections
        if title == "Captured stdout call"
        for line in text.splitlines()
        if "violations" in line
    ]
    if lines:
        terminalreporter.section("tried")
        for line in lines:
            terminalreporter.write_line(line)
