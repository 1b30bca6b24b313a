"""A row group of the index: slices to Arrow columns, and back from a file that may lie.

Of a group, what says where slices lie is read apart from their digests, and each as one range.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.errors import FormatError
from forebay.format.footer import Group
from forebay.format.pages import check_pages
from forebay.format.part import Part
from forebay.format.stored import NOBODY, Ints, Table, as_digests, narrow

INDEX_VERSION = b"1"
MOST_ROWS = 2**20
"""Of a row group that is read: what it holds is worked on at once."""

SCHEMA = pa.schema(
    [
        pa.field("fqn", pa.string(), nullable=False),
        pa.field("owner", pa.int32()),
        pa.field("dtype", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("offsets", pa.list_(pa.int64()), nullable=False),
        pa.field("sizes", pa.list_(pa.int64()), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("file", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
        pa.field("digest", pa.binary(32), nullable=False),
        pa.field("blocks", pa.binary()),
    ],
    metadata={b"forebay.index": INDEX_VERSION},
)
LISTS = ("shape", "offsets", "sizes")
SEALS = ("digest", "blocks")  # the last columns: what lies before them can be read alone
NAMES = ("fqn", "dtype", "file")


def to_arrow(rows: Table) -> pa.Table:
    """Rows as the columns of SCHEMA."""
    count = len(rows)
    ends, owner = pa.array(rows.first, pa.int32()), pa.array(rows.owner, pa.int32())
    shapes = pa.array([list(shape) for shape in rows.shapes], pa.list_(pa.int64()))
    seals = pa.py_buffer(np.ascontiguousarray(rows.digest))
    columns = {
        "fqn": _named(rows.fqn, rows.fqns).cast(pa.string()),
        "owner": pc.if_else(pc.equal(owner, NOBODY), None, owner),
        "dtype": _named(rows.dtype, rows.dtypes),
        "shape": shapes.take(pa.array(rows.shape)),
        "offsets": pa.ListArray.from_arrays(ends, pa.array(rows.offsets, pa.int64())),
        "sizes": pa.ListArray.from_arrays(ends, pa.array(rows.sizes, pa.int64())),
        "rank": pa.array(rows.rank, pa.int32()),
        "file": _named(rows.key, rows.keys),
        "start": pa.array(rows.start, pa.int64()),
        "nbytes": pa.array(rows.nbytes(), pa.int64()),
        "digest": pa.Array.from_buffers(pa.binary(32), count, [None, seals]),
        "blocks": _blocks_of(rows),
    }
    return pa.table(columns, schema=SCHEMA)


def _named(numbers: Ints, values: list[str]) -> pa.DictionaryArray:
    """Only the values that are used, sorted: a row group stores its own, and always the same."""
    used, places = np.unique(numbers, return_inverse=True)
    names = [values[number] for number in used.tolist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    place = np.empty(len(names), np.int32)
    place[order] = np.arange(len(names))
    sorted_names = pa.array([names[number] for number in order], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(place[places], pa.int32()), sorted_names)


def _blocks_of(rows: Table) -> pa.Array:
    if not len(rows.blocks):
        return pa.nulls(len(rows), pa.binary())
    pairs = itertools.pairwise(rows.first_block.tolist())
    return pa.array([rows.blocks[low:high].tobytes() or None for low, high in pairs], pa.binary())


class RowGroup:
    """One row group of a file. Where its slices lie is read at once, their digests when asked."""

    def __init__(
        self, file: Any, metadata: pq.FileMetaData, number: int, group: Group, name: str
    ) -> None:
        self._file = file
        self._metadata = metadata
        self._number = number
        self._group = group
        self._name = name
        if group.rows > MOST_ROWS:
            raise FormatError(f"{name}: a row group of {group.rows} rows, limit {MOST_ROWS}")

        self._table = _table(self._read([c for c in SCHEMA.names if c not in SEALS]), name)

    def of(self, wanted: list[str] | None) -> Ints:
        """The rows of the wanted tensors; all when None."""
        rows: Ints = np.arange(len(self._table))
        if wanted is None or not len(rows):
            return rows
        return rows[np.isin(self._table.fqns, wanted)[self._table.fqn]]

    def fqns(self, rows: Ints) -> set[str]:
        """The tensors of these rows."""
        return {self._table.fqns[number] for number in np.unique(self._table.fqn[rows]).tolist()}

    def chosen(self, rows: Ints, choose: Callable[[Table], Ints]) -> Ints:
        """Those of the rows that are chosen by what is known without their digests."""
        return rows[choose(self._table.take(rows))] if len(rows) else rows

    def sealed(self, rows: Ints) -> Table:
        """The rows with their digests, which are read now if there is any row."""
        if not len(rows):
            return self._table.take(rows)
        seals = self._read(list(SEALS))
        sealed = dataclasses.replace(self._table, **_seals(seals, self._table, self._name))
        return sealed.take(rows)

    def _read(self, columns: list[str]) -> pa.Table:
        """Columns that lie side by side, as one read."""
        chunks = [chunk for chunk in self._group.chunks if chunk.column in columns]
        begin = min(chunk.begin for chunk in chunks)
        part = Part(self._file, begin, max(chunk.end for chunk in chunks))
        for chunk in chunks:
            pages = part.data[chunk.begin - begin : chunk.end - begin]
            may = chunk.column != "blocks"
            check_pages(pages, f"{self._name}: {chunk.column}", dictionary=may)
        file = pq.ParquetFile(
            part,
            metadata=self._metadata,
            read_dictionary=list(NAMES),
            page_checksum_verification=True,  # a part that is read has no other digest
        )
        table = file.read_row_group(self._number, columns=columns)
        if table.num_rows != self._group.rows:
            raise FormatError(f"{self._name}: {table.num_rows} rows of {self._group.rows}")
        return table


def _table(rows: pa.Table, name: str) -> Table:
    """Geometry and place of rows; their digests are zeros yet."""
    fqns, fqn = _numbered(rows["fqn"])
    dtypes, dtype = _numbered(rows["dtype"])
    keys, key = _numbered(rows["file"])
    shapes, shape = _distinct(*_lists(rows["shape"]))
    (ends, offsets), (other, sizes) = _lists(rows["offsets"]), _lists(rows["sizes"])
    owner = _owners(rows["owner"])
    if owner.min(initial=NOBODY) < NOBODY:
        raise FormatError(f"{name}: an owner below 0")
    table = Table(
        fqns=fqns,
        dtypes=dtypes,
        shapes=shapes,
        keys=keys,
        fqn=fqn,
        owner=owner,
        dtype=dtype,
        shape=shape,
        key=key,
        rank=_numbers(rows["rank"]),
        offsets=offsets,
        sizes=sizes,
        start=_numbers(rows["start"]),
        digest=np.broadcast_to(np.zeros(32, np.uint8), (len(fqn), 32)),
        blocks=np.zeros((0, 32), np.uint8),
    )
    if not (np.array_equal(ends, table.first) and np.array_equal(other, table.first)):
        raise FormatError(f"{name}: a box does not lie inside its shape: dimensions differ")
    numbers = (table.rank, table.start, offsets, sizes)
    if any(column.min(initial=0) < 0 for column in numbers):
        raise FormatError(f"{name}: expected no number below 0")
    table.check_boxes(name)
    expected, found = table.nbytes(), _numbers(rows["nbytes"])
    wrong = expected != found
    if wrong.any():
        row = int(np.argmax(wrong))
        raise FormatError(
            f"{name}: {fqns[fqn[row]]} has {found[row]} bytes, expected {expected[row]}"
        )
    count = int(table.first_block[-1])
    return dataclasses.replace(table, blocks=np.broadcast_to(np.zeros(32, np.uint8), (count, 32)))


def _seals(rows: pa.Table, table: Table, name: str) -> dict[str, Any]:
    seals = rows["digest"].combine_chunks()
    if seals.type != pa.binary(32) or seals.null_count:
        raise FormatError(f"{name}: a row has no digest")
    joined = b"".join(block for block in rows["blocks"].to_pylist() if block is not None)
    if len(joined) != 32 * int(table.first_block[-1]):
        raise FormatError(f"{name}: {len(joined)} bytes of block digests")
    data = np.frombuffer(seals.buffers()[1], np.uint8)[32 * seals.offset :]
    return {"digest": data[: 32 * len(seals)].reshape(-1, 32), "blocks": as_digests(joined)}


def _numbered(column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """Distinct strings, and for each row which of them it has."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    array = column.unify_dictionaries().combine_chunks()
    values = array.dictionary.to_pylist()
    if array.null_count or any(type(value) is not str for value in values):
        raise FormatError("a row has no tensor, dtype or file")
    return values, narrow(_as_numpy(array.indices))


