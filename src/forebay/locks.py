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
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else int(pid)
    finally:
        os.close(fd)
