"""Real training, killed again and again: it ends with the weights of one that never was."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.commit.verify import Finding, verify_step
from forebay.format.messages import AGENT_LOCK, job_directory
from forebay.locks import lock_owner
from tests.process.conftest import Ranks, poll

KILLS, ALL_KILLS = 30, 300
WORLD = 2
EVERY = 2
NAP_S = 0.02
VICTIMS = ("rank",) * 2 + ("all",) + ("agent",) * 4 + ("committer",) * 5


class Training:
    """One training in one directory, started anew after each kill of a rank."""

    def __init__(self, home: Path, runtime: Path, start_ranks: Callable[..., Ranks]) -> None:
        self.home, self.run, self.runtime = home, home / "run", runtime
        self._start_ranks = start_ranks
        home.mkdir()
        self.ranks = self.start()

    def start(self) -> Ranks:
        """All ranks, until each has trained a step."""
        (self.home / "local").mkdir(exist_ok=True)
        before = self.lines("losses")
        ranks = self._start_ranks(
            "train_on",
            WORLD,
            home=str(self.home),
            url=str(self.run),
            every=EVERY,
            nap_s=NAP_S,
            local=str(self.home / "local"),
        )

        def trains() -> bool:
            if len(ranks.alive()) < WORLD:
                pytest.fail(f"a rank ended by itself\n{ranks.log_tails()}")
            return self.lines("losses") > before

        poll(trains, "the first step after a start")
        return ranks

    def lines(self, name: str) -> int:
        """How many lines rank 0 has logged."""
        path = self.home / f"{name}-0"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def losses(self, rank: int) -> dict[int, set[str]]:
        """Each loss that was ever logged, by step; a torn last line is none."""
        found: dict[int, set[str]] = {}
        for line in (self.home / f"losses-{rank}").read_text().split("\n")[:-1]:
            step, bits = line.split(" ")
            found.setdefault(int(step), set()).add(bits)
        return found

    def committed(self) -> set[int]:
        """Steps that a rank was told are durable."""
        return {
            int(line)
            for path in self.home.glob("committed-*")
            for line in path.read_text().split("\n")[:-1]
        }

    def kill(self, victim: str, wait_s: float) -> None:
        """Kill, at a random moment; the training is started again where that ended it."""
        time.sleep(wait_s)
        if victim in ("agent", "committer"):
            if victim == "committer":
                poll(self.in_commit, "a commit to begin")
            agent = poll(self.agent, "an agent to kill")
            os.kill(agent, signal.SIGKILL)
            poll(lambda: self.agent() not in (None, agent), "the next agent")
            return
        os.kill(self.ranks.pids[random.Random(wait_s).randrange(WORLD)], signal.SIGKILL)
        if victim == "all":
            os.kill(poll(self.agent, "an agent to kill"), signal.SIGKILL)
        self.ranks.kill()  # what a launcher does once one of its ranks is gone
        self.ranks = self.start()

    def agent(self) -> int | None:
        """The agent that serves the job now."""
        return lock_owner(job_directory(self.runtime, str(self.run), 0) / AGENT_LOCK)

    def in_commit(self) -> bool:
        """Whether the newest step has its record, or more, and no manifest yet."""
        data = sorted(self.run.glob("data/*"))
        if not data or (self.run / "manifests" / f"{data[-1].name}.json").exists():
            return False
        return any(data[-1].glob("*/*/record.json.zst"))

    def finish(self) -> tuple[int, list[Any]]:
        """Let it train on for some steps to its end: the last step, and what each rank returned."""
        last = max(self.losses(0)) + 40
        stop = self.home / "stop"
        stop.with_suffix(".new").write_text(str(last))
        stop.with_suffix(".new").rename(stop)
        return last, self.ranks.wait()

    def damaged(self) -> list[str]:
        """Acknowledged steps that are gone, and what is not whole in those that are there."""
        run = forebay.open(self.run)
        steps = run.steps()
        gone = [f"step {step} is gone" for step in sorted(self.committed() - set(steps))]
        return gone + [
            f"step {step}: {found.what}"
            for step in steps
            for found in verify_step(run.catalog, run.manifest(step))
            if isinstance(found, Finding)
        ]


def undisturbed(home: Path, last: int, start_ranks: Callable[..., Ranks]) -> list[Any]:
    """The same training with no checkpoint, no agent and no kill."""
    home.mkdir()
    (home / "stop").write_text(str(last))
    ranks = start_ranks("train_on", WORLD, home=str(home), url=None, every=EVERY, nap_s=0.0)
    return ranks.wait()


def loop(kills: int, tmp_path: Path, runtime: Path, start_ranks: Callable[..., Ranks]) -> None:
    seed = int(os.environ.get("FOREBAY_KILL_SEED", "1"))
    chance = random.Random(seed)
    training = Training(tmp_path / "killed", runtime, start_ranks)
    done: Counter[str] = Counter()
    violations: list[str] = []
    for _ in range(kills):
        victim = chance.choice(VICTIMS)
        training.kill(victim, chance.uniform(0.0, 0.4))
        done[victim] += 1
        told = training.committed()
        gone = told - set(forebay.open(training.run).steps()) if told else set()
        violations += [f"after a kill of {victim}: step {step} is gone" for step in sorted(gone)]
    last, weights = training.finish()
    reference = undisturbed(tmp_path / "undisturbed", last, start_ranks)
    if weights != reference:
        violations.append("the final tensors differ")
    for rank in range(WORLD):
        theirs = (tmp_path / "undisturbed" / f"losses-{rank}").read_text().splitlines()
        wanted = {int(line.split(" ")[0]): {line.split(" ")[1]} for line in theirs}
        found = training.losses(rank)
        violations += [
            f"rank {rank}, step {step}: losses {found.get(step)}, expected {wanted[step]}"
            for step in wanted
            if found.get(step) != wanted[step]
        ]
    violations += training.damaged()
    print(
        f"kills: {done.total()} (seed {seed}: {dict(done)}), {last} steps, "
        f"{len(training.committed())} acknowledged, violations: {len(violations)}"
    )
    assert not violations, "\n".join(violations[:20])
    assert done.total() >= kills
    assert len(training.committed()) >= kills // 2


@pytest.mark.timeout(900)
def test_killed_thirty_times(
    tmp_path: Path, runtime: Path, start_ranks: Callable[..., Ranks]
) -> None:
    loop(KILLS, tmp_path, runtime, start_ranks)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_killed_three_hundred_times(
    tmp_path: Path, runtime: Path, start_ranks: Callable[..., Ranks]
) -> None:
    loop(ALL_KILLS, tmp_path, runtime, start_ranks)
