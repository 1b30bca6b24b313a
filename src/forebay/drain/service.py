"""The agent as a service: its parts put together, its loop, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import time
from pathlib import Path

import forebay
from forebay.drain.drainer import Drainer
from forebay.drain.finish import Finisher
from forebay.drain.job import Snapshot
from forebay.drain.journal import Journal, journal_path
from forebay.drain.missing import Missing
from forebay.drain.recover import recover
from forebay.drain.slots import Slots
from forebay.drain.snapshots import Snapshots
from forebay.drain.status import forecast, status_of
from forebay.drain.trainers import Trainers
from forebay.drain.upload import close_what_was_held
from forebay.drain.wire import short_path
from forebay.drain.work import Work
from forebay.errors import StoreError
from forebay.format.messages import (
    AGENT_LOCK,
    AGENT_SOCKET,
    AgentConfig,
    Skip,
    StatusReply,
    config_digest,
    job_name,
)
from forebay.locks import is_replaced, may_be_held
from forebay.storage.address import open_home, open_store
from forebay.storage.pace import Pace
from forebay.storage.store import Store
from forebay.watch.events import emit

_POLL_S = 0.2
_SHOW_S = 1.0
_BACKLOG = 1024  # that wait; asyncio takes 100 at once, so that none is over the limit for long
_PATIENCE_S = 3.0  # within one call; then the trouble is told, and the call made again
_STOP_LIMIT_S = 20.0
_HANDOVER_LIMIT_S = 2.0


class Agent:
    """Serves the trainers of one job on one node until there is nothing left to do.

    ``lock`` is the descriptor of the directory's lock, which it holds.
    """

    def __init__(self, directory: Path, config: AgentConfig, lock: int) -> None:
        durable = open_store(
            config.run,
            single_writer=config.commit_mode == "single-writer",
            patience_s=min(_PATIENCE_S, config.store_timeout_s),
        )
        durable.pace = Pace(config.drain_bytes_per_s, config.drain_requests_per_s)
        local: Store | None = None
        home: Path | None = None
        if config.local is not None:
            name = job_name(config.run, config.node)
            home, local = Path(config.local) / name, open_home(config.local, name)
        self._directory = directory
        self._lock = lock
        self._config = config
        self._durable = durable
        self._local = local
        self._shown_s = -math.inf
        self._limit_s = _STOP_LIMIT_S
        self._journal = Journal(journal_path(directory, home))
        self._slots = Slots(directory, self.is_replaced)
        self._work = Work(config.store_timeout_s)
        self._trainers = Trainers(directory, config.run, self)
        self._missing = Missing(self._trainers.lives)
        self._snapshots = Snapshots(
            node=config.node, slots=self._slots, journal=self._journal, tell=self._trainers.tell
        )
        self._finisher = Finisher(
            config=config,
            snapshots=self._snapshots,
            work=self._work,
            durable=durable,
            local=local,
            orphaned_s=self._missing.orphaned_s,
        )
        self._drainer = Drainer(
            slots=self._slots,
            snapshots=self._snapshots,
            finisher=self._finisher,
            work=self._work,
            durable=durable,
            local=local,
            config=config,
        )
        self._alone_since = time.monotonic()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until nothing is left to do, or until SIGTERM, which leaves the rest in place."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._ended.set)
        path = self._directory / AGENT_SOCKET
        self._clear()
        recover(
            journal=self._journal,
            slots=self._slots,
            snapshots=self._snapshots,
            drainer=self._drainer,
            finisher=self._finisher,
            work=self._work,
        )
        if self._config.node == 0:
            self._work.start(self._finisher.finish_others())
            self._work.start(self._finisher.sweep(), aside=True)
        listener = _listen(path)
        server = await asyncio.start_unix_server(self._trainers.serve, sock=listener)
        listener.listen(_BACKLOG)

        done = False
        try:
            while not self._ended.is_set():
                self.look()
                if self._nothing_left():
                    done = True
                    break
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), _POLL_S)
        finally:
            server.close()
            self._trainers.close()
            with contextlib.suppress(OSError):
                if not self.is_replaced():
                    path.unlink(missing_ok=True)
            await self._work.stop(self._limit_s)
            self._journal.close()
            self._slots.close()
        if done:
            self._clean_up()
        emit("agent.ends", unfinished=len(self._snapshots.unfinished))

    def _clear(self) -> None:
        """Remove what agents of the job left that were killed in a local write, or in their end.

        Nobody else writes to this node's part of the local tier, so its age says nothing.
        """
        for left in self._directory.parent.glob(f".{self._directory.name}.*"):
            if not may_be_held(left / AGENT_LOCK) and not _held(left):
                shutil.rmtree(left, ignore_errors=True)
        if self._local is not None:
            try:
                self._local.sweep("", older_than_s=0.0)
            except StoreError as error:
                emit("sweep.failed", level=30, why=error)

    def is_replaced(self) -> bool:
        """True when another agent has this one's place in the directory.

        Somebody removed the names, as systemd does for users who log out, and the job began anew:
        what has those names now is not this agent's.
        """
        return is_replaced(self._lock, self._directory / AGENT_LOCK)

    def look(self) -> None:
        """Take over what is staged, give up what waits in vain."""
        if self._work.stopping:
            return
        try:
            self._drainer.scan()
        except OSError as error:
            emit("agent.scan_failed", level=logging.ERROR, why=error)
        for snapshot, why in self._missing.look(self.known()):
            self._snapshots.abandon(snapshot, why)
        close_what_was_held()
        self._show()

    def _show(self) -> None:
        """Tell the ranks, once a second, how far their snapshots are and when they are durable."""
        if time.monotonic() - self._shown_s < _SHOW_S:
            return
        self._shown_s, now_s = time.monotonic(), time.time()
        due = forecast(self.known(), now_s, self._durable.pace.bytes_per_s)
        for snapshot in self._snapshots.unfinished:
            self._trainers.show(snapshot, now_s, due.get(snapshot.key))

    def known(self) -> list[Snapshot]:
        """All snapshots, in the order in which they were first seen."""
        return list(self._snapshots.all.values())

    def busy(self) -> bool:
        """True while a snapshot is unfinished or a commit under way."""
        return self._work.busy or bool(self._snapshots.unfinished)

    async def changed(self, timeout_s: float) -> None:
        """Return once a task has ended, or after ``timeout_s``."""
        await self._work.changed(timeout_s)

    def outdated(self, config: str) -> bool:
        """End, so that the job starts an agent with its own settings and keys: it goes on."""
        if config == config_digest(self._config):
            return False
        emit("agent.outdated", why="a new start of the job brings other settings or keys")
        self._limit_s = _HANDOVER_LIMIT_S
        self._ended.set()
        return True

    def skip(self, message: Skip, node_ranks: tuple[int, ...]) -> None:
        """A rank took no snapshot: the set of all ranks ends with that."""
        self._snapshots.skip(
            message.step, message.attempt, node_ranks, message.rank, message.reason
        )

    def status(self, *, settled: bool) -> StatusReply:
        """The state of everything."""
        now_s = time.time()
        pace = self._durable.pace
        limit = pace.bytes_per_s
        due = forecast(self.known(), now_s, limit)
        return StatusReply(
            pid=os.getpid(),
            version=forebay.__version__,
            run=self._config.run,
            node=self._config.node,
            trainers=self._trainers.ranks,
            settled=settled,
            snapshots=[status_of(one, now_s, due.get(one.key)) for one in self.known()],
            committed=self._snapshots.committed,
            failed=self._snapshots.failed,
            skipped=self._snapshots.skipped,
            replaced=self._snapshots.replaced,
            share=pace.share,
            limit_bytes_per_s=limit,
            last_committed_step=self._snapshots.last_committed,
        )

    def _nothing_left(self) -> bool:
        if self._trainers.ranks or self.busy():
            self._alone_since = time.monotonic()
            return False
        if self._trainers.all_left():
            return True
        return time.monotonic() - self._alone_since > self._config.linger_s

    def _clean_up(self) -> None:
        """Leave nothing behind, unless a rank has taken its name again in the meantime.

        The directory loses its name first: a rank that comes then makes a new one.
        """
        if self.is_replaced() or _held(self._directory):
            return
        with contextlib.suppress(OSError):
            self._journal.path.unlink(missing_ok=True)
        going = self._directory.with_name(f".{self._directory.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            self._directory.rename(going)
            if _held(going):
                going.rename(self._directory)
                return
            shutil.rmtree(going, ignore_errors=True)
            self._directory.parent.rmdir()


def _held(directory: Path) -> bool:
    """True while a live rank holds its name in the job's directory, or that cannot be told."""
    try:
        found = list(directory.iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return any(may_be_held(path) for path in found if path.match("rank-*.lock"))


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(path) as name:
        listener.bind(name)
    path.chmod(0o600)
    return listener
