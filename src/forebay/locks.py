"""Who holds a lock file: how the living are told from the dead on one node."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def lock_owner(path: Path) -> int | None:
    """The process that holds a lock file, or None. Takes no lock itself.

    Never to be asked by a process of a lock of its own: closing the file would give that back.
    """
    try:
        return _owner(path)
    except OSError:
        return None


def _owner(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else int(pid)
    finally:
        os.close(fd)


def is_free(path: Path) -> bool:
    """Whether a lock file is there and nobody holds it; as ``lock_owner``."""
    try:
        return _owner(path) is None
    except OSError:
        return False


def is_replaced(fd: int, path: Path) -> bool:
    """Whether the name of an open file stands for another one by now.

    Its name may have been removed; whoever then makes a file of that name has taken its place.
    """
    try:
        return not os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def may_be_held(path: Path) -> bool:
    """Whether a process holds a lock file, or that cannot be told; as ``lock_owner``.

    Who takes a live rank for a dead one, for want of a descriptor, gives up its snapshots.
    """
    try:
        return _owner(path) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True
