"""The trainer's side of an arena: slots of one rank in shared memory, claimed and filled.

An arena is a file of ours in the job's directory, so that a restarted agent finds it by path. The
rank's lock file, held by a POSIX record lock, tells the living from the dead: the kernel drops it
with the process, and a forked data loader does not inherit it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
from pathlib import Path

from forebay.errors import BusyError, FormatError, FullError, UsageError
from forebay.format.shard import PAGE_BYTES
from forebay.format.slot import (
    WORD_BYTES,
    ArenaHead,
    SlotState,
    Words,
    plan_arena,
    read_head,
    read_words,
)
from forebay.private import make_private, open_own
from forebay.watch.events import emit

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap names it only from 3.14 on
_NAME = re.compile(r"rank-(\d{5,})\.(\d+)\.arena")
_CLAIM_TRIES = 100
_held_here: set[Path] = set()


def make_job_directory(directory: Path) -> None:
    """Create the job's directory and its parent, each for this user alone.

    Raises UsageError when either belongs to somebody else, is open to others, or is a link.
    """
    try:
        directory.parent.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{directory.parent.parent}: {error.strerror}: set FOREBAY_RUNTIME_DIR to another "
            "directory"
        ) from None
    for path in (directory.parent, directory):
        make_private(path)


class RankLock:
    """Holds a rank's name in a job for the life of this process."""

    def __init__(self, directory: Path, rank: int, run: str) -> None:
        self.path = directory / f"rank-{rank:05d}.lock"
        if self.path in _held_here:
            raise BusyError(self._busy(run, os.getpid()))
        self._fd = open_own(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BusyError(self._busy(run, owner or "unknown")) from None
            raise
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except OSError:
            os.close(self._fd)
            raise
        _held_here.add(self.path)

    def _busy(self, run: str, pid: object) -> str:
        return (
            f"{run}: rank is held by a live process (pid {pid}): "
            "stop that job, or give this one another run directory"
        )

    def stands(self) -> bool:
        """True while the lock's file is still the one found under its name."""
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.lstat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the name back. Safe to call twice."""
        if self.path in _held_here:
            _held_here.discard(self.path)
            os.close(self._fd)


class Arena:
    """One arena file, mapped. Owned by the rank that holds its lock; used by one thread."""

    def __init__(self, path: Path, head: ArenaHead, mapping: mmap.mmap) -> None:
        self.path = path
        self.head = head
        self.mapping = mapping
        self.view = memoryview(mapping)

    def words(self, slot: int) -> Words:
        """The slot's words as they stand now."""
        start = self.head.control_start(slot)
        return read_words(self.view[start : start + WORD_BYTES], self.head, str(self.path))

    def state(self, slot: int) -> SlotState:
        """Whose the slot is now."""
        start = self.head.control_start(slot)
        found = int.from_bytes(self.view[start : start + 8], "little")
        try:
            return SlotState(found)
        except ValueError:
            raise FormatError(
                f"{self.path}: slot {slot} is in state {found}, there is none"
            ) from None

    def set_state(self, slot: int, state: SlotState) -> None:
        """Write the state word: one aligned store of eight bytes."""
        start = self.head.control_start(slot) // 8
        self.view.cast("Q")[start] = int(state)

    def free_slot(self) -> int | None:
        """The FREE slot filled longest ago, or None."""
        free = [s for s in range(self.head.slots) if self.state(s) is SlotState.FREE]
        return min(free, key=lambda s: self.words(s).fills, default=None)

    def begin(self, slot: int) -> None:
        """Claim a FREE slot for filling."""
        self.set_state(slot, SlotState.FILLING)

    def give_up(self, slot: int) -> None:
        """FILLING -> FREE: the copy failed, what is in the slot is nothing."""
        start = self.head.control_start(slot)
        words = self.words(slot)
        torn = Words(SlotState.FILLING, words.fills + 1, words.layout_bytes, 0)
        self.view[start : start + len(torn.write())] = torn.write()
        self.set_state(slot, SlotState.FREE)

    def stage(self, slot: int, layout_bytes: int, stamp: bytes) -> None:
        """Write the stamp behind the layout, then hand the slot over."""
        start = self.head.control_start(slot)
        at = start + WORD_BYTES + layout_bytes
        self.view[at : at + len(stamp)] = stamp
        fills = self.words(slot).fills + 1
        words = Words(SlotState.FILLING, fills, layout_bytes, len(stamp))
        self.view[start : start + len(words.write())] = words.write()
        self.set_state(slot, SlotState.STAGED)

    def room_for_stamp(self, layout_bytes: int) -> int:
        """Bytes a stamp may have beside a layout of this size."""
        return self.head.control_bytes - WORD_BYTES - layout_bytes

    def write_layout(self, slot: int, layout: bytes, header: bytes) -> None:
        """Prepare a FREE slot: the fixed part of its ticket and the image's header."""
        start = self.head.control_start(slot)
        words = Words(SlotState.FILLING, self.words(slot).fills, 0, 0)
        self.view[start : start + len(words.write())] = words.write()
        self.view[start + WORD_BYTES : start + WORD_BYTES + len(layout)] = layout
        image = self.head.image_start(slot)
        self.view[image : image + len(header)] = header
        self.set_state(slot, SlotState.FREE)

    def close(self) -> None:
        """Drop this process's mapping; the file stays. Tensors over it must be gone."""
        self.view.release()
        self.mapping.close()


def find_arenas(directory: Path, rank: int) -> list[Path]:
    """A rank's arena files, oldest generation first."""
    found = []
    for path in directory.glob(f"rank-{rank:05d}.*.arena"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.append((int(match[2]), path))
    return [path for _, path in sorted(found)]


def open_arena(path: Path) -> Arena:
    """Map an existing arena. Raises FormatError when it is none, UsageError when it is not ours."""
    fd = open_own(path, os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        head = read_head(os.pread(fd, PAGE_BYTES, 0), size, str(path))
        return Arena(path, head, mmap.mmap(fd, size))
    finally:
        os.close(fd)


def make_arena(
    directory: Path, rank: int, *, slots: int, ticket_bytes: int, image_bytes: int, generation: int
) -> Arena:
    """Create an arena and touch every page once: a first touch costs several times a warm copy.

    Raises FullError when shared memory has no room; nothing is left behind then.
    """
    head = plan_arena(
        slots=slots, ticket_bytes=ticket_bytes, image_bytes=image_bytes, generation=generation
    )
    path = directory / f"rank-{rank:05d}.{generation}.arena"
    hidden = directory / f".{path.name}"  # named only once it is whole: an agent may look any time
    hidden.unlink(missing_ok=True)
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.posix_fallocate(fd, 0, head.total_bytes)
        except OSError as error:
            hidden.unlink()
            free = os.statvfs(directory)
            raise FullError(
                f"{path}: the arena needs {head.total_bytes} bytes of shared memory, "
                f"{free.f_bavail * free.f_frsize} are free ({error.strerror}): enlarge /dev/shm, "
                "take fewer slots, or set FOREBAY_RUNTIME_DIR"
            ) from error
        mapping = mmap.mmap(fd, head.total_bytes)
    finally:
        os.close(fd)
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError:  # an older kernel: touch by hand
        for at in range(0, head.total_bytes, PAGE_BYTES):
            mapping[at] = 0
    mapping[:PAGE_BYTES] = head.write()
    hidden.rename(path)
    return Arena(path, head, mapping)


def claim_arena(
    directory: Path, rank: int, *, slots: int, ticket_bytes: int, image_bytes: int
) -> tuple[Arena, list[Path]]:
    """An arena of at least this size: one that a dead trainer left, or a new one.

    The caller holds the rank's lock, so a slot found FILLING was never offered: it is FREE again.
    Also returns the rank's other arena files, which go once nothing in them is staged.
    """
    paths = find_arenas(directory, rank)
    for path in reversed(paths):
        arena = _opened(path)
        if arena is None:
            continue
        head = arena.head
        if (
            head.slots == slots
            and head.control_bytes >= WORD_BYTES + ticket_bytes
            and head.image_bytes >= image_bytes
        ):
            for slot in range(slots):
                if arena.state(slot) is SlotState.FILLING:
                    arena.give_up(slot)
            return arena, [other for other in paths if other != path]
        arena.close()
    generation = max((int(_NAME.fullmatch(p.name)[2]) for p in paths), default=-1) + 1  # type: ignore[index]
    return (
        make_arena(
            directory,
            rank,
            slots=slots,
            ticket_bytes=ticket_bytes,
            image_bytes=image_bytes,
            generation=generation,
        ),
        paths,
    )


def _opened(path: Path) -> Arena | None:
    """An arena whose slots all make sense; what was damaged or planted is told and left alone."""
    try:
        arena = open_arena(path)
    except (FormatError, UsageError, OSError) as error:
        emit("arena.refused", level=30, why=error)
        return None
    try:
        for slot in range(arena.head.slots):
            arena.state(slot)
            arena.words(slot)
    except FormatError as error:
        emit("arena.refused", level=30, why=error)
        arena.close()
        return None
    return arena


def claim_rank(directory: Path, rank: int, run: str) -> RankLock:
    """Hold a rank's name in the job's directory, which is made if need be.

    An agent that ends may remove the directory between the two steps: then once more. Raises
    FileNotFoundError where that is not the reason: nothing can be made in some places (/proc).
    """
    left = _CLAIM_TRIES
    while True:
        try:
            make_job_directory(directory)
            lock = RankLock(directory, rank, run)
        except FileNotFoundError:
            left -= 1
            if not left:
                raise
            continue
        if lock.stands():
            return lock
        lock.release()


def drop_drained(paths: list[Path]) -> None:
    """Remove arena files in which no slot is staged or draining. The rank's lock is held."""
    for path in paths:
        old = _opened(path)
        if old is None:
            continue
        busy = (SlotState.STAGED, SlotState.DRAINING)
        if not any(old.state(s) in busy for s in range(old.head.slots)):
            path.unlink(missing_ok=True)
        old.close()
