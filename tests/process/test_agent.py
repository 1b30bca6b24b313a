"""The node agent as a process of its own: real signals, real files, trainers played by the test."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from forebay.commit.catalog import Catalog
from forebay.drain.agent import run_agent
from forebay.drain.journal import Accepted, Journal, journal_path
from forebay.drain.slots import Slots
from forebay.drain.wire import ask
from forebay.errors import BusyError
from forebay.format import names
from forebay.format.digests import digest
from forebay.format.messages import (
    AGENT_CONFIG,
    AGENT_LOCK,
    AGENT_SOCKET,
    AgentConfig,
    AskSettled,
    AskStatus,
    Phase,
    Refused,
    StatusReply,
    Welcome,
    job_directory,
    job_name,
)
from forebay.storage.directory import DirectoryStore
from forebay.testing.faulty import Rule
from tests.player import Player, connected, receive

TIMEOUT_S = 60.0


def poll(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.01)
    return found


class Job:
    """A run directory, its job directory, the agents started for it, and its players."""

    def __init__(self, root: Path, shared: Path, *, name: str = "run", node: int = 0) -> None:
        self.root = root
        self.run_path = root / name
        self.script = root / f"{name}.faults.json"
        self.url = str(self.run_path)
        self.shared = shared
        self.node = node
        self.options: dict[str, Any] = {}
        self.command = ["-m", "forebay.drain.agent"]
        self.agents: list[subprocess.Popen[bytes]] = []
        self.players: list[Player] = []

    @property
    def directory(self) -> Path:
        return job_directory(self.shared, self.url, self.node)

    def faults(self, *rules: Rule) -> None:
        """From now on the durable tier follows these rules."""
        temporary = self.script.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(rules))
        temporary.rename(self.script)
        self.url = f"faulty+file://{self.run_path}?script={self.script}"

    def config(self, **options: Any) -> None:
        self.options |= options
        made = AgentConfig(**({"run": self.url, "local": None, "node": self.node} | self.options))
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.directory / AGENT_CONFIG).write_bytes(msgspec.json.encode(made))

    def player(self, rank: int = 0, world: int = 1, **options: Any) -> Player:
        made = Player(self.directory, self.url, rank, world, node=self.node, **options)
        self.players.append(made)
        return made

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        """Start an agent and wait until it answers."""
        self.config(**options)
        agent = self.launch()
        poll(lambda: agent.poll() is not None or self.answers(), "the agent to answer")
        assert agent.poll() is None, self.log()
        return agent

    def launch(self) -> subprocess.Popen[bytes]:
        with (self.root / "agent.log").open("ab") as log:
            agent = subprocess.Popen(
                [sys.executable, *self.command, str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.agents.append(agent)
        return agent

    def answers(self) -> bool:
        try:
            connected(self.directory).close()
        except OSError:
            return False
        return True

    def log(self) -> str:
        return (self.root / "agent.log").read_text()

    def status(self) -> StatusReply:
        reply = ask(self.directory / AGENT_SOCKET, AskStatus(), TIMEOUT_S)
        assert isinstance(reply, StatusReply)
        return reply

    def settle(self, timeout_s: float = TIMEOUT_S) -> StatusReply:
        reply = ask(self.directory / AGENT_SOCKET, AskSettled(timeout_s=timeout_s), 2 * TIMEOUT_S)
        assert isinstance(reply, StatusReply)
        return reply

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        agent.send_signal(signal.SIGKILL)
        agent.wait(TIMEOUT_S)

    def steps(self) -> list[int]:
        return Catalog(DirectoryStore(self.run_path)).steps()

    def check(self, step: int, attempt: str = "a1") -> None:
        """The step is committed and every stored byte is what the players put in."""
        catalog = Catalog(DirectoryStore(self.run_path))
        manifest = catalog.manifest(step)
        assert manifest.attempt == attempt
        found = {stored.rank: stored for stored in catalog.slices(manifest)}
        for player in self.players:
            if not player.layout.slices:
                assert player.rank not in found
                continue
            stored = found[player.rank]
            data = catalog.store.get_range(stored.key, stored.start, stored.nbytes)
            assert data == player.data(step)
            assert stored.digest == digest(data)

    def end(self) -> None:
        for player in self.players:
            player.die()
        for agent in self.agents:
            if agent.poll() is None:
                self.kill(agent)


@pytest.fixture
def shared() -> Iterator[Path]:
    path = Path("/dev/shm") / f"forebay-test-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def job(tmp_path: Path, shared: Path) -> Iterator[Job]:
    made = Job(tmp_path, shared)
    yield made
    made.end()


def local_home(job: Job) -> Path:
    return job.root / "local" / job_name(job.url, job.node)


def test_two_ranks_commit_and_the_agent_leaves_nothing_behind(job: Job) -> None:
    agent = job.start()
    one, two = job.player(0, 2), job.player(1, 2)
    for player in (one, two):
        assert isinstance(player.connect(), Welcome)
    for step in (1, 2, 3):
        one.save(step)
        two.save(step)
        for player in (one, two):
            assert player.wait(step).phase is Phase.COMMITTED
            assert player.free_slots() == [0, 1]
        job.check(step)
    assert job.status().committed == 3
    one.bye()
    two.bye()
    assert agent.wait(TIMEOUT_S) == 0, job.log()
    assert not job.directory.exists()


def test_after_a_restart_on_fewer_ranks_their_goodbyes_are_enough(job: Job) -> None:
    """What an earlier start left says nothing of who has to take leave now."""
    agent = job.start()
    earlier = [job.player(rank, 2) for rank in (0, 1)]
    for player in earlier:
        player.connect()
        player.save(1)
    for player in earlier:
        player.wait(1)
        player.die()
    alone = job.player(0, 1, generation=1)
    alone.connect(attempt="a2")
    alone.bye()
    assert agent.wait(TIMEOUT_S) == 0, job.log()
    assert not job.directory.exists()


def test_files_of_the_agent_are_for_its_user_alone(job: Job) -> None:
    job.start()
    for name in (AGENT_SOCKET, AGENT_LOCK):
        assert stat.S_IMODE((job.directory / name).stat().st_mode) == 0o600


def test_a_second_agent_names_the_first_and_ends(job: Job) -> None:
    first = job.start()
    assert job.launch().wait(TIMEOUT_S) == 0
    assert f"served by the agent with pid {first.pid}" in job.log()
    assert first.poll() is None


def test_a_rank_without_slices_writes_no_object(job: Job) -> None:
    job.start()
    one = job.player(0, 2, total_bytes=100_000)
    two = job.player(1, 2, nbytes=0, total_bytes=100_000)
    for player in (one, two):
        player.connect()
        player.save(5)
    assert one.wait(5).phase is Phase.COMMITTED
    job.check(5)
    stored = [info.key for info in DirectoryStore(job.run_path).list("data/")]
    assert names.shard_key(5, "a1", 0, 0) in stored
    assert names.shard_key(5, "a1", 0, 1) not in stored


def test_trainers_killed_after_staging_lose_nothing(job: Job) -> None:
    agent = job.start(linger_s=0.2)
    one, two = job.player(0, 2), job.player(1, 2)
    one.connect()
    two.connect()
    one.fill(7)
    two.fill(7)  # nobody rings, and both are gone at once
    one.die()
    two.die()
    assert agent.wait(TIMEOUT_S) == 0
    job.check(7)
    assert not job.directory.exists()


def test_an_agent_started_late_finds_what_is_staged(job: Job) -> None:
    job.player().fill(4)
    job.players[0].die()
    job.start(linger_s=0.2).wait(TIMEOUT_S)
    job.check(4)


def test_what_is_staged_after_a_reboot_is_not_freed_for_what_was_lost(job: Job) -> None:
    """The first arenas after a reboot have the names of those whose images went with the memory."""
    (job.root / "local").mkdir()
    job.config(local=str(job.root / "local"))
    lost = [job.player(rank, 2) for rank in (0, 1)]
    slots = Slots(job.directory)
    journal = Journal(journal_path(job.directory, local_home(job)))
    local_home(job).mkdir()
    for player in lost:
        player.fill(7)
    slots.refresh()
    for ticket in slots.occupied():
        said = Accepted(
            arena=ticket.arena, slot=ticket.slot, layout=ticket.layout, stamp=ticket.stamp
        )
        journal.write(said)
    journal.close()
    slots.close()
    for player in lost:
        player.die()
    shutil.rmtree(job.directory)
    job.players.clear()
    job.config()
    again = [job.player(rank, 2) for rank in (0, 1)]
    for before, player in zip(lost, again, strict=True):
        assert (player.fill(8, attempt="a2"), player.arena) == (0, before.arena)
    job.start()
    for player in again:
        player.connect("a2")
    assert job.settle().settled
    assert "step=7 attempt=a1 why=rank 0: its image is in no slot" in job.log()
    job.check(8, "a2")


def test_a_seal_whose_other_lines_were_lost_is_committed(job: Job) -> None:
    """The journal's disk refused a line, and took the later ones."""
    other = Job(job.root, job.shared, node=1)
    try:
        agent = job.start()
        one = job.player(0, 2, nodes=2, node_ranks=(0,))
        one.connect()
        one.save(3)
        one.wait(3, Phase.SEALED)
        job.kill(agent)
        journal = Journal(journal_path(job.directory, None))
        journal.restart([line for line in journal.replay() if not isinstance(line, Accepted)])
        job.start()
        other.start()
        two = other.player(1, 2, nodes=2, node_ranks=(1,))
        two.connect()
        two.save(3)
        assert two.wait(3).phase is Phase.COMMITTED
        assert job.settle().settled
        assert [s.phase for s in job.status().snapshots] == [Phase.COMMITTED]
    finally:
        other.end()


