"""The contract of a store: keys, buffers, and a create that exactly one of many may win."""

from __future__ import annotations

import abc
import enum
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import FullError, StoreError, UsageError
from forebay.storage.pace import Pace

_PART = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")  # a leading dot hides: temporaries alone
_FULL = {28, 122}  # ENOSPC, EDQUOT

OnProgress = Callable[[int], None]


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


def check_key(key: str, *, prefix: bool = False) -> str:
    """Return ``key`` when it is relative and of plain parts. Raises UsageError."""
    text = key.removesuffix("/") if prefix else key
    parts = text.split("/") if text else []
    if (not parts and not prefix) or any(_PART.fullmatch(part) is None for part in parts):
        raise UsageError(
            f"key {key!r}: expected relative parts of letters, digits, '.', '_', '=' or '-', "
            "none with a leading dot"
        )
    return key


class Store(abc.ABC):
    """Objects by key. Every call is synchronous and may be made from any thread.

    No object is ever changed or renamed: writing a key that exists with other bytes is refused
    with ConflictError. Failures are StoreError, FullError where there is no room; both name the
    object and the cause.
    """

    url: str
    capabilities: Capabilities

    @abc.abstractmethod
    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object. Raises NotFoundError, or StoreError when it is larger."""

    @abc.abstractmethod
    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``start``. Raises NotFoundError; DamagedError when too short."""

    @abc.abstractmethod
    def head(self, key: str) -> ObjectInfo | None:
        """Size and time, or None when there is no such object."""

    @abc.abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write a small object; visible at once and whole, durable on return.

        The same bytes under the same key again are fine.
        """

    @abc.abstractmethod
    def put_large(
        self,
        key: str,
        view: memoryview,
        *,
        on_progress: OnProgress | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Write ``view`` (page aligned for speed); visible at once and whole, durable on return.

        ``on_progress`` hears of bytes as they leave. Raises ConflictError when the key exists.
        """

    @abc.abstractmethod
    def create(self, key: str, data: bytes) -> CreateOutcome:
        """Write only if there is no such object; exactly one of many creators is COMMITTED."""

    @abc.abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects below ``prefix`` (which ends with a slash or is empty), sorted by key."""

    @abc.abstractmethod
    def delete(self, key: str) -> bool:
        """Remove an object; False when there was none. Durable on return."""

    def local_path(self, key: str) -> Path | None:
        """The object's file, where the store has files."""
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
    if error.errno in _FULL:
        return FullError(f"{what}: {cause}: free space there or enlarge it")
    return StoreError(f"{what}: {cause}")
