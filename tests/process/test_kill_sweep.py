"""An agent that is killed before each of its calls that change a disk, one after the other."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from tests.process.agents import Agents
from tests.process.course import Course, record
from tests.process.strace import Point

SAMPLE_S = 15.0
SAMPLE_POINTS = 20
ALL_POINTS = 120


def kill_at(
    point: Point, root: Path, shared: Path, agents: Agents, ordered: bool
) -> tuple[str, list[str]]:
    """Which call the agent was killed at, and what was not as promised afterwards."""
    course = Course(root, shared, agents)
    try:
        inject = f"{point.call}:signal=SIGKILL:when={point.number}"
        hit, _ = course.go([point.call], inject, ordered=ordered)
        course.finish()
        return hit, course.problems + course.litter()
    finally:
        course.end()
        shutil.rmtree(root)


def sweep(
    tmp_path: Path,
    shared: Path,
    agents: Agents,
    points: list[tuple[Point, bool]],
    until_s: float = float("inf"),
) -> tuple[int, list[str]]:
    """How many kills happened, and the violations, each with its point."""
    killed, violations = 0, []
    for number, (point, ordered) in enumerate(points):
        if time.monotonic() > until_s and killed >= SAMPLE_POINTS:
            break
        hit, found = kill_at(point, tmp_path / f"p{number}", shared, agents, ordered)
        killed += bool(hit)
        violations += [f"killed at {point} ({hit}): {one}" for one in found]
    return killed, violations


def all_points(
    tmp_path: Path, shared: Path, agents: Agents, traced_calls: list[str]
) -> list[tuple[Point, bool]]:
    """Every call of an undisturbed run, with the calls in one order and without."""
    return [
        (point, ordered)
        for ordered in (True, False)
        for point in record(tmp_path / f"record-{ordered}", shared, agents, traced_calls, ordered)
    ]


@pytest.mark.timeout(900)
def test_killed_at_a_sample_of_all_calls(
    tmp_path: Path, shared: Path, agents: Agents, traced_calls: list[str]
) -> None:
    seed = int(os.environ.get("FOREBAY_KILL_SEED", "1"))
    points = all_points(tmp_path, shared, agents, traced_calls)
    random.Random(seed).shuffle(points)
    # every call once first, then the others as far as the time goes
    first = {point.call: (point, ordered) for point, ordered in reversed(points)}
    chosen = [*first.values(), *(one for one in points if one not in first.values())]
    killed, violations = sweep(
        tmp_path, shared, agents, chosen, until_s=time.monotonic() + SAMPLE_S
    )
    print(f"kill points: {killed} of {len(points)} (seed {seed}), violations: {len(violations)}")
    assert not violations, "\n".join(violations)
    assert killed >= SAMPLE_POINTS


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_killed_at_every_call(
    tmp_path: Path, shared: Path, agents: Agents, traced_calls: list[str]
) -> None:
    points = all_points(tmp_path, shared, agents, traced_calls)
    killed, violations = sweep(tmp_path, shared, agents, points)
    print(f"kill points: {killed} of {len(points)}, violations: {len(violations)}")
    assert not violations, "\n".join(violations)
    assert killed >= ALL_POINTS
