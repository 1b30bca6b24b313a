"""What a power cut may leave of a sequence of file operations: the pessimistic disk of the papers.

A name is durable once its directory was flushed, bytes once their file was; until then each may be
there, be missing, or be torn, whatever else is there. So a state is a prefix of the operations and,
of what was not flushed in it, any subset, applied in order. That covers every reordering, since
operations on different names or bytes commute. It is what Pillai et al. (ALICE, OSDI 2014) and
Mohan et al. (B3, OSDI 2018) explore; no one filesystem loses all of it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

ROOT = 0
"""The node of the directory under which everything happens. It is durable."""

_SECTOR_BYTES = 512


class Enter(msgspec.Struct, tag=True, frozen=True):
    """A node gets a name: a file or a directory was made, or a link to it."""

    directory: int
    name: str
    node: int


class Leave(msgspec.Struct, tag=True, frozen=True):
    """A name goes."""

    directory: int
    name: str


class Move(msgspec.Struct, tag=True, frozen=True):
    """A name goes and comes back elsewhere, in place of what was there."""

    directory: int
    name: str
    to_directory: int
    to_name: str


class Write(msgspec.Struct, tag=True, frozen=True):
    """Bytes of a file, from offset ``at``."""

    node: int
    at: int
    data: bytes


class Cut(msgspec.Struct, tag=True, frozen=True):
    """A file gets this size."""

    node: int
    size: int


class SyncFile(msgspec.Struct, tag=True, frozen=True):
    """The bytes of a file are durable now."""

    node: int


class SyncDirectory(msgspec.Struct, tag=True, frozen=True):
    """The names in a directory are durable now."""

    node: int


class Mark(msgspec.Struct, tag=True, frozen=True):
    """Something was promised, begun or told at this moment; not an operation."""

    text: str


Operation: TypeAlias = Enter | Leave | Move | Write | Cut | SyncFile | SyncDirectory | Mark
_NAMES = (Enter, Leave, Move)


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What was there, and what happened: ``names`` of each directory and ``data`` of each file."""

    names: dict[int, dict[str, int]]
    data: dict[int, bytes]
    operations: list[Operation]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A disk after a power cut behind the first ``at`` operations, and the marks before it.

    ``files`` maps each path below the root to its bytes, None for a directory. ``lost`` says which
    of the operations that were not flushed are missing or torn.
    """

    at: int
    marks: tuple[str, ...]
    files: dict[str, bytes | None]
    lost: tuple[str, ...]

    def make(self, root: Path) -> None:
        """Write the state below ``root``, an empty directory."""
        for path, data in sorted(self.files.items()):
            if data is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(data)


class Count(msgspec.Struct, kw_only=True):
    """How much was looked at: prefixes, those only sampled, states, and those that differ."""

    prefixes: int = 0
    states: int = 0
    distinct: int = 0
    sampled: int = 0


GONE, WHOLE, HALF, ZEROS = range(4)
"""What became of an operation; half of a move is both names, half of a write its first sectors."""

_WORDS = ("missing", "whole", "half", "zeros")


class Disk:
    """What is durable, and in order what is not."""

    def __init__(self, recording: Recording) -> None:
        self._names = {node: dict(names) for node, names in recording.names.items()}
        self._names.setdefault(ROOT, {})
        self._directories = set(self._names)
        for operation in recording.operations:
            if isinstance(operation, SyncDirectory):
                self._directories.add(operation.node)
            elif isinstance(operation, _NAMES):
                self._directories.add(operation.directory)
        self._data = dict(recording.data)
        self.loose: list[Operation] = []

    def apply(self, operation: Operation) -> bool:
        """Carry out one; True when it can be lost."""
        if isinstance(operation, Mark):
            return False
        if isinstance(operation, SyncFile | SyncDirectory):
            self._settle(operation)
            return False
        self.loose.append(operation)
        return True

    def _settle(self, sync: SyncFile | SyncDirectory) -> None:
        loose, self.loose = self.loose, []
        for operation in loose:
            if not _is_settled(operation, sync):
                self.loose.append(operation)
            elif isinstance(operation, Write | Cut):
                self._data[operation.node] = changed(self._data.get(operation.node, b""), operation)
            else:
                enter(self._names, operation, WHOLE)

    def fates(self) -> list[tuple[int, ...]]:
        """For each loose operation, what may become of it."""
        return [fates_of(operation) for operation in self.loose]

    def files(self, fates: Sequence[int]) -> dict[str, bytes | None]:
        """The tree that is left when each loose operation meets its fate."""
        names = {node: dict(found) for node, found in self._names.items()}
        data: dict[int, bytes] = {}
        for operation, fate in zip(self.loose, fates, strict=True):
            if fate == GONE:
                continue
            if isinstance(operation, Write | Cut):
                node = operation.node
                there = data[node] if node in data else self._data.get(node, b"")
                data[node] = changed(there, operation, fate)
            else:
                enter(names, operation, fate)
        found: dict[str, bytes | None] = {}
        todo = [(ROOT, "")]
        while todo:
            directory, prefix = todo.pop()
            for name, node in names.get(directory, {}).items():
                path = prefix + name
                if node in self._directories:
                    found[path] = None
                    todo.append((node, path + "/"))
                else:
                    found[path] = data[node] if node in data else self._data.get(node, b"")
        return found


def _is_settled(operation: Operation, sync: SyncFile | SyncDirectory) -> bool:
    if isinstance(operation, Write | Cut):
        return isinstance(sync, SyncFile) and operation.node == sync.node
    if isinstance(sync, SyncFile):
        return False
    if isinstance(operation, Move) and operation.to_directory == sync.node:
        return True
    return isinstance(operation, _NAMES) and operation.directory == sync.node


def fates_of(operation: Operation) -> tuple[int, ...]:
    """What may become of an operation that was not flushed."""
    if isinstance(operation, Write) and operation.data:
        return GONE, WHOLE, HALF, ZEROS
    if isinstance(operation, Move):
        return GONE, WHOLE, HALF
    return GONE, WHOLE


def enter(names: dict[int, dict[str, int]], operation: Operation, fate: int) -> None:
    """Carry out an operation on names, in any tree: what it needs may be missing there."""
    if isinstance(operation, Enter):
        names.setdefault(operation.directory, {})[operation.name] = operation.node
    elif isinstance(operation, Leave):
        names.setdefault(operation.directory, {}).pop(operation.name, None)
    elif isinstance(operation, Move):
        source = names.setdefault(operation.directory, {})
        node = source.get(operation.name)
        if node is None:
            return
        if fate == WHOLE:
            del source[operation.name]
        names.setdefault(operation.to_directory, {})[operation.to_name] = node


def changed(there: bytes, operation: Write | Cut, fate: int = WHOLE) -> bytes:
    """A file's bytes after a write, or what became of it."""
    if isinstance(operation, Cut):
        return there[: operation.size].ljust(operation.size, b"\0")
    data = operation.data
    if fate == HALF:
        half = len(data) // 2
        data = data[: half // _SECTOR_BYTES * _SECTOR_BYTES or half]
    elif fate == ZEROS:
        data = bytes(len(data))
    before = there[: operation.at].ljust(operation.at, b"\0")
    return before + data + there[operation.at + len(data) :]


def explore(recording: Recording, count: Count, *, most: int = 4096) -> Iterator[State]:
    """Every different state that a power cut may leave, given the marks before it.

    Of a prefix with more than ``most`` subsets: those in which one operation alone was lost or
    torn, those in which one alone was not, and ``most`` others, drawn in the same way every time;
    ``count`` says how often.
    """
    disk, marks = Disk(recording), list[str]()
    contents: dict[bytes | None, int] = {}
    seen: set[int] = set()
    draw = random.Random(len(recording.operations))  # noqa: S311 - no secret
    for at, operation in enumerate([Mark("begin"), *recording.operations]):
        can_be_lost = disk.apply(operation)
        if isinstance(operation, Mark):
            marks.append(operation.text)
        elif not can_be_lost:
            continue  # a flush leaves fewer states than there were before it
        count.prefixes += 1
        choices = disk.fates()
        if can_be_lost:
            choices[-1] = choices[-1][1:]  # without it, it is the prefix before
        if math.prod(map(len, choices)) > most:
            count.sampled += 1
            subsets: Iterable[tuple[int, ...]] = _some(choices, most, draw)
        else:
            subsets = itertools.product(*choices)
        for fates in subsets:
            count.states += 1
            files = disk.files(fates)
            key = hash(
                (
                    len(marks),
                    frozenset(
                        (path, contents.setdefault(data, len(contents)))
                        for path, data in files.items()
                    ),
                )
            )
            if key in seen:
                continue
            seen.add(key)
            count.distinct += 1
            yield State(
                at=at,
                marks=tuple(marks),
                files=files,
                lost=tuple(
                    f"{type(loose).__name__}({told(loose)}): {_WORDS[fate]}"
                    for loose, fate in zip(disk.loose, fates, strict=True)
                    if fate != WHOLE
                ),
            )


def told(operation: Operation) -> str:
    """An operation's fields, bytes by their number."""
    fields: Mapping[str, object] = msgspec.structs.asdict(operation)
    return ", ".join(
        f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
        for value in fields.values()
    )


def _some(
    choices: Sequence[tuple[int, ...]], most: int, draw: random.Random
) -> Iterator[tuple[int, ...]]:
    whole = tuple(WHOLE for _ in choices)
    none = tuple(fates[0] for fates in choices)
    for base in (whole, none):
        yield base
        for place, fates in enumerate(choices):
            for fate in fates:
                yield (*base[:place], fate, *base[place + 1 :])
    for _ in range(most):
        yield tuple(draw.choice(fates) for fates in choices)
