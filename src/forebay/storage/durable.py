"""Durability in one place: the only fsync of the package.

A file appears whole or not at all: written under a hidden name in the target directory, flushed,
linked to its name (which fails where the name exists), and the directory flushed once. A failed
flush condemns the file: the kernel may have dropped its pages and call the next flush a success.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from forebay.storage import direct
from forebay.storage.direct import ALIGN_BYTES, BLOCK_BYTES
from forebay.storage.pace import Pace

HIDDEN = "."
_UNFINISHED = ".tmp"

OnProgress = Callable[[int], None]
OnDrop = Callable[[int, int], None]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path, root: Path, settled: set[Path] | None = None) -> None:
    """Make ``path`` below ``root``, which exists, with every name on the way durable.

    A directory that is there already may have been made by somebody who has not flushed it yet, so
    its name is flushed too, once for as long as the caller keeps ``settled``.
    """
    known = set[Path]() if settled is None else settled
    missing: list[Path] = []
    while path != root and not (path in known and path.is_dir()):
        missing.append(path)
        path = path.parent
    for new in reversed(missing):
        with contextlib.suppress(FileExistsError):
            new.mkdir()
        sync_directory(new.parent)
        known.add(new)


def _write_all(
    fd: int,
    view: memoryview,
    told: OnProgress | None,
    dropped: OnDrop | None,
    pace: Pace | None,
) -> None:
    """Write ``view`` from the file's start in blocks, by O_DIRECT where that is possible."""
    whole = view.nbytes // ALIGN_BYTES * ALIGN_BYTES
    by_direct = whole >= direct.DIRECT_FROM_BYTES and direct.switch(fd, True)
    bounce = memoryview(mmap.mmap(-1, BLOCK_BYTES)) if by_direct and _unaligned(view) else None
    block_bytes = BLOCK_BYTES if pace is None else pace.grain_bytes
    at = paid = 0
    while at < view.nbytes:
        if by_direct and (at >= whole or at % ALIGN_BYTES):  # the tail is no whole block
            direct.switch(fd, False)
            by_direct = False
        block = view[at : min(at + block_bytes, whole if by_direct else view.nbytes)]
        if pace is not None and at + block.nbytes > paid:
            pace.take(at + block.nbytes - paid)
            paid = at + block.nbytes
        if by_direct and bounce is not None:
            bounce[: block.nbytes] = block
            block = bounce[: block.nbytes]
        try:
            written = os.pwrite(fd, block, at)
        except OSError as error:
            if not by_direct or error.errno != errno.EINVAL:
                raise
            direct.switch(fd, False)  # it took the flag and refuses the transfer
            by_direct = False
            continue
        if written == 0:
            raise OSError(errno.EIO, "a write wrote nothing")
        if told is not None:
            told(written)
        if dropped is not None:
            dropped(at, written)
        at += written


def _unaligned(view: memoryview) -> bool:
    return not direct.is_aligned(view)


def write_new(
    path: Path,
    view: memoryview,
    *,
    on_progress: OnProgress | None = None,
    on_drop: OnDrop | None = None,
    pace: Pace | None = None,
) -> None:
    """Make ``path`` with these bytes, durable on return. Raises FileExistsError when it exists.

    Killed at any point it leaves a hidden file at worst. On an error nothing is left, save where
    the directory's own flush fails: the file is there then, and a power cut may take it away.
    """
    # Open from before the link on: FileNotFoundError then always means that nothing was published.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _write_and_link(path, view, on_progress, on_drop, pace)
        os.fsync(directory)
    finally:
        os.close(directory)


def _write_and_link(
    path: Path,
    view: memoryview,
    told: OnProgress | None,
    dropped: OnDrop | None,
    pace: Pace | None,
) -> None:
    hidden = path.with_name(f"{HIDDEN}{path.name}.{secrets.token_hex(6)}{_UNFINISHED}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(hidden, flags, 0o666)
    try:
        try:
            _write_all(fd, view.cast("B") if view.nbytes else view, told, dropped, pace)
            os.fsync(fd)
        finally:
            os.close(fd)
        _publish(hidden, path)
    except BaseException:
        with contextlib.suppress(OSError):
            hidden.unlink()
        raise


def _publish(hidden: Path, path: Path) -> None:
    try:
        os.link(hidden, path)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            _rename_new(hidden, path)  # a filesystem without hard links
            return
        # NFS may carry out a link, lose the reply, and refuse its own repetition. Nobody else
        # knows the hidden name, so a second link to it is ours.
        if error.errno != errno.EEXIST or hidden.stat().st_nlink != 2:
            raise
    with contextlib.suppress(OSError):  # the file stands; what stays is swept
        hidden.unlink()


def _rename_new(hidden: Path, path: Path) -> None:
    """Rename that refuses to replace: renameat2 with RENAME_NOREPLACE."""
    library = ctypes.CDLL(None, use_errno=True)
    at_cwd, no_replace = -100, 1
    source, target = os.fsencode(hidden), os.fsencode(path)
    if library.renameat2(at_cwd, source, at_cwd, target, no_replace) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is one that ``write_new`` has not finished."""
    return name.startswith(HIDDEN) and name.endswith(_UNFINISHED)


def remove_unfinished(path: Path, older_than_s: float) -> bool:
    """Unlink what a writer left that died; False while it was written to within the last seconds.

    A writer that lives on after all fails with FileNotFoundError, having published nothing.
    """
    try:
        if time.time() - path.lstat().st_mtime < older_than_s:
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def remove(path: Path) -> bool:
    """Unlink a file, durable on return; False when there was none."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    for directory in path.parents:
        with contextlib.suppress(FileNotFoundError):  # another delete took the directory as well
            sync_directory(directory)
            break
    return True


class AppendFile:
    """A file that only grows; each append is durable on return. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._condemned = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        try:
            sync_directory(path.parent)  # whoever made the file may have died before doing so
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, data: bytes) -> None:
        """Write all of ``data`` at the end, durable on return.

        Raises OSError; the tail may then be torn, and every later append is refused: what follows
        a torn tail cannot be read, and a second flush proves nothing. Begin a new file.
        """
        if self._condemned:
            raise OSError(errno.EIO, "an earlier append failed; begin a new file", str(self._path))
        self._condemned = True
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fdatasync(self._fd)
        self._condemned = False

    def stat(self) -> os.stat_result:
        """Which file it is, whatever has its name by now."""
        return os.fstat(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def write_cached(path: Path, view: memoryview) -> None:
    """Make ``path`` with these bytes through the page cache and flush it, as plain programs do.

    To measure by; nothing that is kept is written so. Raises OSError.
    """
    with path.open("xb", buffering=0) as file:
        at = 0
        while at < view.nbytes:
            at += file.write(view[at : at + BLOCK_BYTES])
        os.fsync(file.fileno())
