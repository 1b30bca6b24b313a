"""The agent's log: it stays small, its last lines stay whole."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from forebay.drain.log import KEPT_BYTES, LIMIT_BYTES, BoundedLog


def test_the_last_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    log = BoundedLog(path, fd)
    most = 0
    for number in range(40_000):
        log.emit(logging.LogRecord("x", 20, "f", 1, "line %06d %s", (number, "x" * 50), None))
        most = max(most, os.fstat(fd).st_size) if number % 100 == 0 else most
    os.close(fd)
    assert KEPT_BYTES < most <= LIMIT_BYTES
    numbers = [int(line.split()[1]) for line in path.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 40_000))
    assert len(numbers) > 1000


@pytest.mark.parametrize("gone", ["file", "descriptor"])
def test_a_log_that_cannot_be_written_harms_nothing(tmp_path: Path, gone: str) -> None:
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    log = BoundedLog(path, fd)
    if gone == "file":
        os.write(fd, bytes(LIMIT_BYTES))
        path.unlink()
    else:
        os.close(fd)
    log.emit(logging.LogRecord("x", 20, "f", 1, "line", (), None))
    if gone == "file":
        os.close(fd)