def test_an_agent_whose_directory_was_removed_leaves_the_next_start_alone(job: Job) -> None:
    """It drains what it has; the names that a new start has made since are not its own."""
    old = job.start(drain_bytes_per_s=2e5, linger_s=0.2)
    one = job.player(nbytes=1_000_000)
    one.connect()
    one.save(9)
    one.wait(9, Phase.UPLOADING)
    one.die()
    shutil.rmtree(job.directory)
    job.players.clear()
    two = job.player(nbytes=1_000_000)
    new = job.start(linger_s=600.0)
    two.connect("a2")
    two.save(10, attempt="a2")
    two.wait(10, Phase.UPLOADING)
    two.die()
    assert old.wait(TIMEOUT_S) == 0
    assert job.log().count("snapshot.uploading step=10") == 1
    assert job.answers()
    job.kill(new)
    job.start(drain_bytes_per_s=None)
    assert job.settle().settled
    job.check(9)
    job.check(10, "a2")


def test_a_local_tier_is_one_agent_s_alone(job: Job, tmp_path: Path) -> None:
    """Agents of two containers share the disk, and not what lies in shared memory."""
    local = str(job.root / "local")
    Path(local).mkdir()
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    other = Job(job.root, memory)
    try:
        agent = job.start(local=local, drain_bytes_per_s=2e5)
        one = job.player(nbytes=1_000_000)
        one.connect()
        one.save(1)
        one.wait(1, Phase.UPLOADING)
        other.config(local=local)
        waits = other.launch()
        poll(lambda: (other.directory / AGENT_LOCK).exists(), "the other agent to start")
        one.save(2)
        one.wait(2, Phase.LOCAL)
        assert not other.answers()
        one.die()
        job.kill(agent)
        poll(other.answers, "the other agent to take over")
        assert other.settle().settled
        assert waits.poll() is None
        job.check(1)
        job.check(2)
    finally:
        other.end()


