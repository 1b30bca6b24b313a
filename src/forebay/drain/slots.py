"""The agent's side of arenas: finds staged slots, maps their images, gives slots back."""

from __future__ import annotations

import itertools
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import FormatError, StoreError, UsageError
from forebay.format import names
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A slot that holds a snapshot, and what its ticket says."""

    arena: str
    slot: int
    state: SlotState
    fills: int
    layout: Layout
    stamp: Stamp


def rank_of(name: str) -> str:
    """The rank's part of an arena's file name."""
    return name.partition(".")[0]


def _generation(name: str) -> int:
    """Which of a rank's arenas it is, by its file name."""
    text = name.split(".")[1]
    return int(text) if text.isascii() and text.isdigit() else -1


class Slots:
    """All arenas of a job's directory, mapped as they appear. Used by the agent's loop.

    ``is_replaced`` says that another agent has this one's place by now: what has a name is for that
    one, and this one goes on with arenas whose names are gone.
    """

    def __init__(self, directory: Path, is_replaced: Callable[[], bool] = lambda: False) -> None:
        self._directory = directory
        self._is_replaced = is_replaced
        self._maps: dict[str, tuple[ArenaHead, mmap.mmap, memoryview, int]] = {}
        self._bad: set[tuple[str, int]] = set()
        self._failed: set[tuple[str, int]] = set()
        self._taken: dict[tuple[str, int], tuple[int, int]] = {}  # fills, hold
        self._holds = itertools.count()

    def refresh(self) -> None:
        """Map arenas that are new and drop those that another one has replaced.

        A rank's last arena stays mapped when its file is gone: the trainer still fills it, whoever
        removed the name (systemd does, for users who log out, unless told not to).
        """
        if self._is_replaced():
            return
        found = {path.name: path for path in self._directory.glob("rank-*.arena")}
        newest = {rank_of(name): name for name in sorted({*found, *self._maps}, key=_generation)}
        for name in list(self._maps):
            replaced = name in found and _inode(found[name]) != self._maps[name][3]
            dropped = name not in found and newest[rank_of(name)] != name
            if replaced or dropped:
                self._unmap(name)
        for name, path in found.items():
            if name not in self._maps:
                self._map(name, path)

    def _map(self, name: str, path: Path) -> None:
        try:
            # A named pipe would hold a blocking open for ever.
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(path, flags)
        except OSError:
            return
        try:
            found = os.fstat(fd)
            if (name, found.st_ino) in self._bad:
                return
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise FormatError(f"{path}: is no plain file of one name")
            if found.st_uid != os.getuid():
                raise FormatError(f"{path}: belongs to uid {found.st_uid}")
            head = read_head(os.pread(fd, PAGE_BYTES, 0), found.st_size, name)
            mapping = mmap.mmap(fd, found.st_size)
            self._maps[name] = (head, mapping, memoryview(mapping), found.st_ino)
        except (FormatError, OSError) as error:  # this one alone: the others are looked at
            # A failure of the system may pass, and then nobody else would drain this rank.
            bad = self._bad if isinstance(error, FormatError) else self._failed
            if (name, found.st_ino) not in bad:
                emit("arena.refused", level=40, why=error)
            bad.add((name, found.st_ino))
        finally:
            os.close(fd)

    def _unmap(self, name: str) -> None:
        _, mapping, view, _ = self._maps.pop(name)
        for key in [key for key in self._taken if key[0] == name]:
            del self._taken[key]
        try:
            view.release()
            mapping.close()
        except BufferError:
            emit("arena.still_read", level=30, arena=name)

    def occupied(self) -> list[Ticket]:
        """Slots STAGED or DRAINING that this agent has not taken yet, the oldest snapshot first."""
        replaced = self._is_replaced()
        found = [
            ticket
            for name, (head, _, view, inode) in list(self._maps.items())
            if not (replaced and _inode(self._directory / name) == inode)
            for slot in range(head.slots)
            if (ticket := self._ticket(name, head, view, slot)) is not None
        ]
        return sorted(found, key=lambda t: (t.stamp.staged_s, t.layout.rank))

    def _ticket(self, name: str, head: ArenaHead, view: memoryview, slot: int) -> Ticket | None:
        start = head.control_start(slot)
        state = int.from_bytes(view[start : start + 8], "little")
        if state not in (SlotState.STAGED, SlotState.DRAINING):
            return None
        with view[start : start + head.control_bytes] as control:
            try:
                words = read_words(control[:WORD_BYTES], head, name)
                taken = self._taken.get((name, slot))
                if taken is not None and taken[0] == words.fills:
                    return None
                layout, stamp = read_ticket(control, words, name)
                check_ticket(layout, stamp, head, f"{name}, slot {slot}")
            except FormatError as error:
                emit("slot.refused", level=40, why=error)
                self._set(name, slot, SlotState.FREE)
                return None
        return Ticket(
            arena=name,
            slot=slot,
            state=words.state,
            fills=words.fills,
            layout=layout,
            stamp=stamp,
        )

    def image(self, name: str, slot: int, hold: int | None) -> memoryview:
        """The image area of a slot; keep it only while the slot is DRAINING.

        Raises StoreError when the arena is gone: another one may have its name by now.
        """
        if not self._holds_still(name, slot, hold):
            raise StoreError(f"{self._directory / name}: the arena is gone")
        head, _, view, _ = self._maps[name]
        start = head.image_start(slot)
        return view[start : start + head.image_bytes]

    def take(self, ticket: Ticket) -> int:
        """STAGED -> DRAINING; the slot is not found ``occupied`` again until its next fill.

        Returns the hold: what tells this fill from those of an arena that takes the name later, as
        the first one after a reboot does.
        """
        hold = next(self._holds)
        self._taken[ticket.arena, ticket.slot] = ticket.fills, hold
        self._set(ticket.arena, ticket.slot, SlotState.DRAINING)
        return hold

    def release(self, name: str, slot: int, hold: int | None) -> None:
        """DRAINING -> FREE: the bytes are safe in the next tier, or given up."""
        if self._holds_still(name, slot, hold):
            self._set(name, slot, SlotState.FREE)

    def _holds_still(self, name: str, slot: int, hold: int | None) -> bool:
        taken = self._taken.get((name, slot))
        return hold is not None and taken is not None and taken[1] == hold

    def _set(self, name: str, slot: int, state: SlotState) -> None:
        head, _, view, _ = self._maps[name]
        view.cast("Q")[head.control_start(slot) // 8] = int(state)

    def close(self) -> None:
        """Drop all mappings."""
        for name in list(self._maps):
            self._unmap(name)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def check_ticket(layout: Layout, stamp: Stamp, head: ArenaHead, name: str) -> None:
    """Raise FormatError unless every range lies in the slot and the names may stand in a key."""
    try:
        names.check_step(stamp.step)
        names.check_attempt(stamp.attempt)
    except UsageError as error:
        raise FormatError(f"{name}: {error}") from None
    header_limit = layout.image_bytes if layout.slices else head.image_bytes
    if not 0 <= layout.header_bytes <= header_limit <= head.image_bytes:
        raise FormatError(
            f"{name}: an image of {layout.image_bytes} bytes in a slot of {head.image_bytes}"
        )
    ranks = (layout.rank, *layout.node_ranks)
    if (
        layout.rank not in layout.node_ranks
        or not 0 <= layout.node < layout.nodes
        or any(not 0 <= rank < layout.world_size for rank in ranks)
    ):
        raise FormatError(f"{name}: rank {layout.rank} on node {layout.node} of {layout.nodes}")
    for row in layout.slices:
        end = row.start + row.nbytes
        if not layout.header_bytes <= row.start <= end <= layout.image_bytes:
            raise FormatError(f"{name}: {row.fqn!r} at {row.start}+{row.nbytes} outside its image")
    for seen in layout.witnesses:
        if not 0 <= seen.start <= seen.start + seen.nbytes <= head.image_bytes:
            raise FormatError(f"{name}: witness of {seen.fqn!r} at {seen.start} outside its slot")
