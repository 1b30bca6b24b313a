"""The agent's side of the socket: who is connected, what they say, what they are told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from pathlib import Path
from typing import Protocol

import msgspec

import forebay
from forebay.drain.job import Snapshot
from forebay.drain.status import progress_of
from forebay.errors import AgentError, FormatError, UsageError
from forebay.format import names
from forebay.format.messages import (
    MOST_RANKS,
    PROTOCOL,
    AskSettled,
    AskStatus,
    Bye,
    Hello,
    Message,
    Refused,
    Ring,
    Skip,
    StatusReply,
    Welcome,
    frame_bytes,
    read_message,
    write_frame,
)
from forebay.locks import is_free, may_be_held
from forebay.private import peer_is_own
from forebay.watch.events import emit

MOST_CONNECTIONS = 400
"""At once: a node has fewer ranks, and 1,024 descriptors are what a process usually may have."""

MOST_HEARD_BYTES = 2**16
"""Of one frame: what trainers say is short, only the agent's own status is not."""

MOST_QUESTIONS = 16
"""That may wait for an answer on one connection."""

MOST_UNREAD_BYTES = 2**20
"""Told to a rank that does not read: it is dropped then."""

FRAME_S = 60.0
"""In so long a stranger says who it is, and a frame that has begun comes to its end."""

_SETTLE_POLL_S = 0.2
_LONGEST_NAME = 1000


class Desk(Protocol):
    """What the socket's side needs of the agent behind it."""

    def look(self) -> None:
        """Look at the slots now."""

    def known(self) -> list[Snapshot]:
        """All snapshots."""

    def busy(self) -> bool:
        """True while a snapshot is unfinished or a commit under way."""

    async def changed(self, timeout_s: float) -> None:
        """Return once a task has ended, or after ``timeout_s``."""

    def outdated(self, config: str) -> bool:
        """True when a new start of the job wants an agent with another config: this one ends."""

    def skip(self, message: Skip, node_ranks: tuple[int, ...]) -> None:
        """A rank took no snapshot."""

    def status(self, *, settled: bool) -> StatusReply:
        """The state of everything."""

    def is_replaced(self) -> bool:
        """True when another agent has this one's place in the directory."""


