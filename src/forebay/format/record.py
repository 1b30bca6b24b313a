"""The record of one node: what it stored for one checkpoint, written after its shards.

Slices stand in columns, not rows: a committer reads 4.7 million of them. ``names`` and ``shapes``
are tables that the columns point into. Digests are hexadecimal, 64 characters each, joined.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from forebay.errors import FormatError
from forebay.format import names as object_names
from forebay.format.digests import digest
from forebay.format.packed import pack, require_readable, unpack
from forebay.format.stored import NOBODY, Bytes, Ints, Stored, Table, as_digests, narrow

RECORD_VERSION = 1
FEATURES: tuple[str, ...] = ()
MAX_RECORD_BYTES = 1 << 30


class Tree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entries of a state as ``tree.write_tree`` gives them, with their digest (hex)."""

    digest: str
    data: bytes


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's image: object key, size, digest of its header, and the rank's trees.

    ``tree`` is the digest of one of the record's ``trees``: what the rank holds in common with
    others. ``own`` is what it declared per rank. An image without tensors is not stored: then
    ``key`` is empty and ``nbytes`` 0.
    """

    rank: int
    key: str
    nbytes: int
    header_bytes: int
    header_digest: str
    tree: str
    own: bytes


class Columns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slices as columns of equal length; see the fields of Stored.

    ``offsets`` and ``sizes`` are flat: as many numbers for a slice as its tensor has dimensions.
    ``per_rank`` is 1 where the tensor belongs to the rank alone. ``blocks`` joins the block
    digests of all slices above 64 MiB.
    """

    rank: list[int]
    name: list[int]
    dtype: list[int]
    shape: list[int]
    per_rank: list[int]
    offsets: list[int]
    sizes: list[int]
    start: list[int]
    digest: str
    blocks: str


NO_COLUMNS = Columns([], [], [], [], [], [], [], [], "", "")