def _numbers(column: pa.ChunkedArray) -> Ints:
    if column.null_count:
        raise FormatError("a row lacks a number")
    return narrow(_as_numpy(column.cast(pa.int64()).combine_chunks()))


def _owners(column: pa.ChunkedArray) -> Ints:
    """Numbers, and NOBODY where there is none."""
    array = column.combine_chunks()
    owners = np.full(len(array), NOBODY, np.int64)
    there = _as_numpy(pc.indices_nonzero(array.is_valid()).cast(pa.int64()))
    given = _as_numpy(array.drop_null().cast(pa.int64()))
    owners[there] = np.where(given < 0, NOBODY - 1, given)
    return narrow(owners)


def _as_numpy(numbers: pa.Array) -> Ints:
    """The array's own memory. ``to_numpy`` would import pandas where that is installed."""
    found: Any = np.from_dlpack(numbers)
    return cast("Ints", found)


def _lists(column: pa.ChunkedArray) -> tuple[Ints, Ints]:
    """Where each row's numbers begin, one more for their end; and all numbers."""
    array = column.combine_chunks()
    if array.null_count or array.values.null_count:
        raise FormatError("a row lacks numbers")
    ends = _as_numpy(array.offsets)
    numbers = _as_numpy(array.values.cast(pa.int64()))[ends[0] : ends[-1]]
    return ends - ends[0], narrow(numbers)


def _distinct(ends: Ints, numbers: Ints) -> tuple[list[tuple[int, ...]], Ints]:
    """Distinct lists of numbers, and for each row which of them it has."""
    known: dict[tuple[int, ...], int] = {}
    rows = np.zeros(len(ends) - 1, np.int64)
    counts = np.diff(ends)
    for count in np.unique(counts).tolist():
        alike = np.flatnonzero(counts == count)
        values = numbers[ends[alike][:, None] + np.arange(count)]
        lists, places = np.unique(values, axis=0, return_inverse=True)
        new = [known.setdefault(tuple(one), len(known)) for one in lists.tolist()]
        rows[alike] = np.array(new, np.int64)[places.reshape(-1)]
    return list(known), narrow(rows)
