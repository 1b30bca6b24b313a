"""What a long run holds: memory, descriptors, threads, shared memory, journal, disk. All flat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import psutil
import pytest
import torch

import forebay
from forebay.drain.journal import COMPACT_BYTES
from forebay.drain.log import LIMIT_BYTES
from forebay.format.messages import AGENT_LOG
from tests.process.conftest import agent_pids, poll

KEEP = 2
GROWTH_BYTES = 8 * 2**20
AGENT_THREADS = 16  # its pools make threads as they need them, the loop, and what pyarrow keeps
WARM = 200  # of 1,000; 60 of 200; after which every pool has its threads and every table its size
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Held:
    """What both processes and the run hold at one moment; sizes in bytes."""

    trainer_rss: int
    agent_rss: int
    trainer_files: int
    agent_files: int
    trainer_threads: int
    agent_threads: int
    arenas: int
    journal: int
    log: int
    disk: int
    objects: int


def sizes(paths: Iterable[Path]) -> list[int]:
    """What files take, but for those that go away meanwhile."""
    found = []
    for path in paths:
        try:
            if path.is_file():
                found.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return found


def held(runtime: Path, run: Path, agent: int) -> Held:
    """The state of now."""
    trainer, other = psutil.Process(), psutil.Process(agent)
    journal = sum(sizes(runtime.rglob("journal")))
    log = sum(sizes(runtime.rglob(AGENT_LOG)))
    disk = sizes(run.rglob("*"))
    return Held(
        trainer.memory_info().rss,
        other.memory_info().rss,
        trainer.num_fds(),
        other.num_fds(),
        trainer.num_threads(),
        other.num_threads(),
        sum(sizes(runtime.rglob("*"))) - journal - log,
        journal,
        log,
        sum(disk),
        len(disk),
    )


def settled(runtime: Path, run: Path, agent: int, steps: list[int]) -> Held:
    """The state once retention, which runs behind the commit, has done its part."""
    poll(lambda: forebay.open(run).steps() == steps, f"steps {steps} to be what is kept")
    poll(lambda: len(list((run / "data").iterdir())) == KEEP, "old data to go")
    before = held(runtime, run, agent)

    def still() -> Held | None:
        nonlocal before
        now = held(runtime, run, agent)
        same = all(
            getattr(now, f.name) == getattr(before, f.name)
            for f in fields(Held)
            if not f.name.endswith("rss")
        )
        before = now
        return now if same else None

    found = poll(still, "both to be at rest")
    assert isinstance(found, Held)
    return found


@pytest.mark.parametrize("saves", [200, pytest.param(1000, marks=pytest.mark.soak)])
def test_what_is_held_stays_flat(tmp_path: Path, runtime: Path, saves: int) -> None:
    """RSS may grow by 8 MiB after the warm-up; descriptors, arenas and objects by nothing.

    The files of a run are equal but for the digits in its documents: within one checkpoint.
    """
    run, warm = tmp_path / "run", min(WARM, saves * 3 // 10)
    state = {"w": torch.ones(10_000), "rng": forebay.per_rank(forebay.rng()), "step": 0}
    with forebay.Checkpointer(run, keep=forebay.Keep(last=KEEP)) as checkpointer:
        first, journals = None, []
        for step in range(saves):
            state["step"] = step
            checkpointer.save(step, state).wait("durable", TIMEOUT_S)
            if step == warm:
                (agent,) = agent_pids(runtime)
                first = settled(runtime, run, agent, [step - 1, step])
            if step % 20 == 0:
                journals += sizes(runtime.rglob("journal"))
        last = settled(runtime, run, agent, [saves - 2, saves - 1])
        assert first is not None
        assert agent_pids(runtime) == [agent], "one agent all along"
    print(f"saves: {saves}, after {warm}: {first}, at the end: {last}")
    for who in ("trainer", "agent"):
        grown = getattr(last, f"{who}_rss") - getattr(first, f"{who}_rss")
        assert grown < GROWTH_BYTES, f"{who} grew by {grown} bytes"
        name = f"{who}_files"
        assert getattr(last, name) <= getattr(first, name), name
    assert last.trainer_threads <= first.trainer_threads
    assert last.agent_threads <= AGENT_THREADS
    assert last.arenas == first.arenas
    assert last.log < LIMIT_BYTES
    assert last.objects == first.objects
    assert abs(last.disk - first.disk) < first.disk // KEEP
    assert max(journals) < 2 * COMPACT_BYTES, journals
