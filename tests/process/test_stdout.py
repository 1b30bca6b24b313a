"""A reader that leaves early, and a standard output that is full."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DOCTOR = ("doctor", "--seconds", "20ms", "--size", "1MiB")


def run(*words: str, stdout: int, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "forebay.cli", *words],
        stdout=stdout,
        stderr=stderr,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize(
    "words", [("plan",), ("plan", "--json"), ("--help",), ("--version",), DOCTOR]
)
def test_a_reader_that_leaves_is_no_error(words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        code, said = run(*words, stdout=write)
    finally:
        os.close(write)
    assert code == 0, said
    assert "rror" not in said


def test_nobody_reads_either() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        code, _ = run(*DOCTOR, stdout=write, stderr=write)
    finally:
        os.close(write)
    assert code == 0


@pytest.mark.parametrize("words", [("plan",), ("plan", "--json"), ("--version",), DOCTOR])
def test_a_full_disk_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        code, said = run(*words, stdout=full.fileno())
    assert code == 1
    line = said.splitlines()[-1]
    assert line == (
        "forebay: standard output: No space left on device: send it where it can be written"
    )
    assert "Traceback" not in said
