"""The contract of a store: keys, buffers, and a create that exactly one of many may win."""

from __future__ import annotations

import abc
import enum
import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import FullError, StoreError, UsageError
from forebay.storage.multipart import UploadLog
from forebay.storage.pace import Pace

_PART = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")
_ADVICE = {
    errno.EACCES: "allow writing there, or choose another directory",
    errno.EPERM: "allow writing there, or choose another directory",
    errno.EROFS: "mount it for writing, or choose another directory",
    errno.ENOTDIR: "a part of the path is a file: move it away, or choose another directory",
    errno.EISDIR: "a directory stands there: move it away",
    errno.ELOOP: "a link stands there: remove it",
    errno.EIO: "see the kernel's log for that disk",
    errno.ESTALE: "mount the filesystem again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}

OnProgress = Callable[[int], None]
OnDrop = Callable[[int, int], None]


class CreateOutcome(enum.Enum):
    """What became of a create: ours is there, another's is, or the reply was lost."""

    COMMITTED = "committed"
    EXISTS = "exists"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object: ``size`` in bytes, ``modified_s`` in Unix seconds."""

    key: str
    size: int
    modified_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store can promise."""

    create_if_absent: bool
    """``create`` is atomic among racing creators."""
    durable: bool
    """What a call wrote survives a power cut once the call returned."""
    local_path: bool
    """``local_path`` gives a file that can be mapped."""


def is_part(name: str) -> bool:
    """Whether ``name`` may be a part of a key. Names with a leading dot are the store's own."""
    return _PART.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return ``key`` when it is relative, of plain parts, and stays in the run.

    Raises UsageError.
    """
    if not all(map(is_part, key.split("/"))):
        raise UsageError(
            f"key {key!r}: expected relative parts of letters, digits, '.', '_', '=' or '-', none "
            "empty, none beginning with '.'"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` when it is empty, or a key and a slash. Raises UsageError."""
    if prefix:
        if not prefix.endswith("/"):
            raise UsageError(f"prefix {prefix!r}: expected a '/' at its end")
        check_key(prefix[:-1])
    return prefix


def check_range(start: int, into: memoryview) -> memoryview:
    """The target of a read as bytes. Raises UsageError for a negative start or a strided target."""
    if start < 0 or not into.c_contiguous or into.readonly:
        raise UsageError(f"read from byte {start}: expected 0 or more, and writable dense memory")
    return into.cast("B") if into.nbytes else memoryview(bytearray())


class Store(abc.ABC):
    """Objects by key. Every call is synchronous and may be made from any thread.

    No object is ever changed or renamed: writing a key that exists with other bytes is refused
    with ConflictError. Failures are StoreError, FullError where there is no room; both name the
    object, the cause and what to do. A key that leaves the run is UsageError.
    """

    url: str
    capabilities: Capabilities
    pace: Pace
    """The budget of what is written; a store on machines of its own heeds it at every request."""

    @abc.abstractmethod
    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object. Raises NotFoundError, or StoreError when it is above ``max_bytes``."""

    @abc.abstractmethod
    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``start``. Raises NotFoundError; DamagedError when too short."""

    @abc.abstractmethod
    def head(self, key: str) -> ObjectInfo | None:
        """Size and time, or None when there is no such object."""

    @abc.abstractmethod
    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write a small object; visible at once and whole, durable on return.

        The same bytes under the same key again are fine; other bytes are ConflictError.
        """

    @abc.abstractmethod
    def put_large(
        self,
        key: str,
        view: memoryview,
        *,
        on_progress: OnProgress | None = None,
        on_drop: OnDrop | None = None,
        log: UploadLog | None = None,
    ) -> None:
        """Write ``view`` (page aligned for speed); visible at once and whole, durable on return.

        ``on_progress`` hears of bytes as they leave, less than nothing for those that must go
        again; an error that it raises cuts the write off. ``on_drop`` hears of ranges (start, size)
        that need not stay in memory, though they may be read once more. ``log`` lets a store that
        takes parts go on, after a death, with those it has. Raises ConflictError when the key
        exists.
        """

    @abc.abstractmethod
    def create(self, key: str, data: bytes) -> CreateOutcome:
        """Write only if there is no such object; exactly one of many creators is COMMITTED.

        On COMMITTED and on EXISTS the object is durable. On an error nothing is known to be there.
        """

    @abc.abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects below ``prefix`` (which ends with a slash or is empty), sorted by key.

        Names that are no keys, such as unfinished writes or a stranger's files, are not shown.
        """

    @abc.abstractmethod
    def delete(self, key: str) -> bool:
        """Remove an object; False when there was none. Durable on return."""

    def settle(self, key: str) -> None:  # noqa: B027 - nothing to do in most stores
        """An object that was seen is durable on return, whoever wrote it and lives no more.

        Where a file can be seen before its name is durable. Raises StoreError; one that is gone by
        now is none.
        """

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        """Remove what writers that died left unfinished below ``prefix``; how many there were.

        Hidden files, uploads without an end. Nothing younger than ``older_than_s`` is touched, and
        no object ever.
        """
        del older_than_s
        check_prefix(prefix)
        return 0

    def local_path(self, key: str) -> Path | None:
        """Where the object's file is or would be, in a store that has files."""
        check_key(key)
        return None

    def get_range(self, key: str, start: int, nbytes: int) -> bytes:
        """``nbytes`` from byte ``start``. Raises as ``read_into``."""
        buffer = bytearray(nbytes)
        self.read_into(key, start, memoryview(buffer))
        return bytes(buffer)


def store_error(error: OSError, what: str) -> StoreError:
    """The error a failed system call becomes; ``what`` names the operation and the object."""
    cause = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FullError(f"{what}: {cause}: free space there or enlarge it")
    advice = _ADVICE.get(error.errno or 0)
    return StoreError(f"{what}: {cause}" + (f": {advice}" if advice else ""))
