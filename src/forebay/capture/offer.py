"""Hands filled slots to the node agent and hears how they fare.

The offer itself is the slot's STAGED word in shared memory: an agent that starts later finds it.
The socket only rings, so that nobody has to look; if it breaks, a thread mends it behind the
training, starting a new agent where that is this rank's to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import forebay
from forebay.capture.ledger import Ledger
from forebay.errors import AgentError, DeadlineError, FormatError, UsageError
from forebay.format.messages import (
    AGENT_CONFIG,
    AGENT_LOCK,
    AGENT_LOG,
    AGENT_SOCKET,
    PROTOCOL,
    AgentConfig,
    AskSettled,
    Bye,
    Hello,
    Message,
    Progress,
    Refused,
    Ring,
    Skip,
    StatusReply,
    Welcome,
    frame_bytes,
    read_message,
    write_frame,
)
from forebay.locks import lock_owner
from forebay.private import open_own, peer_is_own, read_own
from forebay.watch.events import emit

_POLL_S = 0.02
_RETRY_S = 0.5
_START_S = 3.0
_ENDING_S = 60.0
_LOG_BYTES = 16 * 2**20
_AGENT = "forebay.drain.agent"
# As `python -m` does, but for the working directory: it may be one where others write, and `-m`
# takes modules from there before all others. Where this very forebay lies is looked at last.
_PROGRAM = f"""\
import sys
sys.path[:] = [*filter(None, sys.path), {str(Path(forebay.__file__).parents[1])!r}]
from forebay.drain.agent import main
sys.exit(main(sys.argv[2:]))"""


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """A name for a socket that fits the 107 bytes which the kernel allows."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


