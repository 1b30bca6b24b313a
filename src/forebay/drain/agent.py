"""The node agent: ``python -m forebay.drain.agent DIRECTORY``.

Owns everything after the copy. Killed at any point, the next agent goes on from the journal, the
arenas and the local tier. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import forebay
from forebay.drain.drainer import Drainer, journal_path
from forebay.drain.job import Snapshot
from forebay.drain.journal import Journal
from forebay.drain.slots import Slots, lock_owner
from forebay.errors import AgentError, ForebayError, FormatError, UsageError
from forebay.format.messages import (
    AGENT_CONFIG,
    AGENT_LOCK,
    AGENT_SOCKET,
    PROTOCOL,
    AgentConfig,
    AskSettled,
    AskStatus,
    Bye,
    Hello,
    Message,
    Phase,
    Progress,
    Refused,
    Ring,
    Skip,
    SnapshotStatus,
    StatusReply,
    Welcome,
    frame_bytes,
    job_name,
    read_message,
    write_frame,
)
from forebay.storage.store import open_store
from forebay.watch.events import LOGGER, emit

_POLL_S = 0.2
_GRACE_S = 1.0


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for a socket that fits the 107 bytes which the kernel allows."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


class Agent:
    """Serves the trainers of one job on one node until there is nothing left to do."""

    def __init__(self, directory: Path, config: AgentConfig) -> None:
        self._directory = directory
        self._config = config
        durable = open_store(config.run)
        local = None
        home: Path | None = None
        if config.local is not None:
            open_store(config.local)
            home = Path(config.local) / job_name(config.run, config.node)
            local = open_store(home)
        self._slots = Slots(directory)
        self._drainer = Drainer(
            config,
            self._slots,
            Journal(journal_path(directory, home)),
            durable,
            local,
            self._tell,
        )
        self._home = home
        self._trainers: dict[int, tuple[Hello, asyncio.StreamWriter]] = {}
        self._said_bye: set[int] = set()
        self._attempt = ""
        self._node_ranks: tuple[int, ...] = ()
        self._alone_since = time.monotonic()
        self._missing_since: dict[tuple[int, str], float] = {}
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until nothing is left to do, or SIGTERM."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._ended.set)
        self._drainer.recover()
        path = self._directory / AGENT_SOCKET
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(path) as name:
            listener.bind(name)
        path.chmod(0o600)
        server = await asyncio.start_unix_server(self._serve, sock=listener)
        done = False
        try:
            while not self._ended.is_set():
                self._look()
                if self._nothing_left():
                    done = True
                    break
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), _POLL_S)
        finally:
            server.close()
            for _, writer in self._trainers.values():
                writer.close()
            path.unlink(missing_ok=True)
            await self._drainer.stop()
            self._slots.close()
        if done:
            self._clean_up()

    def _look(self) -> None:
        try:
            self._drainer.scan()
        except OSError as error:
            emit("agent.scan_failed", level=40, why=error)
        for snapshot in list(self._drainer.snapshots.values()):
            self._node_ranks = snapshot.node_ranks or self._node_ranks
            self._watch(snapshot)

    def _watch(self, snapshot: Snapshot) -> None:
        """Abandon a snapshot whose missing ranks are dead: their slots were never offered."""
        if snapshot.final:
            self._missing_since.pop((snapshot.step, snapshot.attempt), None)
            return
        base = snapshot.base_attempt
        ranks = snapshot.node_ranks
        alive = [rank for rank in ranks if self._lives(rank, base)]
        if alive:
            self._drainer.orphaned_s.pop(base, None)
        else:
            self._drainer.orphaned_s.setdefault(base, time.monotonic())
        missing = snapshot.missing_ranks
        key = (snapshot.step, snapshot.attempt)
        if not missing or any(rank in alive for rank in missing):
            self._missing_since.pop(key, None)
            return
        since = self._missing_since.setdefault(key, time.monotonic())
        if time.monotonic() - since > _GRACE_S:
            ranks_text = ", ".join(map(str, missing))
            self._drainer.abandon(snapshot, f"ranks {ranks_text} ended before they had staged it")

    def _lives(self, rank: int, attempt: str) -> bool:
        """True while the rank's process of this attempt may still stage something."""
        known = self._trainers.get(rank)
        if known is not None:
            return known[0].attempt == attempt
        if attempt != self._attempt:
            return False
        return lock_owner(self._directory / f"rank-{rank:05d}.lock") is not None

    def _nothing_left(self) -> bool:
        if self._trainers or self._drainer.busy:
            self._alone_since = time.monotonic()
            return False
        everyone = set(self._node_ranks) or set(self._said_bye)
        if everyone and everyone <= self._said_bye:
            return True
        return time.monotonic() - self._alone_since > self._config.linger_s

    def _clean_up(self) -> None:
        """Leave nothing behind, unless a rank has taken its name again in the meantime."""
        locks = self._directory.glob("rank-*.lock")
        if any(lock_owner(path) is not None for path in locks):
            return
        if self._home is not None:
            journal_path(self._directory, self._home).unlink(missing_ok=True)
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._directory.parent.rmdir()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello: Hello | None = None
        try:
            raw = writer.get_extra_info("socket")
            peer = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", peer)[1] != os.getuid():
                return
            while True:
                size = frame_bytes(await reader.readexactly(4))
                message = read_message(await reader.readexactly(size))
                if isinstance(message, Hello):
                    hello = self._greet(message, writer)
                else:
                    await self._answer(message, hello, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except FormatError as error:
            emit("agent.bad_frame", level=40, why=error)
        finally:
            if hello is not None and self._trainers.get(hello.rank, (None, None))[1] is writer:
                del self._trainers[hello.rank]
                self._alone_since = time.monotonic()
                self._look()
            writer.close()

    def _greet(self, hello: Hello, writer: asyncio.StreamWriter) -> Hello | None:
        if hello.protocol != PROTOCOL or hello.run != self._config.run:
            text = (
                f"this agent serves {self._config.run} with protocol {PROTOCOL}, the rank is of "
                f"{hello.run} with protocol {hello.protocol}"
            )
            writer.write(write_frame(Refused(kind=AgentError.kind, text=text)))
            return None
        if hello.attempt != self._attempt:
            self._attempt = hello.attempt
            self._said_bye.clear()
        self._trainers[hello.rank] = (hello, writer)
        welcome = Welcome(protocol=PROTOCOL, version=forebay.__version__, pid=os.getpid())
        writer.write(write_frame(welcome))
        self._look()
        for snapshot in self._drainer.snapshots.values():
            if snapshot.base_attempt == hello.attempt:
                writer.write(write_frame(_progress(snapshot)))
        return hello

    async def _answer(
        self, message: Message, hello: Hello | None, writer: asyncio.StreamWriter
    ) -> None:
        if isinstance(message, Ring):
            self._look()
        elif isinstance(message, Skip) and hello is not None:
            ranks = self._node_ranks or (hello.rank,)
            self._drainer.skip(message.step, message.attempt, ranks, message.rank, message.reason)
        elif isinstance(message, Bye) and hello is not None:
            self._said_bye.add(message.rank)
        elif isinstance(message, AskStatus):
            writer.write(write_frame(self._status(settled=not self._drainer.busy)))
        elif isinstance(message, AskSettled):
            deadline = time.monotonic() + message.timeout_s
            self._look()
            while self._drainer.busy and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            writer.write(write_frame(self._status(settled=not self._drainer.busy)))
        else:
            raise FormatError(f"message {type(message).__name__} is not for an agent")

    def _tell(self, snapshot: Snapshot) -> None:
        level = logging.ERROR if snapshot.detail else logging.INFO
        extra = {"why": snapshot.detail} if snapshot.detail else {}
        emit(
            f"snapshot.{snapshot.phase.value}",
            level=level,
            step=snapshot.step,
            attempt=snapshot.attempt,
            **extra,
        )
        frame = write_frame(_progress(snapshot))
        for hello, writer in self._trainers.values():
            if hello.attempt == snapshot.base_attempt and not writer.is_closing():
                writer.write(frame)

    def _status(self, *, settled: bool) -> StatusReply:
        drainer = self._drainer
        return StatusReply(
            pid=os.getpid(),
            version=forebay.__version__,
            run=self._config.run,
            node=self._config.node,
            trainers=tuple(sorted(self._trainers)),
            settled=settled,
            snapshots=[_snapshot_status(s) for s in drainer.snapshots.values()],
            committed=drainer.counts["committed"],
            failed=drainer.counts["failed"],
            skipped=drainer.counts["skipped"],
            last_committed_step=drainer.last_committed,
        )


def _progress(snapshot: Snapshot) -> Progress:
    return Progress(
        step=snapshot.step,
        attempt=snapshot.attempt,
        phase=snapshot.phase,
        at_s=snapshot.reached_s.get(snapshot.phase, time.time()),
        detail=snapshot.detail,
        kind=snapshot.kind,
    )


def _snapshot_status(snapshot: Snapshot) -> SnapshotStatus:
    reached = snapshot.reached_s
    staged = reached.get(Phase.STAGED, 0.0)
    end = reached.get(Phase.SEALED) or time.time()
    busy_s = end - reached.get(Phase.UPLOADING, end)
    return SnapshotStatus(
        step=snapshot.step,
        attempt=snapshot.attempt,
        phase=snapshot.phase,
        ranks=tuple(sorted(snapshot.parts)),
        missing_ranks=snapshot.missing_ranks,
        nbytes=snapshot.nbytes,
        done_bytes=snapshot.done_bytes,
        bytes_per_s=snapshot.done_bytes / busy_s if busy_s > 0 else 0.0,
        staged_s=staged,
        local_s=reached.get(Phase.LOCAL, 0.0),
        durable_s=reached.get(Phase.COMMITTED, 0.0),
        detail=snapshot.detail,
        kind=snapshot.kind,
    )


def ask(path: Path, message: Message, timeout_s: float) -> Message:
    """Send one message to an agent and return its answer. Raises AgentError when it is gone."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire, short_path(path) as name:
            wire.settimeout(timeout_s)
            wire.connect(name)
            wire.sendall(write_frame(message))
            return read_message(_exactly(wire, frame_bytes(_exactly(wire, 4))))
    except OSError as error:
        raise AgentError(f"{path}: no agent answers: {error}") from error


def _exactly(wire: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = wire.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError("the agent closed the connection")
        data += chunk
    return bytes(data)


def read_config(directory: Path) -> AgentConfig:
    """The config beside the socket. Raises UsageError when there is none or it is damaged."""
    path = directory / AGENT_CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=AgentConfig)
    except FileNotFoundError:
        raise UsageError(f"{path}: not there: expected a job's directory") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: not an agent's config: {error}") from None


def run_agent(directory: Path) -> int:
    """Serve a job's directory until nothing is left to do. Returns the exit status.

    One agent a directory: a second one sees the lock and ends at once.
    """
    os.umask(0o077)
    fd = os.open(directory / AGENT_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        owner = lock_owner(directory / AGENT_LOCK)
        LOGGER.warning("%s is served by the agent with pid %s already", directory, owner)
        return 0
    config = read_config(directory)
    emit("agent.serves", run=config.run, node=config.node, pid=os.getpid())
    asyncio.run(_serve(directory, config))
    os.close(fd)
    return 0


async def _serve(directory: Path, config: AgentConfig) -> None:
    await Agent(directory, config).run()


def main(arguments: list[str]) -> int:
    """Entry of ``python -m forebay.drain.agent``: the job's directory, maybe ``--detach`` first."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    detach = arguments[:1] == ["--detach"]
    if len(arguments) != 1 + detach:
        LOGGER.error("usage: python -m forebay.drain.agent [--detach] JOB_DIRECTORY")
        return 2
    if detach and os.fork():
        # No thread and no lock yet: the child is nobody's child, and its starter is free at once.
        os._exit(0)
    try:
        return run_agent(Path(arguments[-1]))
    except ForebayError as error:
        LOGGER.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