class Trainers:
    """Ranks that are connected, and those that took leave. Belongs to the loop's thread."""

    def __init__(self, directory: Path, run: str, desk: Desk) -> None:
        self._directory = directory
        self._run = run
        self._desk = desk
        self._connected: dict[int, tuple[Hello, asyncio.StreamWriter]] = {}
        self._open: set[asyncio.StreamWriter] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._asked: dict[asyncio.StreamWriter, int] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._attempt = ""
        self._ending = False
        self.said_bye: set[int] = set()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that are connected."""
        return tuple(sorted(self._connected))

    def lives(self, rank: int, attempt: str) -> bool:
        """True while the rank's process of this attempt may still stage something.

        It may be connected, or hold the rank's lock and be about to connect. A process that it
        forked (a data loader's) may keep the connection, and never the lock.
        """
        lock = self._directory / f"rank-{rank:05d}.lock"
        known = self._connected.get(rank)
        if known is not None:
            # A lock is never to be asked for by its own process.
            cannot_tell = known[0].pid == os.getpid() or self._desk.is_replaced()
            return known[0].attempt == attempt and (cannot_tell or not is_free(lock))
        if self._attempt not in ("", attempt) or self._desk.is_replaced():
            return False
        return may_be_held(lock)

    def tell(self, snapshot: Snapshot) -> None:
        """Tell every rank of the snapshot's attempt which phase it is in."""
        level = logging.ERROR if snapshot.detail else logging.INFO
        fields: dict[str, object] = {"step": snapshot.step, "attempt": snapshot.attempt}
        if snapshot.detail:
            fields["why"] = snapshot.detail
        emit(f"snapshot.{snapshot.phase.value}", level=level, **fields)
        self.show(snapshot, time.time(), None)

    def show(self, snapshot: Snapshot, now_s: float, durable_in_s: float | None) -> None:
        """Tell every rank of the snapshot's attempt how far it is."""
        frame = write_frame(progress_of(snapshot, now_s, durable_in_s))
        for hello, writer in self._connected.values():
            if hello.attempt == snapshot.base_attempt and not writer.is_closing():
                if writer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
                    emit("agent.unread", level=logging.ERROR, rank=hello.rank)
                    writer.transport.abort()  # it connects again when it lives, and hears all
                    continue
                writer.write(frame)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end. A malformed frame ends it and nothing else."""
        hello: Hello | None = None
        patience_s = FRAME_S
        self._open.add(writer)
        try:
            if self._ending or not peer_is_own(writer.get_extra_info("socket")):
                return  # who comes too late finds the next agent
            self._strangers[writer] = None
            if len(self._open) > MOST_CONNECTIONS:
                oldest = next(iter(self._strangers))  # it had its time to say who it is
                self._strangers.pop(oldest)
                oldest.transport.abort()
                emit("agent.crowded", level=logging.WARNING, connections=len(self._open))
            while True:
                # A rank may be silent for hours, a stranger who waits for no answer may not.
                wait_s = patience_s if hello is None else None
                size = frame_bytes(await asyncio.wait_for(reader.readexactly(4), wait_s))
                if size > MOST_HEARD_BYTES:
                    raise FormatError(f"message: frame of {size} bytes, limit {MOST_HEARD_BYTES}")
                body = await asyncio.wait_for(reader.readexactly(size), FRAME_S)
                message = read_message(body)
                if isinstance(message, Hello):
                    hello = self._greet(message, writer) or hello
                    if hello is not None:
                        self._strangers.pop(writer, None)
                else:
                    self._hear(message, hello, writer)
                    if isinstance(message, AskSettled):
                        patience_s = FRAME_S + max(0.0, message.timeout_s)
                await writer.drain()
        except asyncio.TimeoutError:  # an OSError in newer Pythons
            emit("agent.bad_frame", level=logging.ERROR, why=f"no whole frame in {patience_s:g} s")
        except (asyncio.IncompleteReadError, OSError):
            pass
        except FormatError as error:
            emit("agent.bad_frame", level=logging.ERROR, why=error)
        finally:
            self._open.discard(writer)
            self._asked.pop(writer, None)
            self._strangers.pop(writer, None)
            writer.close()
            if hello is not None and self._connected.get(hello.rank, (None, None))[1] is writer:
                del self._connected[hello.rank]
                self._desk.look()

    def _greet(self, hello: Hello, writer: asyncio.StreamWriter) -> Hello | None:
        _check_names(0, hello.attempt)
        if not 0 <= hello.rank <= MOST_RANKS:
            raise FormatError(f"rank {hello.rank} is none")
        if hello.protocol != PROTOCOL or hello.run != self._run:
            text = (
                f"this agent serves {self._run} with protocol {PROTOCOL}, rank {hello.rank} is of "
                f"{hello.run[:_LONGEST_NAME]} with protocol {hello.protocol}"
            )
            emit("agent.refused", level=logging.ERROR, why=text)
            writer.write(write_frame(Refused(kind=AgentError.kind, text=text)))
            return None
        if hello.attempt != self._attempt:
            if hello.config and self._desk.outdated(hello.config):
                raise ConnectionResetError("this agent ends")
            self._attempt = hello.attempt
            self.said_bye.clear()
        self.said_bye.discard(hello.rank)
        self._connected[hello.rank] = (hello, writer)
        welcome = Welcome(protocol=PROTOCOL, version=forebay.__version__, pid=os.getpid())
        writer.write(write_frame(welcome))
        self._desk.look()
        for snapshot in self._desk.known():
            if snapshot.base_attempt == hello.attempt:
                writer.write(write_frame(progress_of(snapshot, time.time())))
        return hello

    def _hear(self, message: Message, hello: Hello | None, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, Ring):
            self._desk.look()
        elif isinstance(message, Skip) and hello is not None:
            _check_names(message.step, message.attempt)
            self._desk.skip(message, self._node_ranks() or (hello.rank,))
        elif isinstance(message, Bye) and hello is not None:
            self.said_bye.add(hello.rank)
        elif isinstance(message, AskStatus):
            writer.write(write_frame(self._desk.status(settled=not self._desk.busy())))
        elif isinstance(message, AskSettled):
            self._desk.look()
            asked = self._asked.get(writer, 0)
            if asked >= MOST_QUESTIONS or not math.isfinite(message.timeout_s):
                raise FormatError(f"question {asked + 1}, for {message.timeout_s:g} s: refused")
            self._asked[writer] = asked + 1
            task = asyncio.get_running_loop().create_task(self._settle(message, writer))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)
        else:
            raise FormatError(f"message {type(message).__name__} is not for an agent")

    async def _settle(self, asked: AskSettled, writer: asyncio.StreamWriter) -> None:
        """Answer once all is settled, or at the deadline; the connection goes on meanwhile."""
        deadline = time.monotonic() + asked.timeout_s
        while self._desk.busy() and not writer.is_closing():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            await self._desk.changed(min(left_s, _SETTLE_POLL_S))
        if writer in self._asked:
            self._asked[writer] -= 1
        if not writer.is_closing():
            reply = self._desk.status(settled=not self._desk.busy())
            writer.write(write_frame(msgspec.structs.replace(reply, question=asked.question)))
            with contextlib.suppress(OSError):
                await writer.drain()

    def _node_ranks(self) -> tuple[int, ...]:
        """This node's ranks of the last attempt, as its snapshots tell; earlier ones had others."""
        known = reversed(self._desk.known())
        return next((s.node_ranks for s in known if s.base_attempt == self._attempt), ())

    def all_left(self) -> bool:
        """True when every rank of the last attempt has said goodbye."""
        everyone = set(self._node_ranks()) or self.said_bye
        return bool(everyone) and everyone <= self.said_bye

    def close(self) -> None:
        """End all connections, and those that still come."""
        self._ending = True
        for task in self._settling:
            task.cancel()
        for writer in list(self._open):
            writer.close()


def _check_names(step: int, attempt: str) -> None:
    try:
        names.check_step(step)
        names.check_attempt(attempt)
    except UsageError as error:
        raise FormatError(str(error)) from None