class Witness(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one rank saw of a replicated item that it need not have written.

    ``scope`` says what was digested: ``full`` the whole box as staged at this save, ``sample`` the
    sampled bytes of it, ``start`` the whole box when the attempt began. Equal scope, name and box
    must have equal digests on every rank.
    """

    rank: int
    scope: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    digest: str


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that one node stored for one step of one attempt."""

    version: int
    features: list[str]
    forebay: str
    run: str
    step: int
    attempt: str
    node: int
    nodes: int
    world_size: int
    written_s: float
    shards: list[Shard]
    trees: list[Tree]
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    slices: Columns
    witnesses: list[Witness]


class ColumnWriter:
    """Collects stored slices and builds the tables and columns of a record."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._dtypes: dict[str, int] = {}
        self._shapes: dict[tuple[int, ...], int] = {}
        self._columns: dict[str, list[int]] = {
            key: [] for key in ("rank", "name", "dtype", "shape", "per_rank")
        }
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._start: list[int] = []
        self._digest: list[bytes] = []
        self._blocks: list[bytes] = []

    def add(self, stored: Stored) -> None:
        """Append one slice."""
        piece = stored.slice
        columns = self._columns
        columns["rank"].append(stored.rank)
        columns["name"].append(self._names.setdefault(piece.key.fqn, len(self._names)))
        columns["dtype"].append(self._dtypes.setdefault(piece.dtype, len(self._dtypes)))
        columns["shape"].append(self._shapes.setdefault(piece.shape, len(self._shapes)))
        columns["per_rank"].append(int(piece.key.rank is not None))
        self._offsets.extend(piece.box.offsets)
        self._sizes.extend(piece.box.sizes)
        self._start.append(stored.start)
        self._digest.append(stored.digest)
        self._blocks.extend(stored.blocks)

    def tables(self) -> tuple[list[str], list[str], list[tuple[int, ...]], Columns]:
        """``(names, dtypes, shapes, columns)`` for a Record."""
        columns = Columns(
            **self._columns,
            offsets=self._offsets,
            sizes=self._sizes,
            start=self._start,
            digest=b"".join(self._digest).hex(),
            blocks=b"".join(self._blocks).hex(),
        )
        return list(self._names), list(self._dtypes), list(self._shapes), columns


def write_record(record: Record) -> bytes:
    """The record as zstd-compressed JSON."""
    return pack(msgspec.json.encode(record))


def read_record(data: bytes, name: str = "record") -> Record:
    """Parse and check a record. Raises FormatError naming ``name`` and what is wrong."""
    return read_slices(data, name)[0]


def read_slices(data: bytes, name: str = "record") -> tuple[Record, Table]:
    """As ``read_record``, with its slices as a table: what was checked need not be made twice."""
    text = unpack(data, MAX_RECORD_BYTES, name)
    try:
        require_readable(text, RECORD_VERSION, FEATURES, name)
        record = msgspec.json.decode(text, type=Record)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"{name}: not a record: {error}") from None
    _check(record, name)
    return record, table_of(record, name)


def _check(record: Record, name: str) -> None:
    ranks = [shard.rank for shard in record.shards]
    if len(set(ranks)) != len(ranks):
        raise FormatError(f"{name}: a rank has two shards: {sorted(ranks)}")
    if any(not 0 <= rank < record.world_size for rank in ranks):
        raise FormatError(f"{name}: ranks {sorted(ranks)} outside world size {record.world_size}")
    if not 0 <= record.node < record.nodes:
        raise FormatError(f"{name}: node {record.node} of {record.nodes}")
    trees = {tree.digest for tree in record.trees}
    for tree in record.trees:
        if digest(tree.data).hex() != tree.digest:
            raise FormatError(f"{name}: a tree is not the one of digest {tree.digest[:16]!r}")
    for shard in record.shards:
        if shard.tree not in trees:
            raise FormatError(f"{name}: rank {shard.rank} names a tree that is not there")
        if shard.key:
            object_names.require_within(shard.key, record.step, record.attempt)
            own = (record.step, record.attempt, record.node, shard.rank)
            if shard.key != object_names.shard_key(*own):
                raise FormatError(f"{name}: rank {shard.rank} names {shard.key!r}, not its own")
        elif shard.nbytes:
            raise FormatError(f"{name}: rank {shard.rank} names no object for its bytes")


def stored_slices(record: Record, name: str = "record") -> Iterator[Stored]:
    """Every slice of a record with its place. Raises FormatError for columns that do not fit."""
    return iter(table_of(record, name))


def table_of(record: Record, name: str = "record") -> Table:
    """The slices of a record as a table. Raises FormatError for columns that do not fit."""
    columns, shards = record.slices, sorted(record.shards, key=lambda shard: shard.rank)
    rows = len(columns.rank)
    lengths = (columns.name, columns.dtype, columns.shape, columns.per_rank, columns.start)
    if any(len(column) != rows for column in lengths) or len(columns.digest) != 64 * rows:
        raise FormatError(f"{name}: columns of different lengths")
    try:
        table = Table(
            fqns=record.names,
            dtypes=record.dtypes,
            shapes=record.shapes,
            keys=[shard.key for shard in shards],
            fqn=_column(columns.name),
            owner=np.where(_column(columns.per_rank) != 0, _column(columns.rank), NOBODY),
            dtype=_column(columns.dtype),
            shape=_column(columns.shape),
            key=_places(columns.rank, [shard.rank for shard in shards]),
            rank=_column(columns.rank),
            offsets=_column(columns.offsets),
            sizes=_column(columns.sizes),
            start=_column(columns.start),
            digest=_digests(columns.digest, name),
            blocks=_digests(columns.blocks, name),
        )
        bounds = _column([shard.header_bytes for shard in shards])
        ends = _column([shard.nbytes for shard in shards])
    except OverflowError:
        raise FormatError(f"{name}: a column holds a number above 2^63") from None
    numbers = (table.fqn, table.dtype, table.shape, table.rank, table.offsets, table.sizes)
    if any(column.min(initial=0) < 0 for column in (*numbers, table.start)):
        raise FormatError(f"{name}: a column holds a negative number")
    for column, known in (
        (table.fqn, table.fqns),
        (table.dtype, table.dtypes),
        (table.shape, table.shapes),
        (table.key, table.keys),
    ):
        outside = column >= len(known)
        if outside.any():
            row = int(np.argmax(outside))
            raise FormatError(f"{name}: slice {row} points outside the record's tables")
    table.check_boxes(name)
    if len(table.blocks) != table.first_block[-1]:
        what = "more" if len(table.blocks) > table.first_block[-1] else "fewer"
        raise FormatError(f"{name}: blocks hold {what} numbers than its slices need")
    nbytes = table.nbytes()
    outside = (
        (table.start < bounds[table.key]) | (nbytes > ends[table.key] - table.start) | (nbytes == 0)
        if rows
        else np.zeros(0, np.bool_)
    )
    if outside.any():
        row = int(np.argmax(outside))
        raise FormatError(
            f"{name}: {table.row(row).slice.key} at {table.start[row]}+{nbytes[row]} lies outside "
            f"its shard of {ends[table.key[row]]}"
        )
    return table


def _column(numbers: list[int]) -> Ints:
    return narrow(np.array(numbers, np.int64))


def _digests(text: str, name: str) -> Bytes:
    try:
        joined = bytes.fromhex(text)
    except ValueError:
        raise FormatError(f"{name}: digests are not hexadecimal") from None
    if len(joined) % 32:
        raise FormatError(f"{name}: columns of different lengths: a digest has 32 bytes")
    return as_digests(joined)


def _places(ranks: list[int], known: list[int]) -> Ints:
    """For each rank its place among the known ones, which are sorted; none is past the last."""
    numbers, there = _column(ranks), _column(known)
    places = np.searchsorted(there, numbers)
    found = places < len(known)
    found[found] = there[places[found]] == numbers[found]
    return narrow(np.where(found, places, len(known)))
