"""Slices where they lie: one as an object, millions as columns.

A commit and a restore of another layout look at every slice of a checkpoint, 4.7 million at 16,384
ranks. A table keeps about 100 bytes for each, and what is done to all of them is done to columns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import FormatError
from forebay.format import digests
from forebay.format.dtypes import element_type
from forebay.format.slices import Box, Slice, TensorKey, is_sane

Ints = npt.NDArray[np.signedinteger[Any]]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

NOBODY = -1
_MOST_BYTES = 2**63 - 1
_AT_ONCE = 2**18  # numbers of boxes that are worked on at a time: bounds what comes and goes


@dataclass(frozen=True, slots=True)
class Stored:
    """A slice where it lies: object key, absolute byte range, digest, block digests."""

    slice: Slice
    key: str
    start: int
    digest: bytes
    blocks: tuple[bytes, ...]
    rank: int

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.slice.nbytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Stored slices, one a row, in any order.

    ``fqn``, ``dtype``, ``shape`` and ``key`` number the entries of ``fqns``, ``dtypes``, ``shapes``
    and ``keys``. ``owner`` is NOBODY for what ranks hold in common. ``offsets`` and ``sizes`` are
    flat: for each row as many numbers as its tensor has dimensions. ``digest`` has 32 bytes a row,
    ``blocks`` 32 bytes for each block of each row above 64 MiB, in the rows' order.
    """

    fqns: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    keys: list[str]
    fqn: Ints
    owner: Ints
    dtype: Ints
    shape: Ints
    key: Ints
    rank: Ints
    offsets: Ints
    sizes: Ints
    start: Ints
    digest: Bytes
    blocks: Bytes

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.fqn)

    @functools.cached_property
    def first(self) -> Ints:
        """Where each row's numbers begin in ``offsets`` and ``sizes``; one more for their end."""
        dims = np.array([len(shape) for shape in self.shapes], np.int64)
        return _ends(dims[self.shape] if len(self) else np.zeros(0, np.int64))

    @functools.cached_property
    def first_block(self) -> Ints:
        """Where each row's blocks begin in ``blocks``; one more for their end."""
        return _ends(_block_counts(self.nbytes()))

    @functools.cached_property
    def geometry(self) -> Geometry:
        """What the boxes are in the row-major order of their tensors."""
        return Geometry.of(self)

    @functools.cached_property
    def order(self) -> Ints:
        """Rows sorted by FQN, owner (none first), and where their box begins."""
        return narrow(np.lexsort((self.geometry.begin, self.tensor)))

    @functools.cached_property
    def bounds(self) -> Ints:
        """Where in ``order`` each tensor's rows begin; one more for their end."""
        return narrow(np.searchsorted(self.tensor[self.order], np.arange(len(self.tensors) + 1)))

    @functools.cached_property
    def tensor(self) -> Ints:
        """For each row its tensor's place among ``tensors``."""
        return self._tensors[1]

    @property
    def tensors(self) -> list[TensorKey]:
        """The tensors that have rows, sorted by FQN and owner."""
        return self._tensors[0]

    @functools.cached_property
    def _tensors(self) -> tuple[list[TensorKey], Ints]:
        by_name = sorted(range(len(self.fqns)), key=self.fqns.__getitem__)
        place = np.empty(len(by_name), np.int64)
        place[by_name] = np.arange(len(by_name))
        width = int(self.owner.max(initial=NOBODY)) + 2
        codes = place[self.fqn] * width + (self.owner - NOBODY)
        # Nearly all rows are nobody's own: those need no sorting to be told apart.
        common = np.zeros(len(by_name), np.bool_)
        common[place[self.fqn[self.owner == NOBODY]]] = True
        found = np.union1d(np.flatnonzero(common) * width, codes[self.owner != NOBODY])
        keys = [
            TensorKey(self.fqns[by_name[code // width]], _owner(code % width + NOBODY))
            for code in found.tolist()
        ]
        return keys, narrow(np.searchsorted(found, codes))

    def nbytes(self) -> Ints:
        """Stored size of each row in bytes."""
        items = np.array([element_type(name).item_bytes for name in self.dtypes], np.int64)
        elements = self.geometry.elements
        return elements * items[self.dtype] if len(self) else elements

    def __iter__(self) -> Iterator[Stored]:
        """The rows as objects."""
        return (self.row(number) for number in range(len(self)))

    def row(self, number: int) -> Stored:
        """One row as an object."""
        low, high = int(self.first[number]), int(self.first[number + 1])
        box = Box(tuple(self.offsets[low:high].tolist()), tuple(self.sizes[low:high].tolist()))
        key = TensorKey(self.fqns[self.fqn[number]], _owner(int(self.owner[number])))
        piece = Slice(key, self.dtypes[self.dtype[number]], self.shapes[self.shape[number]], box)
        low, high = int(self.first_block[number]), int(self.first_block[number + 1])
        return Stored(
            piece,
            self.keys[self.key[number]],
            int(self.start[number]),
            self.digest[number].tobytes(),
            tuple(block.tobytes() for block in self.blocks[low:high]),
            int(self.rank[number]),
        )

    def take(self, rows: Ints) -> Table:
        """Some rows, by their numbers, in that order."""
        numbers, blocks = _spread(self.first, rows), _spread(self.first_block, rows)
        return Table(
            fqns=self.fqns,
            dtypes=self.dtypes,
            shapes=self.shapes,
            keys=self.keys,
            fqn=self.fqn[rows],
            owner=self.owner[rows],
            dtype=self.dtype[rows],
            shape=self.shape[rows],
            key=self.key[rows],
            rank=self.rank[rows],
            offsets=self.offsets[numbers],
            sizes=self.sizes[numbers],
            start=self.start[rows],
            digest=self.digest[rows],
            blocks=self.blocks[blocks],
        )

    @classmethod
    def of(cls, rows: Iterable[Stored]) -> Table:
        """A table of objects."""
        kept = list(rows)
        fqns: dict[str, int] = {}
        dtypes: dict[str, int] = {}
        keys: dict[str, int] = {}
        shapes: dict[tuple[int, ...], int] = {}
        return cls(
            fqn=_ints(fqns.setdefault(row.slice.key.fqn, len(fqns)) for row in kept),
            owner=_ints(NOBODY if (own := row.slice.key.rank) is None else own for row in kept),
            dtype=_ints(dtypes.setdefault(row.slice.dtype, len(dtypes)) for row in kept),
            shape=_ints(shapes.setdefault(row.slice.shape, len(shapes)) for row in kept),
            key=_ints(keys.setdefault(row.key, len(keys)) for row in kept),
            rank=_ints(row.rank for row in kept),
            offsets=_ints(n for row in kept for n in row.slice.box.offsets),
            sizes=_ints(n for row in kept for n in row.slice.box.sizes),
            start=_ints(row.start for row in kept),
            digest=as_digests(b"".join(row.digest for row in kept)),
            blocks=as_digests(b"".join(block for row in kept for block in row.blocks)),
            fqns=list(fqns),
            dtypes=list(dtypes),
            shapes=list(shapes),
            keys=list(keys),
        )

    def check_boxes(self, where: str) -> None:
        """Raise FormatError unless every box lies inside its shape and is of a size that exists.

        Numbers that point into the lists of names must do so, and none may be negative.
        """
        for shape in self.shapes:
            if not is_sane(shape) or any(n < 0 for n in shape):
                raise FormatError(f"{where}: a shape of {len(shape)} dimensions is too large")
        needed = int(self.first[-1])
        if len(self.offsets) != needed or len(self.sizes) != needed:
            most = max(len(self.offsets), len(self.sizes))
            what = "more" if most > needed else "fewer"
            raise FormatError(f"{where}: columns hold {what} numbers than its slices need")
        for rows, numbers, shape_of in _by_dims(self):
            offsets, sizes = self.offsets[numbers], self.sizes[numbers]
            outside = ((offsets > shape_of) | (sizes > shape_of - offsets)).any(axis=1)
            if outside.any():
                row = int(rows[np.argmax(outside)])
                key, shape = self.fqns[self.fqn[row]], self.shapes[self.shape[row]]
                low, high = int(self.first[row]), int(self.first[row + 1])
                raise FormatError(
                    f"{where}: {key}: box {tuple(self.offsets[low:high].tolist())}+"
                    f"{tuple(self.sizes[low:high].tolist())} does not lie inside shape {shape}"
                )
        items = np.array([element_type(name).item_bytes for name in self.dtypes], np.int64)
        if len(self) and (self.geometry.elements > _MOST_BYTES // items[self.dtype]).any():
            raise FormatError(f"{where}: a slice is larger than any store")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Geometry:
    """For each row, in elements of its tensor in row-major order.

    ``begin`` is where its box begins, ``elements`` how many it has; ``dense`` is True where those
    lie side by side, so that the box is the range from ``begin`` on.
    """

    begin: Ints
    elements: Ints
    dense: Flags

    @classmethod
    def of(cls, table: Table) -> Geometry:
        """Of a table whose boxes lie inside their shapes."""
        begin = np.zeros(len(table), np.int64)
        elements = np.ones(len(table), np.int64)
        reach = np.ones(len(table), np.int64)
        for rows, numbers, shape_of in _by_dims(table):
            offsets, sizes = table.offsets[numbers], table.sizes[numbers]
            stride = np.ones(len(rows), np.int64)
            for d in range(shape_of.shape[1] - 1, -1, -1):
                begin[rows] += offsets[:, d] * stride
                reach[rows] += (sizes[:, d] - 1) * stride
                elements[rows] *= sizes[:, d]
                stride *= np.maximum(shape_of[:, d], 1)
        return cls(begin=begin, elements=elements, dense=reach == elements)


def narrow(numbers: Ints) -> Ints:
    """The same numbers in 4 bytes each, where two of them can be added: there are millions."""
    limit = 2**30 - 1
    if len(numbers) and (numbers.max() > limit or numbers.min() < -limit):
        return numbers.astype(np.int64, copy=False)
    return numbers.astype(np.int32, copy=False)


def as_digests(joined: bytes) -> Bytes:
    """Digests that follow each other, 32 bytes each, as rows."""
    return np.frombuffer(joined, np.uint8).reshape(-1, 32)


def _block_counts(nbytes: Ints) -> Ints:
    """How many block digests slices of ``nbytes`` carry."""
    return np.where(nbytes > digests.BLOCKS_ABOVE_BYTES, -(-nbytes // digests.BLOCK_BYTES), 0)


def _by_dims(table: Table) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Rows of equally many dimensions, some at a time: ``(rows, numbers, shapes)``.

    ``numbers`` says for each row and dimension where it stands in ``offsets`` and ``sizes``,
    ``shapes`` is the tensor's global shape.
    """
    dims = np.diff(table.first)
    for count in np.unique(dims).tolist():
        alike = [shape if len(shape) == count else (0,) * count for shape in table.shapes]
        shapes = np.array(alike, np.int64).reshape(len(alike), count)
        rows = np.flatnonzero(dims == count)
        step = max(1, _AT_ONCE // max(1, count))
        for at in range(0, len(rows), step):
            some = rows[at : at + step]
            numbers = table.first[some][:, None] + np.arange(count)
            yield some, numbers, shapes[table.shape[some]]


def _ends(counts: Ints) -> Ints:
    """Where each of so many begins when they follow each other; one more for the end."""
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return narrow(ends)


def _spread(first: Ints, rows: Ints) -> Ints:
    """The numbers of what belongs to the rows, row after row."""
    counts = first[rows + 1] - first[rows]
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(first[rows] - (ends - counts), counts)


def _owner(number: int) -> int | None:
    return None if number == NOBODY else number


def _ints(numbers: Iterable[int]) -> Ints:
    return narrow(np.fromiter(numbers, np.int64))


class Tables:
    """Tables put together as they come."""

    def __init__(self) -> None:
        self._fqns: dict[str, int] = {}
        self._dtypes: dict[str, int] = {}
        self._shapes: dict[tuple[int, ...], int] = {}
        self._keys: dict[str, int] = {}
        self._columns = _no_columns()

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._columns["fqn"])

    def add(self, table: Table) -> None:
        """Take the rows of a table, which is not needed any more."""
        pairs: tuple[tuple[str, dict[Any, int], list[Any]], ...] = (
            ("fqn", self._fqns, table.fqns),
            ("dtype", self._dtypes, table.dtypes),
            ("shape", self._shapes, table.shapes),
            ("key", self._keys, table.keys),
        )
        for name, known, values in pairs:
            numbers = _ints(known.setdefault(value, len(known)) for value in values)
            self._columns[name].add(numbers[getattr(table, name)] if len(table) else numbers[:0])
        for name in ("owner", "rank", "offsets", "sizes", "start", *_RAW):
            self._columns[name].add(getattr(table, name))

    def taken(self) -> Table:
        """The rows since the last time, in the order in which they came; names keep their numbers.

        None is held here any more.
        """
        columns = {name: one.filled() for name, one in self._columns.items()}
        self._columns = _no_columns()
        return self.named(columns)

    def named(self, columns: dict[str, Any]) -> Table:
        """A table of columns whose numbers are those of the names that were taken."""
        return Table(
            fqns=list(self._fqns),
            dtypes=list(self._dtypes),
            shapes=list(self._shapes),
            keys=list(self._keys),
            **columns,
        )


class _Column:
    """An array that grows in place: thousands of small ones, once freed, leave a heap of holes."""

    def __init__(self, empty: npt.NDArray[Any]) -> None:
        self._room = empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, values: npt.NDArray[Any]) -> None:
        end = self._count + len(values)
        kind = np.promote_types(self._room.dtype, values.dtype)
        if end > len(self._room) or kind != self._room.dtype:
            # What is never written to is no memory yet.
            rows = max(end, 2 * len(self._room), _AT_ONCE)
            larger = np.empty((rows, *self._room.shape[1:]), kind)
            larger[: self._count] = self._room[: self._count]
            self._room = larger
        self._room[self._count : end] = values
        self._count = end

    def filled(self) -> npt.NDArray[Any]:
        return self._room[: self._count]


_NUMBERS = ("fqn", "owner", "dtype", "shape", "key", "rank", "offsets", "sizes", "start")
_RAW = ("digest", "blocks")


def _no_columns() -> dict[str, _Column]:
    numbers = {name: _Column(np.zeros(0, np.int32)) for name in _NUMBERS}
    return numbers | {name: _Column(np.zeros((0, 32), np.uint8)) for name in _RAW}
