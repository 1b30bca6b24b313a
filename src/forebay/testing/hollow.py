"""A store whose shards have a size and nothing else, for checkpoints that no machine could hold."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Any

from forebay.errors import StoreError
from forebay.storage.store import CreateOutcome, ObjectInfo, Store


class HollowStore(Store):
    """Another store, and ``shards`` of these sizes, which are listed and cannot be read.

    ``read_bytes`` counts what was read, ``reads`` how often.
    """

    def __init__(self, inner: Store, shards: Mapping[str, int]) -> None:
        self.url = inner.url
        self.capabilities = inner.capabilities
        self.pace = inner.pace
        self.read_bytes = self.reads = 0
        self._inner = inner
        self._shards = dict(sorted(shards.items()))

    def head(self, key: str) -> ObjectInfo | None:
        """A shard's size, or what the other store says."""
        size = self._shards.get(key)
        if size is None:
            return self._inner.head(key)
        return ObjectInfo(key=key, size=size, modified_s=0.0)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Shards and what the other store has, sorted."""
        shards = (
            ObjectInfo(key=key, size=size, modified_s=0.0)
            for key, size in self._shards.items()
            if key.startswith(prefix)
        )
        return heapq.merge(self._inner.list(prefix), shards, key=lambda info: info.key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """What the other store has. Raises StoreError for a shard."""
        self._refuse(key)
        data = self._inner.get(key, max_bytes=max_bytes)
        self.reads, self.read_bytes = self.reads + 1, self.read_bytes + len(data)
        return data

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """What the other store has. Raises StoreError for a shard."""
        self._refuse(key)
        self._inner.read_into(key, start, into)
        self.reads, self.read_bytes = self.reads + 1, self.read_bytes + into.nbytes

    def _refuse(self, key: str) -> None:
        if key in self._shards:
            raise StoreError(f"{self.url}/{key}: has a size and no bytes")

    def put(self, key: str, data: bytes | memoryview) -> None:
        """As the other store does."""
        self._inner.put(key, data)

    def put_large(self, key: str, view: memoryview, **options: Any) -> None:
        """As the other store does."""
        self._inner.put_large(key, view, **options)

    def create(self, key: str, data: bytes) -> CreateOutcome:
        """As the other store does."""
        return self._inner.create(key, data)

    def delete(self, key: str) -> bool:
        """As the other store does."""
        return self._inner.delete(key)

    def settle(self, key: str) -> None:
        """As the other store does."""
        self._inner.settle(key)
