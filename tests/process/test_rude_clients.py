"""Whatever connects to an agent and however it behaves, a rank that comes is served."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Callable, Iterator

import msgspec
import psutil
import pytest

from forebay.format.messages import (
    MAX_FRAME_BYTES,
    AskSettled,
    AskStatus,
    Bye,
    Hello,
    Message,
    Phase,
    Skip,
    StatusReply,
    Welcome,
    write_frame,
)
from tests.player import Player, connected, receive
from tests.process.test_agent import Job, job, poll, shared

__all__ = ["job", "shared"]

MOST_GROWTH_BYTES = 200 * 2**20
CONNECTIONS = 10_000
AT_ONCE = 700


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """As many as this test opens; the agent keeps what a process usually may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def start(job: Job) -> psutil.Process:
    """An agent that may have 1,024 descriptors, and has had a rank."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    agent = job.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return psutil.Process(agent.pid)


def welcomed(player: Player) -> Message | None:
    """What the agent answers, None while its queue is full: a rank tries again too."""
    try:
        return player.connect()
    except BlockingIOError:
        return None


def still_serves(job: Job, step: int) -> None:
    """A rank comes, saves, and its checkpoint is committed."""
    player = job.player(generation=step)
    answer = poll(lambda: welcomed(player), "the agent to have room for a rank")
    assert isinstance(answer, Welcome)
    player.save(step)
    assert player.wait(step).phase is Phase.COMMITTED
    player.die()
    job.check(step)
    job.players.remove(player)


def hello(job: Job, **changes: object) -> Hello:
    made = Hello(protocol=1, run=job.url, attempt="a1", rank=5, pid=1, arenas=())
    return msgspec.structs.replace(made, **changes)


def is_dropped(wire: socket.socket) -> bool:
    """True once the agent has ended the connection."""
    wire.setblocking(False)
    try:
        return wire.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_ten_thousand_connections(job: Job) -> None:
    agent = start(job)
    before = agent.memory_info().rss
    opened: list[socket.socket] = []
    most = 0
    whole = write_frame(AskStatus())
    for number in range(CONNECTIONS):
        with contextlib.suppress(BlockingIOError, ConnectionError):
            wire = connected(job.directory)
            opened.append(wire)
            wire.sendall(whole[: number % len(whole)])  # silent, or silent in the middle of a frame
        if len(opened) >= AT_ONCE:
            most = max(most, agent.num_fds())
            oldest = opened.pop(0)
            oldest.close()
    poll(lambda: any(map(is_dropped, opened)), "the agent to drop a stranger")
    still_serves(job, 1)
    grown = agent.memory_info().rss - before
    for wire in opened:
        wire.close()
    poll(lambda: agent.num_fds() < 100, "the agent to close what was closed")
    print(f"connections: {CONNECTIONS}, descriptors at most {most}, grown {grown >> 20} MiB")
    assert most < 1024
    assert grown < MOST_GROWTH_BYTES


def _half(job: Job, wire: socket.socket) -> None:
    wire.sendall((2**16).to_bytes(4, "big") + b"x" * 1000)


def _largest(job: Job, wire: socket.socket) -> None:
    wire.sendall(MAX_FRAME_BYTES.to_bytes(4, "big") + b"x" * MAX_FRAME_BYTES)


def _reason(job: Job, wire: socket.socket) -> None:
    """The longest word that fits, again and again."""
    wire.sendall(write_frame(hello(job)))
    assert isinstance(receive(wire), Welcome)
    wire.settimeout(1.0)  # it reads no answer, so the agent reads no more after a while
    with contextlib.suppress(TimeoutError):
        for step in range(200):
            skip = Skip(rank=5, step=step + 1000, attempt="a1", reason="x" * 60_000)
            wire.sendall(write_frame(skip))


def _names(job: Job, wire: socket.socket) -> None:
    wire.sendall(write_frame(hello(job)))
    assert isinstance(receive(wire), Welcome)
    wire.sendall(write_frame(Skip(rank=5, step=2**63, attempt="../../x", reason="")))


def _questions(job: Job, wire: socket.socket) -> None:
    wire.sendall(write_frame(AskSettled(timeout_s=1e9)) * 1000)


def _endless(job: Job, wire: socket.socket) -> None:
    for seconds in (float("inf"), float("nan")):
        wire.sendall(write_frame(AskSettled(timeout_s=seconds)))


def _deaf(job: Job, wire: socket.socket) -> None:
    """Asks and asks, and never reads."""
    wire.settimeout(1.0)
    with contextlib.suppress(TimeoutError):
        for _ in range(20_000):
            wire.sendall(write_frame(AskStatus()))


def _rank(job: Job, wire: socket.socket) -> None:
    for rank in (-1, 2**31, 2**63):
        wire.sendall(write_frame(hello(job, rank=rank)))


def _attempt(job: Job, wire: socket.socket) -> None:
    wire.sendall(write_frame(hello(job, attempt="../" * 1000)))


def _foreign(job: Job, wire: socket.socket) -> None:
    wire.sendall(write_frame(hello(job, run="/x" * 10_000)))


def _bye(job: Job, wire: socket.socket) -> None:
    """Leaves without ever having come."""
    wire.sendall(write_frame(Bye(rank=0)) * 100)


RUDE: list[Callable[[Job, socket.socket], None]] = [_half, _largest, _reason, _names, _questions]
RUDE += [_endless, _deaf, _rank, _attempt, _foreign, _bye]


def test_rude_clients(job: Job) -> None:
    """One kind after another, twenty connections each, all left open."""
    agent = start(job)
    before = agent.memory_info().rss
    wires: list[socket.socket] = []
    count = 0
    for number, rude in enumerate(RUDE):
        for _ in range(20 if rude not in (_deaf, _reason) else 2):
            wire = connected(job.directory)
            wires.append(wire)
            count += 1
            with contextlib.suppress(ConnectionError):
                rude(job, wire)
        still_serves(job, number + 1)
    assert job.status().run == job.url
    grown = agent.memory_info().rss - before
    for wire in wires:
        wire.close()
    print(f"rude clients: {count} of {len(RUDE)} kinds, grown {grown >> 20} MiB, violations: 0")
    assert count >= 180
    assert grown < MOST_GROWTH_BYTES


def impatient(job: Job) -> None:
    """An agent that waits half a second for a frame."""
    code = (
        "import sys; from forebay.drain import trainers, agent\n"
        "trainers.FRAME_S = 0.5\nsys.exit(agent.main(sys.argv[1:]))\n"
    )
    job.command = ["-c", code]
    job.start()


def test_who_waits_for_an_answer_is_no_silent_stranger(job: Job) -> None:
    """A question that takes longer than a frame may is answered, and nothing is logged."""
    impatient(job)
    early, late = job.player(0, 2), job.player(1, 2)
    for player in (early, late):
        player.connect()
    early.save(1)
    poll(lambda: job.status().snapshots, "the first rank's half of a snapshot")
    with connected(job.directory) as wire:
        wire.sendall(write_frame(AskSettled(timeout_s=2.0)))
        reply = receive(wire)
    assert isinstance(reply, StatusReply)
    assert not reply.settled
    assert "bad_frame" not in job.log()
    late.save(1)
    assert early.wait(1).phase is Phase.COMMITTED


def test_a_silent_stranger_is_dropped_in_time(job: Job) -> None:
    """Half a frame, or none, is no reason to wait for ever."""
    impatient(job)
    for said in (b"", b"\0\0", (100).to_bytes(4, "big") + b"x"):
        with connected(job.directory) as wire:
            wire.sendall(said)
            assert wire.recv(1) == b""
    still_serves(job, 1)