def test_a_local_tier_that_another_agent_keeps_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = job.root / "local"
    local_home(job).mkdir(parents=True, mode=0o700)
    held, before = os.open(local_home(job), os.O_RDONLY), os.umask(0o077)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr("forebay.drain.agent._HANDOVER_S", 0.0)
        job.config(local=str(local))
        with pytest.raises(BusyError, match="another agent of this job"):
            run_agent(job.directory)
    finally:
        os.close(held)
        os.umask(before)


def _slow(job: Job, **options: Any) -> tuple[subprocess.Popen[bytes], Player, Player]:
    """Two ranks whose upload, of 2 x 6 MB, takes long."""
    agent = job.start(drain_bytes_per_s=2e5, **options)
    one, two = (job.player(rank, 2, nbytes=6_000_000) for rank in (0, 1))
    one.connect()
    two.connect()
    one.save(9)
    two.save(9)
    one.wait(9, Phase.UPLOADING)
    return agent, one, two


@pytest.mark.parametrize("local", [False, True])
def test_agent_killed_in_the_middle_of_an_upload_goes_on(job: Job, local: bool) -> None:
    options: dict[str, Any] = {}
    if local:
        (job.root / "local").mkdir()
        options["local"] = str(job.root / "local")
    agent, one, two = _slow(job, **options)
    poll(lambda: job.status().snapshots[0].done_bytes, "bytes to leave")
    assert (one.free_slots() == [0, 1]) is local  # on the local tier, the slots are free already
    job.kill(agent)
    assert job.steps() == []
    job.start(drain_bytes_per_s=None)
    one.connect()
    assert one.wait(9, Phase.COMMITTED).phase is Phase.COMMITTED
    job.check(9)
    assert one.free_slots() == two.free_slots() == [0, 1]
    reply = job.settle()
    assert reply.settled
    assert [s.phase for s in reply.snapshots] == [Phase.COMMITTED]


