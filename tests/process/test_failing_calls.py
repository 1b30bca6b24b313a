"""An agent whose calls fail, one after the other; disks that are full, read-only, or in want."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.format.messages import Phase
from tests.disks import small_disk
from tests.process.agents import Agents
from tests.process.course import Course, record
from tests.process.strace import Point

ERRORS = ("EIO", "ENOSPC", "EINTR")
FAILING = ("openat", "write", "pwrite64", "fsync", "fdatasync", "link", "linkat", "rename")
RARE = ("mkdir", "unlink", "unlinkat", "truncate", "bind", "chmod", "rmdir")
SAMPLE_S = 10.0
SAMPLE_POINTS = 20
ALL_POINTS = 250


def fail_at(
    point: Point, error: str, root: Path, shared: Path, agents: Agents, ordered: bool
) -> tuple[str, list[str]]:
    """Which call failed, and what was not as promised: while it did, and afterwards."""
    course = Course(root, shared, agents, store_timeout_s=20.0)
    try:
        inject = f"{point.call}:error={error}:when={point.number}"
        hit, whole = course.go([point.call], inject, ordered=ordered)
        if not whole and (" ERROR " not in course.last() or error_text(error) not in course.last()):
            course.problems.append(f"the agent ended without a word: {course.last()}")
        for step, end in course.ends.items():
            if end.phase is Phase.COMMITTED:
                continue
            if not end.kind or "\n" in end.detail or "/" not in end.detail:
                course.problems.append(f"step {step}: told {end}")
            if error_text(error) not in end.detail:
                course.problems.append(f"step {step}: no cause in {end.detail!r}")
        course.finish()
        return hit, course.problems + course.litter()
    finally:
        course.end()
        shutil.rmtree(root)


def error_text(error: str) -> str:
    """What the system calls an error."""
    return os.strerror(getattr(errno, error))


def sweep(
    tmp_path: Path,
    shared: Path,
    agents: Agents,
    points: list[tuple[Point, str, bool]],
    until_s: float = float("inf"),
) -> tuple[int, list[str]]:
    """How many calls failed, and the violations, each with its point."""
    failed, violations = 0, []
    for number, (point, error, ordered) in enumerate(points):
        if time.monotonic() > until_s and failed >= SAMPLE_POINTS:
            break
        hit, found = fail_at(point, error, tmp_path / f"p{number}", shared, agents, ordered)
        failed += bool(hit)
        violations += [f"{error} at {point} ({hit}): {one}" for one in found]
    return failed, violations


def all_points(
    tmp_path: Path,
    shared: Path,
    agents: Agents,
    traced_calls: list[str],
) -> list[tuple[Point, str, bool]]:
    """Every call that may fail, with every error."""
    return [
        (point, error, ordered)
        for ordered in (True, False)
        for point in record(tmp_path / f"record-{ordered}", shared, agents, traced_calls, ordered)
        if point.call in FAILING + RARE
        for error in ERRORS
    ]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_sample_of_all_calls_fails(
    tmp_path: Path,
    shared: Path,
    agents: Agents,
    traced_calls: list[str],
) -> None:
    seed = int(os.environ.get("FOREBAY_KILL_SEED", "1"))
    points = all_points(tmp_path, shared, agents, traced_calls)
    random.Random(seed).shuffle(points)
    first = {(point.call, error): (point, error, ordered) for point, error, ordered in points}
    chosen = [*first.values(), *(one for one in points if one not in first.values())]
    failed, violations = sweep(
        tmp_path, shared, agents, chosen, until_s=time.monotonic() + SAMPLE_S
    )
    print(f"failing calls: {failed} of {len(points)} (seed {seed}), violations: {len(violations)}")
    assert not violations, "\n".join(violations)
    assert failed >= SAMPLE_POINTS


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_call_fails(
    tmp_path: Path,
    shared: Path,
    agents: Agents,
    traced_calls: list[str],
) -> None:
    points = all_points(tmp_path, shared, agents, traced_calls)
    failed, violations = sweep(tmp_path, shared, agents, points)
    print(f"failing calls: {failed} of {len(points)}, violations: {len(violations)}")
    assert not violations, "\n".join(violations)
    assert failed >= ALL_POINTS


def test_writes_that_are_short(
    tmp_path: Path,
    shared: Path,
    agents: Agents,
) -> None:
    course = Course(tmp_path / "short", shared, agents)
    try:
        assert course.drive(course.start(short=True))
        assert course.acknowledged() == [1, 2, 3]
        course.finish()
        assert course.problems + course.litter() == []
    finally:
        course.end()


def disturbed(course: Course, says: str) -> None:
    """The course while its durable tier refuses: each step ends with one line, nothing hangs."""
    assert course.drive(course.start())
    for step, end in course.ends.items():
        assert end.phase is Phase.FAILED, (step, end)
        assert end.kind in ("full", "store"), end
        assert says in end.detail, end.detail
        assert str(course.run_path) in end.detail
        assert "\n" not in end.detail


def test_a_durable_disk_that_is_full(
    tmp_path: Path,
    shared: Path,
    agents: Agents,
) -> None:
    with small_disk(tmp_path / "small", "256k") as small:
        (small / "run").mkdir()
        ballast = small / "ballast"
        ballast.write_bytes(bytes(200 * 2**10))
        course = Course(tmp_path / "full", shared, agents, store_timeout_s=1.0)
        try:
            course.move_run(small / "run")
            disturbed(course, "No space left on device")
            ballast.unlink()
            course.finish()
            assert course.problems == []
            assert not list(small.rglob(".*.tmp"))
        finally:
            course.end()


def test_a_durable_disk_that_turns_read_only(
    tmp_path: Path,
    shared: Path,
    agents: Agents,
) -> None:
    with small_disk(tmp_path / "small", "4m") as small:
        (small / "run").mkdir()
        course = Course(tmp_path / "ro", shared, agents, store_timeout_s=1.0)
        try:
            course.move_run(small / "run")
            agent = course.start()
            course.connect(agent)
            subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
            course.player.save(1)
            course.ends[1] = end = course.player.wait(1)
            assert (end.phase, end.kind) == (Phase.FAILED, "store"), end
            assert "Read-only file system" in end.detail
            assert str(course.run_path) in end.detail
            subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
            agent.kill()
            course.finish()
            assert course.problems == []
        finally:
            course.end()


def test_an_agent_short_of_descriptors(
    tmp_path: Path,
    shared: Path,
    agents: Agents,
) -> None:
    """With none left nothing is lost and no live rank is taken for dead; with some, all goes on."""
    course = Course(tmp_path / "fds", shared, agents, store_timeout_s=60.0)
    try:
        agent = course.start()
        course.connect(agent)
        used = len(list(Path(f"/proc/{agent.pid}/fd").iterdir()))
        limits = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (used, limits[1]))
        course.staged.append(1)
        course.player.save(1)
        time.sleep(2.0)  # longer than a rank that is dead is waited for
        assert course.look("in want") == []
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, limits)
        course.ends[1] = end = course.player.wait(1)
        assert end.phase is Phase.COMMITTED, end
        agent.signal(signal.SIGKILL)
        course.finish()
        assert course.problems == []
    finally:
        course.end()


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of 3 MiB."""
    with small_disk(tmp_path / "narrow", "3m") as path:
        monkeypatch.setenv("FOREBAY_RUNTIME_DIR", str(path / "runtime"))
        monkeypatch.setenv("FOREBAY_AGENT_LINGER_S", "0")
        yield path


