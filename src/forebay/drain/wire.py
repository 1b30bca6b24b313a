"""A blocking conversation of one question with an agent: what the command line needs."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from forebay.errors import AgentError
from forebay.format.messages import Message, frame_bytes, read_message, write_frame
from forebay.private import peer_is_own

_SOCKET_NAME_BYTES = 100  # the kernel allows 107


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for a socket that is short enough for the kernel."""
    if len(os.fsencode(path)) < _SOCKET_NAME_BYTES:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


@contextlib.contextmanager
def _connected(socket_path: Path, timeout_s: float) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
        wire.settimeout(timeout_s)
        with short_path(socket_path) as name:
            wire.connect(name)
        if not peer_is_own(wire):
            raise PermissionError(errno.EPERM, "another user listens there", str(socket_path))
        yield wire


def ask(socket_path: Path, message: Message, timeout_s: float) -> Message:
    """Send one message to an agent and return its answer. Raises AgentError when it is gone."""
    try:
        with _connected(socket_path, timeout_s) as wire:
            wire.sendall(write_frame(message))
            return read_message(_exactly(wire, frame_bytes(_exactly(wire, 4))))
    except OSError as error:
        raise AgentError(
            f"{socket_path}: no agent answers within {timeout_s:g} s: {error}"
        ) from error


def answers(socket_path: Path, timeout_s: float = 1.0) -> bool:
    """True when somebody accepts connections at the socket."""
    try:
        with _connected(socket_path, timeout_s):
            return True
    except OSError:
        return False


def _exactly(wire: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = wire.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError("the agent closed the connection")
        data += chunk
    return bytes(data)