def test_what_was_uploaded_is_not_sent_again(job: Job) -> None:
    job.faults(Rule(op="put_large", match="rank-00001", do="eio", times=1))
    agent = job.start()
    one, two = job.player(0, 2), job.player(1, 2)
    one.connect()
    one.save(3)
    key = names.shard_key(3, "a1", 0, 0)
    path = job.run_path / key
    poll(path.exists, "the first shard")
    poll(lambda: one.free_slots() == [0, 1], "its slot")
    job.kill(agent)
    job.faults(Rule(op="put_large", match="rank-00000", do="enospc"))  # a second send would fail
    before = path.stat().st_mtime_ns
    job.start()
    one.connect()
    two.connect()
    two.save(3)
    assert two.wait(3).phase is Phase.COMMITTED
    assert path.stat().st_mtime_ns == before
    job.check(3)


def test_killed_between_a_write_and_its_note(job: Job) -> None:
    """The object is there, the journal does not say so: equal bytes count as done."""
    player = job.player()
    slot = player.fill(2)
    key = names.shard_key(2, "a1", 0, 0)
    start = player.head.image_start(slot)
    image = player.map[start : start + player.layout.image_bytes]
    job.run_path.mkdir()
    DirectoryStore(job.run_path).put(key, bytes(image))
    job.start()
    player.connect()
    assert player.wait(2).phase is Phase.COMMITTED
    job.check(2)


def test_another_object_of_the_same_size_is_no_success(job: Job) -> None:
    player = job.player()
    player.fill(2)
    key = names.shard_key(2, "a1", 0, 0)
    job.run_path.mkdir()
    DirectoryStore(job.run_path).put(key, bytes(player.layout.image_bytes))
    job.start()
    player.connect()
    ended = player.wait(2)
    assert (ended.phase, ended.kind) == (Phase.FAILED, "conflict")
    assert job.steps() == []


def test_killed_at_every_write_to_the_durable_tier(job: Job) -> None:
    """Whichever write the agent dies before, its successor commits the same."""
    places = [("put_large", "rank-00000"), ("put", "record"), ("put", "index"), ("create", "")]
    for step, (op, match) in enumerate(places, start=1):
        job.faults(Rule(op=op, match=match, do="kill"))
        job.start()
        player = job.players[0] if job.players else job.player()
        player.connect()
        player.save(step)
        poll(lambda: job.agents[-1].poll() is not None, f"the agent to die in {op} {match}")
        assert step not in job.steps()
        job.faults()
        agent = job.start()
        player.connect()
        assert player.wait(step, Phase.COMMITTED).phase is Phase.COMMITTED
        job.check(step)
        job.kill(agent)


def test_a_killed_record_write_that_took_effect(job: Job) -> None:
    """The record stands, the agent died before it knew: its own record is no conflict."""
    job.faults(Rule(op="put", match="record", do="lost_reply"))
    player = job.player()
    agent = job.start()
    player.connect()
    player.save(1)
    poll((job.run_path / names.record_key(1, "a1", 0)).exists, "the record")
    job.kill(agent)
    job.faults()
    job.start()
    player.connect()
    assert player.wait(1).phase is Phase.COMMITTED
    job.check(1)


