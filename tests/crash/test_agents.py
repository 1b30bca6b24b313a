"""The power is cut at every moment of what two nodes' real agents do; then they start again."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from forebay.commit.catalog import Catalog
from forebay.drain import finish, service
from forebay.drain.job import Snapshot
from forebay.drain.journal import Ended, Spilled, Uploaded, journal_path, read_journal
from forebay.drain.service import Agent
from forebay.drain.trainers import Trainers
from forebay.format import names
from forebay.format.messages import AGENT_LOCK, AGENT_SOCKET, AgentConfig, Phase, job_name
from forebay.storage.directory import DirectoryStore
from forebay.testing.disk import Count, State, explore
from forebay.testing.recorder import Recorder
from tests.crash.judge import COMMITTED, Shards, is_whole, promised, records_have_bytes
from tests.player import ATTEMPT, Player

NODES, RANKS_OF_NODE, STEPS = 2, 2, (1, 2, 3, 4)
SPILLED = "spilled"


class Site:
    """Where things are: the durable run and the nodes' disks below ``disk``, shared memory not.

    Names on the local tier and lines of a journal tell of the run's path, so a state is made there.
    """

    def __init__(self, disk: Path, memory: Path) -> None:
        self.disk = disk
        self.memory = memory
        self.run = disk / "run"
        self.locals = [disk / f"local-{node}" for node in range(NODES)]
        self.jobs = [memory / f"job-{node}" for node in range(NODES)]

    def config(self, node: int, linger_s: float) -> AgentConfig:
        return AgentConfig(
            run=str(self.run),
            local=str(self.locals[node]),
            node=node,
            keep_last=2,
            linger_s=linger_s,
            store_timeout_s=5.0,
            gather_timeout_s=30.0,
        )

    def home(self, node: int) -> Path:
        """A node's directory on its local tier."""
        return self.locals[node] / job_name(str(self.run), node)

    async def agents(self, *, linger_s: float = 0.0) -> None:
        """Both agents, until neither has anything left to do, and for so long nobody came."""
        for job in self.jobs:
            job.mkdir(mode=0o700, parents=True, exist_ok=True)
        locks = [os.open(job / AGENT_LOCK, os.O_RDWR | os.O_CREAT, 0o600) for job in self.jobs]
        try:
            await asyncio.gather(
                *(
                    Agent(job, self.config(node, linger_s), locks[node]).run()
                    for node, job in enumerate(self.jobs)
                )
            )
        finally:
            for lock in locks:
                os.close(lock)

    def cut_power(self, state: State) -> None:
        """Put a state in the place of what is there; nothing in memory is left."""
        for place in (self.disk, self.memory):
            shutil.rmtree(place, ignore_errors=True)
        self.disk.mkdir()
        state.make(self.disk)

    def players(self) -> list[Player]:
        world = NODES * RANKS_OF_NODE
        return [
            Player(
                self.jobs[node],
                str(self.run),
                rank,
                world,
                nbytes=3000,
                node=node,
                nodes=NODES,
                node_ranks=tuple(range(node * RANKS_OF_NODE, (node + 1) * RANKS_OF_NODE)),
            )
            for node in range(NODES)
            for rank in range(node * RANKS_OF_NODE, (node + 1) * RANKS_OF_NODE)
        ]


def image(player: Player, step: int) -> bytes:
    """The file that a rank's snapshot becomes."""
    made = bytearray(player.image.header).ljust(player.image.total_bytes, b"\0")
    data, at = player.data(step), player.image.placed[0].start
    made[at : at + len(data)] = data
    return bytes(made)


def train(players: Sequence[Player], failed: list[BaseException]) -> None:
    """Save all steps, each once the one before is committed, and leave."""
    try:
        for player in players:
            player.connect()
        for step in STEPS:
            for player in players:
                player.save(step)
            for player in players:
                assert player.wait(step).phase is Phase.COMMITTED
        for player in players:
            player.bye()
    except BaseException as error:
        failed.append(error)
        for player in players:
            player.die()


def record(site: Site, monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Shards]:
    """Two agents and four trainers save, commit, delete and trim."""
    players, failed = site.players(), list[BaseException]()
    shards = {
        names.shard_key(step, ATTEMPT, player.layout.node, player.rank): image(player, step)
        for player in players
        for step in STEPS
    }
    recorder = Recorder(site.disk)
    tell = Trainers.tell

    def told(trainers: Trainers, snapshot: Snapshot) -> None:
        node = next(iter(snapshot.parts.values())).layout.node
        if snapshot.phase is Phase.COMMITTED:
            recorder.mark(f"{COMMITTED} {snapshot.step}")
        elif snapshot.phase is Phase.LOCAL:
            recorder.mark(f"{SPILLED} {node} {snapshot.step}")
        tell(trainers, snapshot)

    monkeypatch.setattr(Trainers, "tell", told)
    trainers = threading.Thread(target=train, args=(players, failed))

    async def all_of_it() -> None:
        ends = asyncio.ensure_future(site.agents(linger_s=60))
        while not all((job / AGENT_SOCKET).exists() for job in site.jobs):
            assert not ends.done()
            await asyncio.sleep(0.01)
        trainers.start()
        await ends

    with recorder:
        asyncio.run(all_of_it())
    trainers.join(60)
    monkeypatch.setattr(Trainers, "tell", tell)
    assert not failed, failed
    return recorder, shards


