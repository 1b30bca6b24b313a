"""Reads that are made once a node: what one process has read, the others take from shared memory.

Ranks of a node need the same record and the same parts of the index. The first to come reads, under
a lock that ends with its process; the others wait for it, then copy. What cannot be shared, for
want of memory or because the first is slow, is read from the store as if nobody else were there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from forebay.storage.store import (
    CreateOutcome,
    ObjectInfo,
    Store,
    check_range,
)

_POLL_S = 0.002


class ReadOnce(Store):
    """A store whose reads are shared through ``directory``, which is the user's own. Only reads.

    Whole objects and ranges are shared when asked for exactly alike; their bytes are the caller's
    to check. One that a process asks for again, because it found it damaged, comes from the store.
    ``patience_s`` is for how long another process's read is waited for.
    """

    def __init__(self, store: Store, directory: Path, *, patience_s: float = 60.0) -> None:
        self.url = store.url
        self.capabilities = store.capabilities
        self.pace = store.pace
        self._store = store
        self._directory = directory
        self._patience_s = patience_s
        self._taken: set[str] = set()
        with contextlib.suppress(OSError):
            directory.mkdir(mode=0o700, exist_ok=True)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """As the store does, or what another process of the node read."""
        found: bytes = self._shared(
            f"{key} {max_bytes}", lambda: self._store.get(key, max_bytes=max_bytes)
        )
        return found

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """As the store does, or what another process of the node read."""
        view = check_range(start, into)

        def read() -> bytes:
            self._store.read_into(key, start, view)
            return bytes(view)

        view[:] = self._shared(f"{key} {start} {view.nbytes}", read)

    def _shared(self, what: str, read: Callable[[], bytes]) -> bytes:
        name = blake3(f"{self.url} {what}".encode()).hexdigest()[:32]
        if name in self._taken:
            return read()
        self._taken.add(name)
        path = self._directory / name
        with self._lock(path.with_suffix(".lock")) as held:
            with contextlib.suppress(OSError):
                return path.read_bytes()
            data = read()
            if held:
                _write(path, data)
            return data

    @contextlib.contextmanager
    def _lock(self, path: Path) -> Iterator[bool]:
        """Hold a lock file; False when that cannot be, or not in time."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield False
            return
        try:
            deadline, held = time.monotonic() + self._patience_s, False
            while not held and time.monotonic() < deadline:
                try:
                    # Of the open file, not of the process: threads exclude each other too.
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held = True
                except OSError:
                    time.sleep(_POLL_S)
            yield held
        finally:
            os.close(fd)

    def clear(self) -> None:
        """Remove what was shared: everybody of the node has read, or will read for itself."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def head(self, key: str) -> ObjectInfo | None:
        """As the store does."""
        return self._store.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As the store does."""
        return self._store.list(prefix)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Not here."""
        raise NotImplementedError(f"{self.url}/{key}: opened to read")

    def put_large(self, key: str, view: memoryview, **options: Any) -> None:
        """Not here."""
        raise NotImplementedError(f"{self.url}/{key}: opened to read")

    def create(self, key: str, data: bytes) -> CreateOutcome:
        """Not here."""
        raise NotImplementedError(f"{self.url}/{key}: opened to read")

    def delete(self, key: str) -> bool:
        """Not here."""
        raise NotImplementedError(f"{self.url}/{key}: opened to read")


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: who dies here leaves a file that nobody reads."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except OSError:  # memory is short: the others read for themselves
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