def test_a_rank_that_died_before_staging_is_named(job: Job) -> None:
    job.start()
    one, two = job.player(0, 2), job.player(1, 2)
    one.connect()
    two.connect()
    one.save(3)
    two.die()
    ended = one.wait(3)
    assert ended.phase is Phase.ABANDONED
    assert "ranks 1 ended" in ended.detail
    assert one.free_slots() == [0, 1]
    assert job.steps() == []
    assert job.status().snapshots[0].missing_ranks == (1,)


def test_a_dead_rank_whose_child_keeps_its_connection_is_named(job: Job) -> None:
    """Data loaders are forked: they have the socket, and not the lock."""
    job.start()
    one, two = job.player(0, 2), job.player(1, 2)
    one.connect()
    two.connect()
    assert two.socket is not None
    childs = two.socket.dup()
    try:
        one.save(3)
        two.die()
        assert job.status().trainers == (0, 1)
        ended = one.wait(3)
        assert ended.phase is Phase.ABANDONED
        assert "ranks 1 ended" in ended.detail
    finally:
        childs.close()


def test_a_step_that_a_rank_went_past_is_given_up(job: Job) -> None:
    job.start()
    one, two = job.player(0, 2), job.player(1, 2)
    one.connect()
    two.connect()
    one.save(1)
    one.save(2)
    two.save(2)
    assert one.wait(2).phase is Phase.COMMITTED
    one.heard.clear()
    one.save(4)
    two.save(4)
    ended = one.wait(1)
    assert ended.phase is Phase.ABANDONED
    assert "ranks 1" in ended.detail


def test_a_skip_ends_the_set_at_once_and_late_ranks_hear_it(job: Job) -> None:
    job.start()
    one, two = job.player(0, 2), job.player(1, 2)
    one.connect()
    two.connect()
    one.save(6)
    poll(lambda: job.status().snapshots, "the snapshot")
    two.skip(6)
    ended = one.wait(6)
    assert (ended.phase, ended.detail) == (Phase.SKIPPED, "rank 1: no free slot")
    poll(lambda: one.free_slots() == [0, 1], "the slot")
    two.skip(7)
    poll(lambda: job.status().skipped == 2, "the second skip")
    one.wait(7)
    one.heard.clear()
    one.save(7)
    assert one.wait(7).phase is Phase.SKIPPED
    assert one.free_slots() == [0, 1]
    assert job.steps() == []


def test_a_full_durable_tier_fails_the_step_and_nothing_else(job: Job) -> None:
    job.faults(Rule(op="put_large", match="rank-00001", do="enospc", message="disk full"))
    job.start()
    one, two = job.player(0, 2), job.player(1, 2)
    for player in (one, two):
        player.connect()
        player.save(7)
    for player in (one, two):
        ended = player.wait(7)
        assert (ended.phase, ended.kind) == (Phase.FAILED, "full")
        assert "rank 1 on node 0 (model)" in ended.detail
        assert "disk full" in ended.detail
        poll(lambda player=player: player.free_slots() == [0, 1], "slots")
    assert job.steps() == []
    job.faults()
    for player in (one, two):
        player.save(8)
    assert one.wait(8).phase is Phase.COMMITTED
    assert job.steps() == [8]


def test_a_passing_failure_of_the_durable_tier_is_tried_again(job: Job) -> None:
    job.faults(Rule(op="put_large", do="eio", times=2), Rule(op="put", do="eio", times=1))
    job.start()
    player = job.player()
    player.connect()
    player.save(1)
    assert player.wait(1).phase is Phase.COMMITTED
    assert job.log().count("store.retry") == 3
    job.check(1)


def test_a_local_tier_that_fails_is_passed_over(job: Job) -> None:
    (job.root / "local").mkdir()
    job.start(local=str(job.root / "local"))
    player = job.player()
    player.connect()
    (local_home(job) / "data").write_text("in the way")
    player.save(1)
    assert player.wait(1).phase is Phase.COMMITTED
    assert "tier.failed tier=local step=1" in job.log()
    job.check(1)


def test_the_local_tier_keeps_the_last_two_committed_steps(job: Job) -> None:
    (job.root / "local").mkdir()
    job.start(local=str(job.root / "local"), keep_last=3)
    player = job.player()
    player.connect()
    for step in range(1, 6):
        player.save(step)
        player.wait(step, Phase.COMMITTED)
    assert job.settle().settled
    assert sorted(p.name for p in (local_home(job) / "data").iterdir()) == [
        f"{4:012d}",
        f"{5:012d}",
    ]
    assert job.steps() == [3, 4, 5]
    phases = [said.phase for said in player.heard if said.step == 5]
    assert phases == [Phase.LOCAL, Phase.UPLOADING, Phase.SEALED, Phase.COMMITTED]


