"""What is one user's alone on a node: directories, files and peers that others may forge."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from forebay.errors import UsageError

_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_ADVICE = "remove it or set FOREBAY_RUNTIME_DIR to another directory"


def require_private(path: Path) -> None:
    """Raise UsageError unless ``path`` is a directory of this user, no link, with mode 0700."""
    try:
        _require(path, path.lstat())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: expected a job's directory") from None


def _require(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path}: expected a directory, no link: {_ADVICE}")
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{path}: must belong to uid {os.getuid()} with mode 0700, found uid "
            f"{found.st_uid}, mode {found.st_mode & 0o777:04o}: {_ADVICE}"
        )


def make_private(path: Path) -> None:
    """Create a directory for this user alone, unless it is there. Raises UsageError as above.

    FileNotFoundError means that somebody removes it, or what it lies in, at this moment.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        _require(path, path.lstat())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: {_ADVICE}") from None


def require_own(path: Path, what: str) -> None:
    """Raise UsageError unless a directory is this user's and not for everybody to write into."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path}: {what} must be a directory, no link: remove it")
    if found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"{path}: {what} must belong to uid {os.getuid()} and not be writable by everybody, "
            f"found uid {found.st_uid}, mode {found.st_mode & 0o777:04o}: remove it"
        )


def open_own(path: Path, flags: int) -> int:
    """Open a file that must be this user's, regular, and known by one name alone.

    No link is followed, nothing blocks; what ``flags`` create gets mode 0600. Raises OSError,
    UsageError for a file that somebody has put there.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except (FileNotFoundError, FileExistsError, PermissionError):
        raise
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: expected a plain file: {_ADVICE}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path}: is no plain file: {_ADVICE}")
        if found.st_uid != os.getuid() or found.st_nlink > 1:
            raise UsageError(
                f"{path}: uid {found.st_uid}, {found.st_nlink} names: expected a file of uid "
                f"{os.getuid()} under one name: {_ADVICE}"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_own(path: Path, most_bytes: int) -> bytes:
    """The first bytes of such a file. Raises OSError, UsageError."""
    fd = open_own(path, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        return file.read(min(most_bytes, os.fstat(fd).st_size))


def peer_is_own(connection: socket.socket) -> bool:
    """True when the other end of a Unix socket is a process of this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(raw)[1] == os.getuid())