def spilled(marks: Iterable[str]) -> set[int]:
    """Steps of which every node has said that they are on its local tier."""
    told = {(int(step), node) for word, node, step in map(str.split, _of(SPILLED, marks))}
    return {step for step in STEPS if all((step, str(node)) in told for node in range(NODES))}


def _of(word: str, marks: Iterable[str]) -> list[str]:
    return [mark for mark in marks if mark.startswith(word + " ")]


def journals_are_true(site: Site, durable: DirectoryStore, shards: Shards) -> list[str]:
    """What a journal says is on a tier must be there, but for what was deleted since."""
    wrong = []
    newest = max(Catalog(durable).steps(), default=0)
    for node in range(NODES):
        home = site.home(node)
        local = DirectoryStore(home) if home.exists() else None
        path = journal_path(site.jobs[node], home)
        data = path.read_bytes() if path.exists() else b""
        for line, _ in read_journal(data):
            if line_step(line) < newest:
                continue
            if isinstance(line, Ended) and line.phase is Phase.SEALED:
                if durable.head(names.record_key(line.step, line.attempt, node)) is None:
                    wrong.append(f"node {node}: sealed step {line.step}, and no record")
            elif isinstance(line, Spilled):
                key = names.shard_key(line.step, line.attempt, node, line.rank)
                store = durable if isinstance(line, Uploaded) else local
                there = (
                    None
                    if store is None or store.head(key) is None
                    else store.get(key, max_bytes=1 << 20)
                )
                if there != shards[key]:
                    wrong.append(f"node {node}: {type(line).__name__} {key}, and it is not")
    return wrong


def line_step(line: object) -> int:
    """The step of a line that names one."""
    return int(getattr(line, "step", 1 << 30))


def judge(site: Site, state: State, shards: Shards) -> list[str]:
    """What is wrong before anybody has cleaned up."""
    if not site.run.exists():
        return ["the run is gone"] if promised(state.marks) else []
    durable = DirectoryStore(site.run)
    wrong = is_whole(durable, shards) + records_have_bytes(durable, shards)
    steps = Catalog(durable).steps()
    newest = max(promised(state.marks), default=0)
    if newest and newest not in steps:  # older ones may be deleted by then
        wrong.append(f"step {newest}: was promised, and is gone")
    for node in range(NODES):
        if site.home(node).exists():
            wrong += records_have_bytes(DirectoryStore(site.home(node)), shards)
    return wrong + journals_are_true(site, durable, shards)


async def goes_on(site: Site, state: State, shards: Shards) -> list[str]:
    """What is wrong once agents were started on what the power cut has left."""
    for disk in site.locals:
        disk.mkdir(exist_ok=True)
    await site.agents()
    durable = DirectoryStore(site.run)
    wrong = is_whole(durable, shards) + records_have_bytes(durable, shards)
    newest = max(Catalog(durable).steps(), default=0)
    wanted = max(spilled(state.marks) | promised(state.marks), default=0)
    if newest < wanted:
        wrong.append(f"step {wanted}: was on every node's disk, and step {newest} is the newest")
    durable.sweep("", older_than_s=-1.0)
    litter = [path for path in site.run.rglob(".*") if path.is_file()]
    return wrong + [f"{path}: litter" for path in litter]


@pytest.mark.parametrize(
    ("most", "every"), [(5, 100), pytest.param(4096, 1, marks=pytest.mark.soak)]
)
def test_power_cuts_of_real_agents(
    memory: Path, monkeypatch: pytest.MonkeyPatch, most: int, every: int
) -> None:
    """Each state is judged as it is, and every so many-th by agents that go on from it."""
    monkeypatch.setattr(service, "_POLL_S", 0.005)
    monkeypatch.setattr(finish, "ORPHAN_GATHER_S", 0.1)
    site = Site(memory / "disk", memory / "memory")
    for disk in site.locals:
        disk.mkdir(parents=True)
    recorder, shards = record(site, monkeypatch)
    count, gone_on = Count(), 0
    for state in explore(recorder.recording, count, most=most):
        site.cut_power(state)
        wrong = judge(site, state, shards)
        if count.distinct % every == 0:
            gone_on += 1
            wrong += asyncio.run(goes_on(site, state, shards))
        assert not wrong, f"{wrong}\nafter {state.at} operations; {state.lost}; {state.marks}"
    print(
        f"{len(recorder.recording.operations)} operations, {count.prefixes} prefixes "
        f"({count.sampled} sampled), {count.states} states, {count.distinct} differ, "
        f"{gone_on} gone on from, 0 violations"
    )
    assert count.distinct > 400
    assert gone_on > 5
