"""Any order of saves, deaths, restarts, commits and deletes, against a dictionary.

Agents are real processes, killed with SIGKILL; trainers are played. After every rule each listed
step is complete and equal to what was staged, and what was told durable is listed; at the end
all that every rank staged is there, or can be committed.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forebay.commit.publish import Verdict, finish
from forebay.commit.reclaim import apply_keep, delete_step
from forebay.commit.retain import decide
from forebay.config import Keep
from forebay.errors import ForebayError
from forebay.format.messages import Phase, Ring
from forebay.restore.session import Session
from forebay.storage.directory import DirectoryStore
from tests.agents import Nursery
from tests.cluster import Cluster
from tests.expected import TOTAL_BYTES, Expected, Snapshot

LAYOUTS = st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2)])
STEPS = st.integers(1, 9)
RANKS = st.integers(0, 3)
MASKS = st.integers(1, 14)  # bit r: rank r saves
NODES = st.integers(0, 1)
DEATHS = st.sampled_from(
    [
        ("put_large", "rank-"),
        ("put", "record"),
        ("put", "index"),
        ("put", "state"),
        ("create", "manifests"),
        ("get", "record"),
        ("head", ""),
        ("delete", ""),
    ]
)


class Cut(Exception):  # noqa: N818 - stands for a death
    """Whoever deleted is dead."""


class Dying(DirectoryStore):
    """Its user dies after so many deletes."""

    def __init__(self, root: Path, deletes: int) -> None:
        super().__init__(root)
        self._left = deletes

    def delete(self, key: str) -> bool:
        if not self._left:
            raise Cut
        self._left -= 1
        return super().delete(key)


class Life(RuleBasedStateMachine):
    """One run and all that can happen to it."""

    place: ClassVar[Callable[[], tuple[Path, Path]]]
    nursery: ClassVar[Nursery]
    counts: ClassVar[Counter[str]]

    @initialize(layout=LAYOUTS, local=st.booleans(), keep_last=st.sampled_from([None, None, 2]))
    def begin(self, layout: tuple[int, int], local: bool, keep_last: int | None) -> None:
        self.root, self.shared = type(self).place()
        self.local, self.keep_last = local, keep_last
        self.cluster = Cluster(
            self.root, self.shared, self.nursery, local=local, keep_last=keep_last
        )
        self.expected = Expected(self.cluster.run, keep_last)
        self.used_nodes = {0}
        self.saves: Counter[int] = Counter()
        self.last: Snapshot | None = None
        self._start(layout)
        self.counts["sequences"] += 1

    def _did(self, what: str) -> None:
        self.counts["rules"] += 1
        self.counts[what] += 1

    def _start(self, layout: tuple[int, int]) -> None:
        self._spoil()
        self.saves.clear()
        self.cluster.begin(*layout)
        self.used_nodes |= set(range(layout[1]))

    def _spoil(self) -> None:
        """What is not whole by now never will be."""
        if self.last is not None and not self.last.whole:
            self.last.spoiled = True
        self.last = None

    @rule(step=STEPS, ring=st.booleans())
    def save(self, step: int, ring: bool) -> None:
        """All ranks that live save a step, which an earlier start may have saved too."""
        self._save(step, 15, ring)

    @rule(step=STEPS)
    def save_and_wait(self, step: int) -> None:
        """All ranks save, and hear how it ended."""
        self._save(step, 15, True)
        self.wait()

    @rule(step=STEPS)
    def save_with_a_new_start(self, step: int) -> None:
        """The job, killed, starts again as it was and saves at once: often a step that is there."""
        self._start((len(self.cluster.ranks), self.cluster.nodes))
        self._save(step, 15, False)

    @rule(step=STEPS, mask=MASKS, ring=st.booleans())
    def save_some(self, step: int, mask: int, ring: bool) -> None:
        """Some ranks save."""
        self._save(step, mask, ring)

    def _save(self, step: int, mask: int, ring: bool) -> None:
        self._spoil()
        self.saves[step] += 1
        count = self.saves[step]
        attempt = self.cluster.attempt if count == 1 else f"{self.cluster.attempt}.{count}"
        self.last = Snapshot(step, attempt, len(self.cluster.ranks))
        self.expected.snapshots[step, attempt] = self.last
        self._stage(mask, ring)
        self._did("saves" if self.last.whole else "partial saves")

    def _stage(self, mask: int, ring: bool) -> None:
        made = self.last
        assert made is not None
        for rank in self.cluster.ranks:
            if not rank.alive:
                made.spoiled = True
            if rank.rank in made.data or not rank.alive or not mask >> rank.rank & 1:
                continue
            free = rank.free_slots()
            linked = self.cluster.linked(rank)
            if not free:
                made.spoiled = True
                if linked:
                    self._send(rank.skip, made.step, made.attempt)
                continue
            rank.saving = made.attempt
            rank.fill(made.step, attempt=made.attempt, slot=free[0])
            made.data[rank.rank] = rank.data(made.step)
            if ring and linked:
                self._send(rank.send, Ring(arena=rank.arena))

    @staticmethod
    def _send(send: Callable[..., None], *what: Any) -> None:
        with contextlib.suppress(OSError):  # its agent has just died
            send(*what)

    @rule(ring=st.booleans())
    def save_late(self, ring: bool) -> None:
        """The ranks that have not saved the last step do so now."""
        if self.last is not None and not self.last.spoiled and not self.last.whole:
            self._stage(15, ring)
            self._did("late saves")

    def _is_of_this_start(self, made: Snapshot) -> bool:
        return made.attempt.partition(".")[0] == self.cluster.attempt

    @rule()
    def wait(self) -> None:
        """All living ranks wait for what they saved whole, with agents that live."""
        self.cluster.serve_all()
        for made in list(self.expected.snapshots.values()):
            if not self._is_of_this_start(made) or not made.whole:
                continue
            for rank in self.cluster.ranks:
                if rank.alive and not made.spoiled:
                    self._outcome(made, self.cluster.hear(rank, made.step, made.attempt))
        self._did("waits")

    def _outcome(self, made: Snapshot, said: Any) -> None:
        """A whole snapshot is committed; else another start's was first, or a node was late."""
        if said.phase is Phase.COMMITTED:
            if not made.deleted and not self._pruned(made):
                self.expected.told_durable(made.step, made.attempt)
                self._did("durable")
            return
        late = said.kind == "deadline" and self.cluster.nodes > 1
        other = said.kind == "conflict" and "already committed by attempt" in said.detail
        gone = said.kind == "incomplete" and "deleted since" in said.detail and made.deleted
        assert late or other or gone, (made.step, made.attempt, said)

    def _pruned(self, made: Snapshot) -> bool:
        """True when the agents' own retention may have taken it by now."""
        listed = self.expected.catalog.steps()
        return (
            self.keep_last is not None
            and made.step not in listed
            and sum(step > made.step for step in listed) >= self.keep_last
        )

    @precondition(lambda self: self.local)
    @rule()
    def wait_local(self) -> None:
        """All living ranks wait until what they saved is on the local tier."""
        made = self.last
        if made is None or not made.whole or made.spoiled:
            return
        self.cluster.serve_all()
        if not all(rank.alive for rank in self.cluster.ranks):
            return
        for rank in self.cluster.ranks:
            self.cluster.hear(
                rank, made.step, made.attempt, Phase.LOCAL, Phase.UPLOADING, Phase.SEALED
            )
        made.local = True
        self._did("local")

    @rule(node=NODES)
    def kill_agent(self, node: int) -> None:
        self.cluster.kill_agent(node)
        self._did("agents killed")

    @rule(death=DEATHS, after=st.integers(1, 3))
    def arm(self, death: tuple[str, str], after: int) -> None:
        """An agent dies in a call of the durable tier."""
        self.cluster.arm(*death, after)
        self._did("deaths in a call")

    @rule()
    def start_agents(self) -> None:
        self.cluster.serve_all()
        self._did("agents started")

    @rule(number=RANKS, in_copy=st.booleans())
    def kill_rank(self, number: int, in_copy: bool) -> None:
        rank = self.cluster.ranks[number % len(self.cluster.ranks)]
        self._spoil()
        if in_copy and rank.alive:
            rank.die_in_copy(1)
        rank.die()
        self._did("ranks killed")

    @rule(layout=LAYOUTS, settle=st.booleans())
    def restart(self, layout: tuple[int, int], settle: bool) -> None:
        """All ranks die; the job starts again on as many as there are now."""
        self._start(layout)
        if settle:
            self.cluster.serve_all()
            self.cluster.settle(*range(layout[1]))
        self._did("restarts")

    @rule(layout=LAYOUTS)
    def leave(self, layout: tuple[int, int]) -> None:
        """All ranks take leave: the agents finish and clean up. Then the job starts again."""
        self._spoil()
        mine = [m for m in self.expected.snapshots.values() if self._is_of_this_start(m)]
        if all(rank.alive for rank in self.cluster.ranks) and all(made.whole for made in mine):
            self.wait()
            self.cluster.settle(*range(self.cluster.nodes))
            self.cluster.serve_all()
            for rank in self.cluster.ranks:
                rank.bye()
            for node in range(self.cluster.nodes):
                if node in self.cluster.agents:
                    log = self.cluster.log(node)
                    assert self.cluster.agents[node].ended(60.0), f"node {node} stays: {log}"
            self._did("leaves")
        self._start(layout)

    @precondition(lambda self: self.local)
    @rule(layout=LAYOUTS)
    def reboot(self, layout: tuple[int, int]) -> None:
        """Every node loses power: memory is gone, the local tier is not."""
        for rank in self.cluster.ranks:
            rank.die()
        for node in list(self.cluster.agents):
            self.cluster.kill_agent(node)
        for path in self.shared.glob("*"):
            shutil.rmtree(path)
        for made in self.expected.snapshots.values():
            made.lost = made.lost or not made.local
        self._start(layout)
        self._did("reboots")

    def _quiet(self) -> None:
        """Nothing is under way: a delete must not meet a commit of the same step.

        Ranks that live and have not saved the last step say that they do not.
        """
        self.cluster.disarm()
        self.cluster.serve_all()
        for made in self.expected.snapshots.values():
            if self._is_of_this_start(made) and not made.whole:
                made.spoiled = True
                for rank in self.cluster.ranks:
                    if rank.alive and rank.rank not in made.data:
                        rank.skip(made.step, made.attempt)
        self.cluster.settle(*self.used_nodes)
        self.expected.check()

    @rule(number=st.integers(0, 20))
    def commit(self, number: int) -> None:
        """``forebay commit`` of something that an earlier start left."""
        if self.keep_last is not None:
            self._quiet()
        left = self.expected.catalog.unfinished()
        if not left:
            return
        one = left[number % len(left)]
        try:
            verdict, manifest = finish(self.expected.store, one.step, one.attempt)
        except ForebayError:
            return
        assert verdict in (Verdict.COMMITTED, Verdict.SAME)
        if self.keep_last is None:
            self.expected.told_durable(manifest.step, manifest.attempt)
        self._did("commits by hand")

    @rule(last=st.integers(1, 3), every=st.sampled_from([None, 2, 3]))
    def prune(self, last: int, every: int | None) -> None:
        self._quiet()
        keep = Keep(last=last, every=every)
        listed = self.expected.check()
        kept = [d.step for d in decide(listed, keep) if d.keep]
        for step in set(listed) - set(kept):
            self.expected.told_to_go(step, listed[step])
        gone = apply_keep(self.expected.store, keep)
        assert sorted(gone) == sorted(set(listed) - set(kept))
        assert self.expected.catalog.steps() == kept
        self._did("prunes")

    @rule(number=st.integers(0, 20), deletes=st.integers(0, 8))
    def delete(self, number: int, deletes: int) -> None:
        """Delete a step; with few ``deletes`` whoever does it dies on the way."""
        self._quiet()
        listed = self.expected.check()
        if not listed:
            return
        step = sorted(listed)[number % len(listed)]
        self.expected.told_to_go(step, listed[step])
        try:
            delete_step(Dying(self.cluster.run, deletes or 1000), step)
        except Cut:
            self._did("deletes cut short")
        assert step not in self.expected.catalog.steps()
        self._did("deletes")

    @rule(number=st.integers(0, 20), rank=RANKS, world=st.integers(1, 4))
    def restore(self, number: int, rank: int, world: int) -> None:
        """A rank of a job of any size restores, from memory, local tier or durable tier."""
        if self.keep_last is not None:
            self._quiet()
        listed = self.expected.check()
        if not listed:
            return
        step = sorted(listed)[number % len(listed)]
        rank %= world
        session = Session(
            store=self.expected.store,
            manifest=self.expected.catalog.manifest(step),
            rank=rank,
            world_size=world,
            node=0,
            job_directory=self.cluster.directory(0),
            local=None,
            strict=True,
            allow_cast=False,
            per_rank="skip",
        )
        state: dict[str, Any] = {"model": {"w": torch.zeros(TOTAL_BYTES, dtype=torch.uint8)}}
        state["step"] = 0
        session.check_unused(session.bind(state))
        session.fetch()
        report = session.apply()
        found = state["model"]["w"].numpy()
        assert (found == self.expected.array(step, listed[step])).all()
        assert state["step"] == step
        assert not report.bad_ranges
        self._did("restores")
        self.counts["from memory"] += "memory" in report.by_source

    @invariant()
    def as_the_dictionary_says(self) -> None:
        if hasattr(self, "expected"):
            self.expected.check()

    def teardown(self) -> None:
        if not hasattr(self, "expected"):
            return
        try:
            self._end()
        finally:
            self.cluster.close()
            self.counts["agents died"] += self.cluster.deaths
            self.counts["steps compared"] += self.expected.checked
            shutil.rmtree(self.shared, ignore_errors=True)

    def _end(self) -> None:
        """All trainers are gone; whatever every rank staged is there, or can be committed."""
        self._spoil()
        for rank in self.cluster.ranks:
            rank.die()
        for _ in range(2):  # the second time the agent of node 0 finds what other nodes sealed
            self.cluster.settle(*self.used_nodes)
            for node in self.used_nodes:
                self.cluster.kill_agent(node)
        for (step, attempt), made in self.expected.snapshots.items():
            listed = self.expected.check()
            if not made.whole or made.spoiled or made.deleted or made.lost or step in listed:
                continue
            if self.keep_last is not None and sum(s > step for s in listed) >= self.keep_last:
                continue
            verdict, _ = finish(self.expected.store, step, attempt)
            assert verdict is Verdict.COMMITTED, (step, attempt, verdict)
            self.counts["committed at the end"] += 1
        self.expected.check()