class Wire:
    """One connection to an agent: whole messages in and out."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            with _short_path(path) as name:
                self._socket.connect(name)
            if not peer_is_own(self._socket):
                raise PermissionError(errno.EPERM, "another user listens there", str(path))
        except OSError:
            self._socket.close()
            raise
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message. Raises OSError when the agent is gone."""
        with self._sending:
            self._socket.sendall(write_frame(message))

    def receive(self, timeout_s: float | None) -> Message:
        """The next message. Raises OSError at the end of the connection, TimeoutError in time."""
        self._socket.settimeout(timeout_s)
        return read_message(self._exactly(frame_bytes(self._exactly(4))))

    def _exactly(self, count: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < count:
            chunk = self._socket.recv(count - len(chunks))
            if not chunk:
                raise ConnectionResetError("the agent closed the connection")
            chunks += chunk
        return bytes(chunks)

    def close(self) -> None:
        """End the connection; a receive in another thread ends with OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Link:
    """This rank's tie to its node agent. Its thread receives, and renews a broken tie."""

    def __init__(
        self,
        directory: Path,
        config: AgentConfig,
        hello: Hello,
        ledger: Ledger,
        *,
        start_agents: bool,
        timeout_s: float,
    ) -> None:
        self._directory = directory
        self._config = config
        self._hello = hello
        self._ledger = ledger
        self._start_agents = start_agents
        self._timeout_s = timeout_s
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[StatusReply] = queue.SimpleQueue()
        self._questions = 0
        self._settle_by: float | None = None
        self._closing = threading.Event()
        self._wire: Wire | None = self._connect()
        self._threads = [
            threading.Thread(target=self._hear, name="forebay-hear", daemon=True),
            threading.Thread(target=self._speak, name="forebay-speak", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def ring(self, arena: str) -> None:
        """Say that a slot is staged. Never blocks: another thread sends it."""
        self._outbox.put(Ring(arena=arena))

    def skip(self, step: int, attempt: str, reason: str) -> None:
        """Say that this rank took no snapshot of the step. Never blocks."""
        self._outbox.put(Skip(rank=self._hello.rank, step=step, attempt=attempt, reason=reason))

    def settle(self, timeout_s: float) -> StatusReply:
        """Wait until the agent has nothing under way. Raises DeadlineError.

        The agent that was asked may end meanwhile, killed or with nothing left to do: the next one
        is asked again.
        """
        self._questions += 1
        self._settle_by = time.monotonic() + timeout_s
        late_s = self._settle_by + self._timeout_s
        self._ask_settled()
        try:
            while True:
                reply = self._replies.get(timeout=max(0.0, late_s - time.monotonic()))
                if reply.question == self._questions:
                    return reply
        except queue.Empty:
            raise DeadlineError(
                f"agent: no word within {timeout_s:g} s on whether earlier snapshots are drained; "
                f"its log: {self._directory / AGENT_LOG}"
            ) from None
        finally:
            self._settle_by = None

    def _ask_settled(self) -> None:
        """Ask the agent of now; called by whoever waits, and by the thread that found another."""
        by = self._settle_by
        if by is not None:
            left_s = max(0.0, by - time.monotonic())
            self._outbox.put(AskSettled(timeout_s=left_s, question=self._questions))

    def close(self, *, clean: bool) -> None:
        """Take leave; ``clean`` lets the agent remove this rank's arenas once they are drained."""
        if clean:
            self._outbox.put(Bye(rank=self._hello.rank))
        self._outbox.put(None)
        self._threads[1].join(timeout=5)
        self._closing.set()
        if self._wire is not None:
            self._wire.close()
        self._threads[0].join(timeout=5)
        if self._wire is not None:  # renewed in the meantime
            self._wire.close()

    def _speak(self) -> None:
        while (message := self._outbox.get()) is not None:
            wire = self._wire
            if wire is not None:
                with contextlib.suppress(OSError):  # the hearing thread sees the break, and mends
                    wire.send(message)

    def _hear(self) -> None:
        while not self._closing.is_set():
            wire = self._wire
            if wire is None:
                self._renew()
                continue
            try:
                message = wire.receive(None)
            except (OSError, FormatError) as error:
                if self._closing.is_set():
                    return
                self._wire = None
                wire.close()
                self._ledger.agent = f"lost ({error}); being started again"
                emit("agent.lost", level=30, cause=error)
                continue
            if isinstance(message, Progress):
                self._ledger.hear(message)
            elif isinstance(message, StatusReply):
                self._replies.put(message)

    def _renew(self) -> None:
        try:
            self._wire = self._connect()
            emit("agent.found_again", directory=self._directory)
            self._ask_settled()
        except (AgentError, UsageError, OSError) as error:
            self._ledger.agent = f"gone: {error}"
            self._closing.wait(_RETRY_S)

    def _connect(self) -> Wire:
        deadline = time.monotonic() + self._timeout_s
        wire = self._try()
        if wire is not None:
            return wire
        if not self._start_agents:
            return self._await(deadline)
        with _lock(self._directory / "spawn.lock", deadline):
            wire = self._try()
            if wire is not None:
                return wire
            self._spawn()
            return self._await(deadline)

    def _await(self, deadline: float) -> Wire:
        """Try until an agent answers. Raises AgentError at the deadline.

        One that was started and died before it answered is started again.
        """
        again = time.monotonic() + _START_S
        while (wire := self._try()) is None:
            ending = lock_owner(self._directory / AGENT_LOCK)
            late_s = time.monotonic() - deadline
            if ending is not None and 0 < late_s < _ENDING_S and not self._closing.is_set():
                time.sleep(_POLL_S)  # an earlier agent still ends; the next one waits for its lock
                continue
            if self._start_agents and time.monotonic() > again:
                again = time.monotonic() + _START_S
                if lock_owner(self._directory / AGENT_LOCK) is None:
                    self._spawn()
            if time.monotonic() > deadline or self._closing.is_set():
                raise AgentError(
                    f"agent: none answers at {self._directory / AGENT_SOCKET} after "
                    f"{self._timeout_s:g} s{self._last_words()}: start one with `forebay agent`, "
                    "or leave agent='auto'"
                )
            time.sleep(_POLL_S)
        return wire

    def _try(self) -> Wire | None:
        try:
            wire = Wire(self._directory / AGENT_SOCKET, self._timeout_s)
        except OSError:
            return None
        try:
            wire.send(self._hello)
            answer = wire.receive(self._timeout_s)
        except (OSError, FormatError):
            wire.close()
            return None
        if isinstance(answer, Welcome) and answer.protocol == PROTOCOL:
            self._ledger.agent = f"pid {answer.pid}"
            return wire
        wire.close()
        if isinstance(answer, Refused):
            raise AgentError(f"agent: refused this rank: {answer.text}")
        raise AgentError(
            f"agent: speaks another protocol than forebay {forebay.__version__}: stop it and let "
            "this version start its own"
        )

    def _spawn(self) -> None:
        """Start an agent in a session of its own, exec'd, with nothing of ours but the log."""
        temporary = self._directory / f".{AGENT_CONFIG}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        with os.fdopen(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(msgspec.json.encode(self._config))
        temporary.rename(self._directory / AGENT_CONFIG)
        fd = open_own(self._directory / AGENT_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.set_blocking(fd, True)
        command = [sys.executable, "-c", _PROGRAM, _AGENT, "--detach", str(self._directory)]
        try:
            subprocess.run(  # noqa: S603 - our own interpreter, our own module
                command,
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                start_new_session=True,
                close_fds=True,
                check=True,
                timeout=self._timeout_s,
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise AgentError(f"agent: cannot be started: {error}{self._last_words()}") from error
        finally:
            os.close(fd)
        emit("agent.started", directory=self._directory)

    def _last_words(self) -> str:
        try:
            text = read_own(self._directory / AGENT_LOG, _LOG_BYTES).decode(errors="replace")
        except (OSError, UsageError):
            return ""
        lines = text.strip().splitlines()
        return f" (its log ends: {lines[-1][:200]!r})" if lines else ""


@contextlib.contextmanager
def _lock(path: Path, deadline: float) -> Iterator[None]:
    """Hold a lock file for a moment. Raises AgentError at the deadline."""
    fd = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                if time.monotonic() > deadline:
                    raise AgentError(
                        f"agent: another rank holds {path} while starting one"
                    ) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)