def test_a_job_that_went_back_keeps_what_it_saves(job: Job) -> None:
    """Its steps are older than the newest: by their numbers retention would take each at once."""
    (job.root / "local").mkdir()
    job.start(local=str(job.root / "local"), keep_last=2)
    one = job.player()
    one.connect()
    for step in (80, 90, 100):
        one.save(step)
        one.wait(step)
    one.connect("a2")
    for step in (50, 60, 70):
        one.save(step, attempt="a2")
        assert one.wait(step).phase is Phase.COMMITTED
    assert job.settle().settled
    assert job.steps() == [60, 70, 90, 100]
    job.check(60, "a2")
    job.check(70, "a2")
    found = DirectoryStore(local_home(job)).list(names.DATA_PREFIX)
    steps = {name.step for info in found if (name := names.parse_data_key(info.key))}
    assert steps == {60, 70, 90, 100}


def test_a_near_snapshot_stays_local(job: Job) -> None:
    (job.root / "local").mkdir()
    job.start(local=str(job.root / "local"))
    player = job.player()
    player.connect()
    player.save(1, durable=False)
    assert player.wait(1).phase is Phase.KEPT_NEAR
    home = DirectoryStore(local_home(job))
    assert home.head(names.shard_key(1, "a1", 0, 0)) is not None
    assert home.head(names.record_key(1, "a1", 0)) is not None
    assert list(DirectoryStore(job.run_path).list("data/")) == []
    player.save(2)
    assert player.wait(2).phase is Phase.COMMITTED


def test_a_slow_upload_holds_no_slot_once_local(job: Job) -> None:
    (job.root / "local").mkdir()
    _agent, one, two = _slow(job, local=str(job.root / "local"))
    for step in (10, 11, 12):  # two slots a rank, and the upload of step 9 still crawls
        for player in (one, two):
            poll(player.free_slots, "a free slot")
            player.save(step)
        assert one.wait(step, Phase.LOCAL).phase is Phase.LOCAL
    assert job.steps() == []


def test_witnesses_that_differ_refuse_the_commit(job: Job) -> None:
    job.start()
    one, two = job.player(0, 2), job.player(1, 2)
    for player, seen in ((one, b"11111111"), (two, b"22222222")):
        player.connect()
        player.save(1, witness=seen)
    ended = one.wait(1)
    assert (ended.phase, ended.kind) == (Phase.FAILED, "conflict")
    assert "model/seen: rank 0 and rank 1" in ended.detail
    assert job.steps() == []


def test_two_jobs_side_by_side(job: Job, tmp_path: Path, shared: Path) -> None:
    other = Job(tmp_path, shared, name="other")
    try:
        agents = [job.start(), other.start()]
        mine, theirs = job.player(nbytes=50_000), other.player(nbytes=200_000)
        for player in (mine, theirs):
            player.connect()
            player.save(2)
            assert player.wait(2).phase is Phase.COMMITTED
        theirs.bye()
        assert agents[1].wait(TIMEOUT_S) == 0
        assert not other.directory.exists()
        mine.save(3)
        assert mine.wait(3).phase is Phase.COMMITTED
        assert job.steps() == [2, 3]
        assert other.steps() == [2]
    finally:
        other.end()


def test_two_nodes_commit_together_and_a_lost_one_is_named(tmp_path: Path, shared: Path) -> None:
    jobs = [Job(tmp_path, shared, node=node) for node in (0, 1)]
    try:
        made = []
        for node, job in enumerate(jobs):
            job.start(gather_timeout_s=3.0)
            made.append(job.player(node, 2, nodes=2, node_ranks=(node,)))
            made[-1].connect()
        for player in made:
            player.save(1)
        for player in made:
            assert player.wait(1).phase is Phase.COMMITTED
        made[0].save(2)
        ended = made[0].wait(2)
        assert (ended.phase, ended.kind) == (Phase.ABANDONED, "deadline")
        assert "no record of nodes 1" in ended.detail
        assert jobs[0].steps() == [1]
    finally:
        for job in jobs:
            job.end()


