"""A store whose shards have a size and nothing else, for checkpoints that no machine could hold."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from forebay.errors import StoreError
from forebay.format.record import Record
from forebay.storage.memory import MemoryStore
from forebay.storage.store import ObjectInfo


class HollowStore(MemoryStore):
    """Keeps what is written to it; the shards of given records are listed and cannot be read.

    ``read_bytes`` counts what was read, ``reads`` how often.
    """

    def __init__(self, url: str = "memory://hollow") -> None:
        super().__init__(url)
        self._shards: dict[str, int] = {}
        self.read_bytes = self.reads = 0

    def add_shards(self, record: Record) -> None:
        """From now on the shards of a record are there."""
        self._shards |= {shard.key: shard.nbytes for shard in record.shards if shard.key}

    def head(self, key: str) -> ObjectInfo | None:
        """A shard's size, or what memory has."""
        size = self._shards.get(key)
        if size is None:
            return super().head(key)
        return ObjectInfo(key=key, size=size, modified_s=0.0)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Shards and what memory has, sorted."""
        keys = sorted(key for key in self._shards if key.startswith(prefix))
        shards = (ObjectInfo(key=key, size=self._shards[key], modified_s=0.0) for key in keys)
        return heapq.merge(super().list(prefix), shards, key=lambda info: info.key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """What memory has. Raises StoreError for a shard."""
        self._refuse(key)
        data = super().get(key, max_bytes=max_bytes)
        self.reads, self.read_bytes = self.reads + 1, self.read_bytes + len(data)
        return data

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """What memory has. Raises StoreError for a shard."""
        self._refuse(key)
        super().read_into(key, start, into)
        self.reads, self.read_bytes = self.reads + 1, self.read_bytes + into.nbytes

    def _refuse(self, key: str) -> None:
        if key in self._shards:
            raise StoreError(f"{self.url}/{key}: has a size and no bytes")
