"""Many processes commit one step at once, on a real server: ``python -m tests.race [ROUNDS]``.

Half of them commit what one start of a job stored, half what another did, all released together.
Each must end with one manifest and every process with the right verdict: one committed, those of
the same attempt the same, those of the other lost.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from forebay.commit.catalog import Catalog
from forebay.commit.gather import gather
from forebay.commit.publish import publish
from forebay.format import names
from forebay.storage.address import open_store
from forebay.testing.s3 import S3Server
from tests.build import put_nodes, two_nodes

PROCESSES = 16
ATTEMPTS = ("first", "second")


def racer(url: str, attempt: str) -> None:
    """A process: for each step on standard input, get ready, say so, and publish at the word."""
    store = open_store(url)
    for line in sys.stdin:
        step = int(line)
        checked = gather(store, step, attempt, nodes=2, timeout_s=60)
        print("ready", flush=True)
        sys.stdin.readline()
        verdict, manifest = publish(store, checked)
        print(verdict.value, manifest.attempt, manifest.committer, flush=True)


@contextlib.contextmanager
def racers(url: str, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """``count`` processes, by turns of the one attempt and of the other."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.race", "racer", url, ATTEMPTS[number % 2]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for number in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


def say(started: list[subprocess.Popen[str]], text: str) -> None:
    for process in started:
        assert process.stdin is not None
        process.stdin.write(text + "\n")
    for process in started:
        assert process.stdin is not None
        process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"a racer died with {process.wait(10)}"
    return line.split()


def race(url: str, rounds: int, count: int = PROCESSES) -> Counter[str]:
    """How often each attempt won. Raises AssertionError at the first round that is not right."""
    store, won = open_store(url), Counter[str]()
    with racers(url, count) as started:
        for step in range(1, rounds + 1):
            for attempt in ATTEMPTS:
                put_nodes(store, two_nodes(step=step), step=step, attempt=attempt)
            say(started, str(step))
            assert all(hear(process) == ["ready"] for process in started)
            say(started, "go")
            told = [hear(process) for process in started]
            manifest = Catalog(store).manifest(step)
            listed = [info.key for info in store.list(names.MANIFEST_PREFIX)]
            assert listed == [names.manifest_key(s) for s in range(1, step + 1)]
            verdicts = [verdict for verdict, _, _ in told]
            assert verdicts.count("committed") == 1, told
            for number, (verdict, attempt, committer) in enumerate(told):
                assert (attempt, committer) == (manifest.attempt, manifest.committer), told
                same = ATTEMPTS[number % 2] == manifest.attempt
                assert verdict in (("committed", "same") if same else ("lost",)), told
            won[manifest.attempt] += 1
    return won


def main(rounds: int) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home, S3Server(Path(home)) as server:
        os.environ.update(server.environment)
        won = race(server.run_url("race"), rounds)
    took_s = time.monotonic() - began
    print(
        f"{rounds} rounds of {PROCESSES} processes: one manifest each, all verdicts right; ", end=""
    )
    print(f"{dict(won)}, {took_s:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["racer"]:
        racer(sys.argv[2], sys.argv[3])
    else:
        main(int((sys.argv[1:] or ["200"])[0]))
