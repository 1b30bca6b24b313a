"""Where images can be read: the arenas of this node, its local tier, the durable tier."""

from __future__ import annotations

import logging
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Protocol

from forebay.errors import DamagedError, ForebayError, FormatError, NotFoundError, StoreError
from forebay.format import names
from forebay.format.shard import PAGE_BYTES
from forebay.format.slot import WORD_BYTES, ArenaHead, SlotState, read_head, read_ticket, read_words
from forebay.storage.store import Store
from forebay.watch.events import emit


class Source(Protocol):
    """A place that may have an object; ``name`` is how the report calls it."""

    name: str

    def has(self, key: str) -> bool:
        """True when the object seems to be here."""

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill ``into``. Raises NotFoundError when it is not here, DamagedError when it is cut."""


class StoreSource:
    """A tier that is a store: ``local`` or ``durable``."""

    def __init__(self, name: str, store: Store) -> None:
        self.name = name
        self._store = store

    def has(self, key: str) -> bool:
        """True when the store has the object."""
        try:
            return self._store.head(key) is not None
        except StoreError:
            return False

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill ``into`` from the object."""
        self._store.read_into(key, start, into)


class _Slot:
    """A slot with an image; ``words`` are as they stood before its ticket was read, state aside."""

    def __init__(self, head: ArenaHead, view: memoryview, slot: int) -> None:
        self.head, self.view, self.slot = head, view, slot
        self.words = self.now()
        self.nbytes = 0

    def now(self) -> bytes:
        """The words as they stand, state aside: they change when the slot is filled again."""
        start = self.head.control_start(self.slot)
        return bytes(self.view[start + 8 : start + WORD_BYTES])

    def held(self) -> bool:
        """True while no trainer has written into the slot since it was found."""
        start = self.head.control_start(self.slot)
        state = int.from_bytes(self.view[start : start + 8], "little")
        return state != SlotState.FILLING and self.now() == self.words

    def key(self, name: str) -> str | None:
        """The object the image is; None where there is none. Raises FormatError, UsageError."""
        start = self.head.control_start(self.slot)
        control = self.view[start : start + self.head.control_bytes]
        words = read_words(control[:WORD_BYTES], self.head, name)
        if words.state is SlotState.FILLING or not words.fills or not words.stamp_bytes:
            return None
        layout, stamp = read_ticket(control, words, name)
        if not self.held() or not layout.image_bytes:
            return None
        if not 0 < layout.image_bytes <= self.head.image_bytes:
            raise FormatError(
                f"{name}: slot {self.slot} has room for {self.head.image_bytes} bytes, "
                f"its ticket says {layout.image_bytes}"
            )
        self.nbytes = layout.image_bytes
        return names.shard_key(stamp.step, stamp.attempt, layout.node, layout.rank)


class ArenaSource:
    """Images that still lie in this node's shared memory, left there by a save.

    A slot may be filled again at any time: its words are compared before and after each read, and
    the digests settle the rest. Arenas and slots that make no sense are passed over and told.
    """

    name = "memory"

    def __init__(self, directory: Path) -> None:
        self._slots: dict[str, _Slot] = {}
        for path in sorted(directory.glob("rank-*.arena")):
            try:
                self._add(path)
            except (OSError, ForebayError, struct.error) as error:
                _refused(path.name, error)

    def _add(self, path: Path) -> None:
        # A named pipe would hold a blocking open for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{path.name}: is no file")
            head = read_head(os.pread(fd, PAGE_BYTES, 0), status.st_size, path.name)
            view = memoryview(mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        for number in range(head.slots):
            slot = _Slot(head, view, number)
            try:
                key = slot.key(path.name)
            except ForebayError as error:
                # The other slots may be whole: a trainer that died leaves one torn.
                if slot.held():
                    _refused(path.name, error)
                continue
            if key is not None:
                self._slots[key] = slot

    def has(self, key: str) -> bool:
        """True when a slot has the image."""
        return key in self._slots

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill ``into`` from the image, if no save has taken its place."""
        slot = self._slots.get(key)
        if slot is None:
            raise NotFoundError(f"{key}: not in this node's memory")
        if not slot.held():
            raise NotFoundError(f"{key}: its slot was filled again")
        if start + into.nbytes > slot.nbytes:
            raise DamagedError(
                f"memory/{key}: expected at least {start + into.nbytes} bytes, found {slot.nbytes}"
            )
        at = slot.head.image_start(slot.slot) + start
        into[:] = slot.view[at : at + into.nbytes]
        if not slot.held():
            raise NotFoundError(f"{key}: its slot was filled again")


def _refused(arena: str, error: Exception) -> None:
    emit("arena.refused", level=logging.WARNING, arena=arena, why=error)