def live(
    places: Callable[[], tuple[Path, Path]], sequences: int, rules: int, *, derandomize: bool
) -> Counter[str]:
    """Run the machine; returns how often each thing was done."""
    nursery = Nursery()
    try:
        kind = type("Life", (Life,), {"place": staticmethod(places), "nursery": nursery})
        kind.counts = Counter()  # type: ignore[attr-defined]
        run_state_machine_as_test(
            kind,
            settings=settings(
                max_examples=sequences,
                stateful_step_count=rules,
                derandomize=derandomize,
                database=None,
                deadline=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                phases=[Stage.explicit, Stage.generate],  # to shrink: add Stage.shrink
            ),
        )
        return kind.counts  # type: ignore[attr-defined]
    finally:
        nursery.close()


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Callable[[], tuple[Path, Path]]]:
    """A new directory for each sequence, and one in shared memory."""
    token, numbers = secrets.token_hex(4), itertools.count()

    def place() -> tuple[Path, Path]:
        number = next(numbers)
        root, shared = tmp_path / str(number), Path(f"/dev/shm/forebay-test-{token}-{number}")
        root.mkdir()
        shared.mkdir(mode=0o700)
        return root, shared

    yield place
    for path in Path("/dev/shm").glob(f"forebay-test-{token}-*"):
        shutil.rmtree(path, ignore_errors=True)


def told(counts: Counter[str]) -> str:
    rest = ", ".join(f"{what}: {n}" for what, n in sorted(counts.items()) if what != "sequences")
    return f"sequences: {counts['sequences']}, {rest}, violations: 0"


def test_any_order_of_everything(places: Callable[[], tuple[Path, Path]]) -> None:
    counts = live(places, 14, 30, derandomize=True)
    print(told(counts))
    assert counts["sequences"] >= 10
    assert counts["rules"] >= 150
    assert counts["durable"] >= 30


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_any_order_of_everything_for_long(places: Callable[[], tuple[Path, Path]]) -> None:
    """Other sequences each time; what fails is told as the calls that lead to it."""
    counts = live(places, 400, 60, derandomize=False)
    print(told(counts))
    assert counts["sequences"] >= 400
    assert counts["rules"] >= 8000
