"""Where images can be read: the arenas of this node, its local tier, the durable tier."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Protocol

from forebay.errors import DamagedError, FormatError, NotFoundError
from forebay.format import names
from forebay.format.shard import PAGE_BYTES
from forebay.format.slot import WORD_BYTES, ArenaHead, SlotState, read_head, read_ticket, read_words
from forebay.storage.store import Store
from forebay.watch.events import emit


class Source(Protocol):
    """A place that may have an object; ``name`` is how the report calls it."""

    name: str

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill ``into``. Raises NotFoundError when it is not here, DamagedError when it is cut."""


class StoreSource:
    """A tier that is a store: ``local`` or ``durable``."""

    def __init__(self, name: str, store: Store) -> None:
        self.name = name
        self._store = store

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill ``into`` from the object."""
        self._store.read_into(key, start, into)


class _Slot:
    """A slot with an image, and its fill count when it was found."""

    def __init__(
        self, arena: str, head: ArenaHead, view: memoryview, slot: int, nbytes: int
    ) -> None:
        self.arena, self.head, self.view, self.slot, self.nbytes = arena, head, view, slot, nbytes
        self.words = self.now()

    def now(self) -> bytes:
        """State aside, the words as they stand: they change when the slot is filled again."""
        start = self.head.control_start(self.slot)
        return bytes(self.view[start + 8 : start + WORD_BYTES])

    def filling(self) -> bool:
        """True while a trainer writes into the slot."""
        start = self.head.control_start(self.slot)
        return int.from_bytes(self.view[start : start + 8], "little") == SlotState.FILLING


class ArenaSource:
    """Images that still lie in this node's shared memory, left there by a save.

    A slot may be filled again at any time: its words are compared before and after each read, and
    the digests settle the rest. Arenas that make no sense are passed over and told.
    """

    name = "memory"

    def __init__(self, directory: Path) -> None:
        self._slots: dict[str, _Slot] = {}
        for path in sorted(directory.glob("rank-*.arena")):
            try:
                self._add(path)
            except (OSError, FormatError) as error:
                emit("arena.refused", level=30, why=error)

    def _add(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            head = read_head(os.pread(fd, PAGE_BYTES, 0), size, path.name)
            view = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        for slot in range(head.slots):
            start = head.control_start(slot)
            control = view[start : start + head.control_bytes]
            words = read_words(control[:WORD_BYTES], head, path.name)
            if words.state is SlotState.FILLING or not words.stamp_bytes:
                continue
            layout, stamp = read_ticket(control, words, path.name)
            if layout.image_bytes:
                key = names.shard_key(stamp.step, stamp.attempt, layout.node, layout.rank)
                self._slots[key] = _Slot(path.name, head, view, slot, layout.image_bytes)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill ``into`` from the image, if no save has taken its place."""
        slot = self._slots.get(key)
        if slot is None:
            raise NotFoundError(f"{key}: not in this node's memory")
        if start + into.nbytes > slot.nbytes:
            raise DamagedError(
                f"memory/{key}: expected at least {start + into.nbytes} bytes, found {slot.nbytes}"
            )
        at = slot.head.image_start(slot.slot) + start
        into[:] = slot.view[at : at + into.nbytes]
        if slot.filling() or slot.now() != slot.words:
            raise NotFoundError(f"{key}: its slot was filled again")
