"""Durability in one place: the only fsync of the package.

A file appears whole or not at all: written under a hidden name in the target directory, flushed,
linked to its name (which fails where the name exists), and the directory flushed once. A failed
flush condemns the file: the kernel may have dropped its pages and call the next flush a success.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from forebay.storage.pace import Pace

BLOCK_BYTES = 4 * 2**20
ALIGN_BYTES = 4096
HIDDEN = "."

OnProgress = Callable[[int], None]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path, root: Path) -> None:
    """Create ``path`` below ``root``, which exists, and make every new name durable."""
    missing = []
    while path != root and not path.is_dir():
        missing.append(path)
        path = path.parent
    for new in reversed(missing):
        with contextlib.suppress(FileExistsError):
            new.mkdir()
        sync_directory(new.parent)


def _address(view: memoryview) -> int | None:
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    except (TypeError, ValueError):  # read-only memory: its address does not matter, copy
        return None


def _write_all(
    fd: int, view: memoryview, at: int, told: OnProgress | None, pace: Pace | None
) -> int:
    """Write ``view`` at ``at`` in blocks; the offset behind it."""
    done = 0
    block_bytes = BLOCK_BYTES if pace is None else pace.grain_bytes
    while done < view.nbytes:
        block = view[done : done + block_bytes]
        if pace is not None:
            pace.take(block.nbytes)
        written = os.pwrite(fd, block, at + done)
        if written == 0:
            raise OSError(errno.EIO, "a write wrote nothing")
        done += written
        if told is not None:
            told(written)
    return at + done


def _fill(path: Path, view: memoryview, told: OnProgress | None, pace: Pace | None) -> int:
    """Write a new hidden file and return its descriptor, O_DIRECT where memory and system allow."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    address = _address(view) if view.nbytes >= ALIGN_BYTES else None
    whole = view.nbytes // ALIGN_BYTES * ALIGN_BYTES
    if address is not None and address % ALIGN_BYTES == 0:
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # tmpfs and some others have no O_DIRECT
                raise
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        else:
            try:
                at = _write_all(fd, view[:whole], 0, told, pace)
                if at < view.nbytes:
                    _plain(fd)
                    _write_all(fd, view[at:], at, told, pace)
            except BaseException:
                os.close(fd)
                raise
            return fd
    fd = os.open(path, flags, 0o666)
    try:
        _write_all(fd, view, 0, told, pace)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _plain(fd: int) -> None:
    """Take O_DIRECT off a descriptor: the tail of a file is no whole block."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def write_new(
    path: Path,
    view: memoryview,
    *,
    on_progress: OnProgress | None = None,
    pace: Pace | None = None,
) -> None:
    """Make ``path`` with these bytes, durable on return. Raises FileExistsError when it exists.

    Killed at any point it leaves a hidden file at worst. On an error nothing is left.
    """
    hidden = path.with_name(f"{HIDDEN}{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        fd = _fill(hidden, view, on_progress, pace)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        _publish(hidden, path)
    except BaseException:
        with contextlib.suppress(OSError):
            hidden.unlink()
        raise
    sync_directory(path.parent)


def _publish(hidden: Path, path: Path) -> None:
    try:
        os.link(hidden, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise
        _rename_new(hidden, path)  # a filesystem without hard links
        return
    hidden.unlink()


def _rename_new(hidden: Path, path: Path) -> None:
    """Rename that refuses to replace: renameat2 with RENAME_NOREPLACE."""
    library = ctypes.CDLL(None, use_errno=True)
    at_cwd, no_replace = -100, 1
    source, target = os.fsencode(hidden), os.fsencode(path)
    if library.renameat2(at_cwd, source, at_cwd, target, no_replace) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def remove(path: Path) -> bool:
    """Unlink a file, durable on return; False when there was none."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    sync_directory(path.parent)
    return True


class AppendFile:
    """A file that only grows; each append is durable on return."""

    def __init__(self, path: Path) -> None:
        new = not path.exists()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if new:
            sync_directory(path.parent)

    def append(self, data: bytes) -> None:
        """Write all of ``data`` at the end. Raises OSError; the tail may then be torn."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
