"""A store in this process's memory, for tests and for trying things out. Copies every buffer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import ClassVar

from forebay.errors import ConflictError, DamagedError, NotFoundError, StoreError
from forebay.storage.multipart import UploadLog
from forebay.storage.pace import Pace
from forebay.storage.store import (
    Capabilities,
    CreateOutcome,
    ObjectInfo,
    OnDrop,
    OnProgress,
    Store,
    check_key,
    check_prefix,
    check_range,
)


def open_url(url: str, *, make: bool) -> MemoryStore:
    """The store of this URL; there is nothing to make."""
    del make
    return MemoryStore.named(url)


class MemoryStore(Store):
    """Objects in a dictionary. ``memory://name`` is one store for the life of the process."""

    capabilities = Capabilities(create_if_absent=True, durable=False, local_path=False)
    _named: ClassVar[dict[str, MemoryStore]] = {}

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self.pace = Pace()
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, url: str) -> MemoryStore:
        """The store of this URL."""
        return cls._named.setdefault(url, cls(url))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        data = self._data(key)
        if len(data) > max_bytes:
            raise StoreError(f"{self.url}/{key}: {len(data)} bytes, expected at most {max_bytes}")
        return data

    def _data(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)][0]
        except KeyError:
            raise NotFoundError(f"{self.url}/{key}: no such object") from None

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        data = self._data(key)
        into = check_range(start, into)
        if start + into.nbytes > len(data):
            raise DamagedError(
                f"{self.url}/{key}: expected at least {start + into.nbytes} bytes, "
                f"found {len(data)}: use another tier or an older checkpoint"
            )
        into[:] = data[start : start + into.nbytes]

    def head(self, key: str) -> ObjectInfo | None:
        found = self._objects.get(check_key(key))
        if found is None:
            return None
        return ObjectInfo(key=key, size=len(found[0]), modified_s=found[1])

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.create(key, bytes(data)) is CreateOutcome.EXISTS and self._data(key) != data:
            raise ConflictError(f"{self.url}/{key}: exists with other bytes; nothing was changed")

    def put_large(
        self,
        key: str,
        view: memoryview,
        *,
        on_progress: OnProgress | None = None,
        on_drop: OnDrop | None = None,
        log: UploadLog | None = None,
    ) -> None:
        del on_drop, log
        self.pace.take(view.nbytes)
        if self.create(key, bytes(view)) is CreateOutcome.EXISTS:
            raise ConflictError(f"{self.url}/{key}: exists; nothing was changed")
        if on_progress is not None:
            on_progress(view.nbytes)

    def create(self, key: str, data: bytes) -> CreateOutcome:
        check_key(key)
        with self._lock:
            if key in self._objects:
                return CreateOutcome.EXISTS
            self._objects[key] = (bytes(data), time.time())
        return CreateOutcome.COMMITTED

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            found = sorted(item for item in self._objects.items() if item[0].startswith(prefix))
        for key, (data, at) in found:
            yield ObjectInfo(key=key, size=len(data), modified_s=at)

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._lock:
            return self._objects.pop(key, None) is not None