def test_start_up_commits_what_an_earlier_start_left_complete(job: Job) -> None:
    job.start()
    player = job.player()
    player.connect()
    player.save(4)
    player.wait(4)
    (job.run_path / names.manifest_key(4)).unlink()
    player.bye()
    job.agents[-1].wait(TIMEOUT_S)
    assert job.steps() == []
    job.start(linger_s=0.0).wait(TIMEOUT_S)
    job.check(4)


def test_sigterm_leaves_the_rest_for_the_next_agent(job: Job) -> None:
    (job.root / "local").mkdir()
    job.faults(Rule(op="create", match="manifests", do="eio"))
    agent = job.start(local=str(job.root / "local"))
    one, two = job.player(0, 2), job.player(1, 2)
    one.connect()
    two.connect()
    one.save(1)
    one_key = job.run_path / names.shard_key(1, "a1", 0, 0)
    poll(one_key.exists, "the first shard")
    agent.terminate()
    assert agent.wait(TIMEOUT_S) == 0, job.log()
    assert (job.directory / one.arena).exists()
    assert not (job.directory / AGENT_SOCKET).exists()
    two.fill(1)
    job.faults()
    job.start()
    one.connect()
    assert one.wait(1).phase is Phase.COMMITTED
    job.check(1)


def test_a_rank_of_another_run_is_refused(job: Job) -> None:
    job.start()
    answer = job.player().connect(run="/another/run")
    assert isinstance(answer, Refused)
    assert "/another/run" in answer.text
    assert job.url in answer.text


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\0\0\0\3abc", b"\0\0\0\0", b"\0"])
def test_a_malformed_frame_ends_that_connection_alone(job: Job, frame: bytes) -> None:
    job.start()
    player = job.player()
    player.connect()
    wire = connected(job.directory)
    wire.sendall(frame)
    wire.shutdown(1)
    with pytest.raises(ConnectionResetError):
        receive(wire)
    wire.close()
    player.save(1)
    assert player.wait(1).phase is Phase.COMMITTED


def test_a_file_that_is_no_arena_is_passed_over(job: Job) -> None:
    job.config()
    (job.directory / "rank-00009.0.arena").write_bytes(b"x" * 5000)
    job.start()
    player = job.player()
    player.connect()
    player.save(1)
    assert player.wait(1).phase is Phase.COMMITTED
    assert "arena.refused" in job.log()


def test_settled_answers_at_its_deadline_and_says_so(job: Job) -> None:
    _slow(job)
    assert job.settle(0.05).settled is False
    reply = job.status()
    assert reply.trainers == (0, 1)
    assert reply.snapshots[0].phase is Phase.UPLOADING
    assert reply.snapshots[0].nbytes > 12_000_000


def test_a_rank_that_holds_its_name_keeps_the_directory(job: Job) -> None:
    agent = job.start(linger_s=0.0)
    assert agent.wait(TIMEOUT_S) == 0
    player = job.player()
    agent = job.start(linger_s=0.0)
    assert agent.wait(TIMEOUT_S) == 0
    assert (job.directory / player.arena).exists()


def test_memory_after_commits(job: Job) -> None:
    (job.root / "local").mkdir()
    agent = job.start(local=str(job.root / "local"))
    player = job.player(nbytes=30_000_000)
    player.connect()
    for step in (1, 2):
        player.save(step)
        player.wait(step, Phase.COMMITTED)
    assert job.settle().settled
    status = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in status if line.startswith("Rss")}
    resident_bytes = (sizes["RssAnon"] + sizes["RssFile"]) * 1024
    assert resident_bytes <= 120e6
    print(f"agent: {resident_bytes / 1e6:.0f} MB resident without its arenas")
    mapped = {Path(m.path).name for m in psutil.Process(agent.pid).memory_maps()}
    assert not any("torch" in name for name in mapped)


def test_the_agent_imports_no_torch_and_no_pyarrow() -> None:
    code = (
        "import sys, forebay.drain.agent; "
        "sys.exit(','.join(sorted({'torch', 'pyarrow', 'obstore'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_directory_without_config_is_one_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forebay.drain.agent", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 2
    assert AGENT_CONFIG in done.stderr
    assert "Traceback" not in done.stderr
