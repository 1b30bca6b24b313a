"""The agent's side of arenas: finds staged slots, maps their images, gives slots back."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import FormatError
from forebay.format.shard import PAGE_BYTES
from forebay.format.slot import (
    WORD_BYTES,
    ArenaHead,
    Layout,
    SlotState,
    Stamp,
    read_head,
    read_ticket,
    read_words,
)
from forebay.watch.events import emit

_FLOCK = struct.Struct("hhqqi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A slot that holds a snapshot, and what its ticket says."""

    arena: str
    slot: int
    state: SlotState
    layout: Layout
    stamp: Stamp


class Slots:
    """All arenas of a job's directory, mapped as they appear. Used by the agent's loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, tuple[ArenaHead, mmap.mmap, memoryview, int]] = {}
        self._bad: set[str] = set()

    def refresh(self) -> None:
        """Map arenas that are new and drop those whose file is gone or is another one."""
        found = {path.name: path for path in self._directory.glob("rank-*.arena")}
        for name in list(self._maps):
            if name not in found or found[name].stat().st_ino != self._maps[name][3]:
                self._unmap(name)
        for name, path in found.items():
            if name not in self._maps and name not in self._bad:
                self._map(name, path)

    def _map(self, name: str, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            found = os.fstat(fd)
            if found.st_uid != os.getuid():
                raise FormatError(f"{path}: belongs to uid {found.st_uid}")
            head = read_head(os.pread(fd, PAGE_BYTES, 0), found.st_size, name)
            mapping = mmap.mmap(fd, found.st_size)
            self._maps[name] = (head, mapping, memoryview(mapping), found.st_ino)
        except FormatError as error:
            self._bad.add(name)
            emit("arena.refused", level=40, why=error)
        finally:
            os.close(fd)

    def _unmap(self, name: str) -> None:
        _, mapping, view, _ = self._maps.pop(name)
        try:
            view.release()
            mapping.close()
        except BufferError:
            emit("arena.still_read", level=30, arena=name)

    def occupied(self) -> Iterator[Ticket]:
        """Slots that are STAGED or DRAINING, with their tickets."""
        for name, (head, _, view, _) in self._maps.items():
            for slot in range(head.slots):
                start = head.control_start(slot)
                state = int.from_bytes(view[start : start + 8], "little")
                if state not in (SlotState.STAGED, SlotState.DRAINING):
                    continue
                control = view[start : start + head.control_bytes]
                try:
                    words = read_words(control[:WORD_BYTES], head, name)
                    layout, stamp = read_ticket(control, words, name)
                except FormatError as error:
                    emit("slot.refused", level=40, why=error)
                    self.release(name, slot)
                    continue
                yield Ticket(arena=name, slot=slot, state=words.state, layout=layout, stamp=stamp)

    def image(self, name: str, slot: int) -> memoryview:
        """The image area of a slot; hold it only while the slot is DRAINING."""
        head, _, view, _ = self._maps[name]
        start = head.image_start(slot)
        return view[start : start + head.image_bytes]

    def knows(self, name: str) -> bool:
        """True while the arena is mapped."""
        return name in self._maps

    def take(self, name: str, slot: int) -> None:
        """STAGED -> DRAINING."""
        self._set(name, slot, SlotState.DRAINING)

    def release(self, name: str, slot: int) -> None:
        """DRAINING -> FREE: the bytes are safe in the next tier, or given up."""
        if name in self._maps:
            self._set(name, slot, SlotState.FREE)

    def _set(self, name: str, slot: int, state: SlotState) -> None:
        head, _, view, _ = self._maps[name]
        view.cast("Q")[head.control_start(slot) // 8] = int(state)

    def close(self) -> None:
        """Drop all mappings."""
        for name in list(self._maps):
            self._unmap(name)


def lock_owner(path: Path) -> int | None:
    """The process that holds a lock file, or None. Takes no lock itself."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid
    finally:
        os.close(fd)