def end_agents(directory: Path) -> None:
    """Wait until nobody serves a job below it."""
    from tests.process.conftest import agent_pids, poll

    for pid in agent_pids(directory):
        os.kill(pid, signal.SIGTERM)
    poll(lambda: not agent_pids(directory), "the agent to end")


@pytest.mark.parametrize("nothing", [False, True])
def test_shared_memory_that_is_full(narrow: Path, tmp_path: Path, nothing: bool) -> None:
    """One line that names the place; no SIGBUS, which would end the training."""
    import torch

    if nothing:
        with (narrow / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while ballast.write(bytes(4096)):
                pass
    checkpointer = forebay.Checkpointer(tmp_path / "run")
    try:
        with pytest.raises(forebay.ForebayError, match=str(narrow)) as caught:
            checkpointer.save(1, {"w": torch.ones(2 * 2**20)})
        assert "\n" not in str(caught.value)
        if not nothing:
            assert caught.value.kind == "full"
    finally:
        checkpointer._leave(clean=True)
        end_agents(narrow)


def test_a_trainer_that_may_lock_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    path = Path("/dev/shm") / f"forebay-test-{secrets.token_hex(4)}"
    monkeypatch.setenv("FOREBAY_RUNTIME_DIR", str(path))
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    try:
        with forebay.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, {"w": torch.ones(10_000)}).wait("durable", 60.0)
        assert forebay.open(tmp_path / "run").steps() == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
        end_agents(path)
        shutil.rmtree(path, ignore_errors=True)
