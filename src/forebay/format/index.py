"""The index: geometry and place of every slice, as Parquet, sorted by FQN.

A reader of another layout fetches only the row groups whose FQN range it needs; a person can query
it with DuckDB or pandas. ``rank`` is the writer; ``owner`` is set only for what was declared per
rank. ``digest`` and ``blocks`` stand in columns of their own.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.errors import FormatError
from forebay.format.record import Stored
from forebay.format.slices import Box, Slice, TensorKey, check_slice

INDEX_VERSION = b"1"
_NO_ROW = (ValueError, LookupError, TypeError, OverflowError, AttributeError, RuntimeError)
ROW_GROUP_ROWS = 16_384

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


def write_index(stored: Iterable[Stored]) -> bytes:
    """All slices as one Parquet file, sorted by FQN, owner and offsets."""
    rows = sorted(
        stored, key=lambda s: (s.slice.key.fqn, s.slice.key.rank or 0, s.slice.box.offsets)
    )
    columns: dict[str, list[Any]] = {
        "fqn": [s.slice.key.fqn for s in rows],
        "owner": [s.slice.key.rank for s in rows],
        "dtype": [s.slice.dtype for s in rows],
        "shape": [list(s.slice.shape) for s in rows],
        "offsets": [list(s.slice.box.offsets) for s in rows],
        "sizes": [list(s.slice.box.sizes) for s in rows],
        "rank": [s.rank for s in rows],
        "file": [s.key for s in rows],
        "start": [s.start for s in rows],
        "nbytes": [s.nbytes for s in rows],
        "digest": [s.digest for s in rows],
        "blocks": [b"".join(s.blocks) or None for s in rows],
    }
    table = pa.table(columns, schema=SCHEMA)
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        row_group_size=ROW_GROUP_ROWS,
        compression="zstd",
        use_dictionary=["fqn", "dtype", "file"],
        write_statistics=["fqn"],
        write_page_checksum=True,
    )
    return sink.getvalue()


def read_index(
    source: Any, fqns: Sequence[str] | None = None, name: str = "index"
) -> Iterator[Stored]:
    """Slices of the named tensors (all when None) from a seekable binary file or bytes.

    Only row groups whose FQN range can hold one of ``fqns`` are read. Raises FormatError.
    """
    wanted = None if fqns is None else sorted(set(fqns))
    try:
        file = pq.ParquetFile(
            pa.BufferReader(source) if isinstance(source, bytes) else source,
            page_checksum_verification=True,  # a part that is read has no other digest
        )
        if (file.schema_arrow.metadata or {}).get(b"forebay.index") != INDEX_VERSION:
            raise FormatError(f"{name}: not an index of version 1")
        if file.schema_arrow.names != SCHEMA.names:
            raise FormatError(
                f"{name}: columns {file.schema_arrow.names} are not those of an index"
            )
        for group in range(file.num_row_groups):
            if wanted is not None and not _may_hold(file, group, wanted):
                continue
            table = file.read_row_group(group)
            if wanted is not None:
                table = table.filter(_is_one_of(table["fqn"], wanted))
            yield from _rows(table, name)
    except (pa.ArrowException, MemoryError, OSError, *_NO_ROW) as error:
        raise FormatError(f"{name}: not a readable index: {error}") from error


def _is_one_of(column: pa.ChunkedArray, wanted: list[str]) -> pa.ChunkedArray:
    import pyarrow.compute as pc  # only readers need it, and it is large

    return pc.is_in(column, pa.array(wanted))


def _may_hold(file: pq.ParquetFile, group: int, wanted: list[str]) -> bool:
    column = file.metadata.row_group(group).column(0)
    kinds = {column.physical_type, file.schema.column(0).physical_type}
    if kinds != {"BYTE_ARRAY"}:  # pyarrow ends the process where the two differ, statistics asked
        raise FormatError(f"index: its names are of kind {sorted(kinds)}")
    statistics = column.statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return any(statistics.min <= fqn <= statistics.max for fqn in wanted)


def _rows(table: pa.Table, name: str) -> Iterator[Stored]:
    for row in table.to_pylist():
        sealed, file, rank = row["digest"], row["file"], row["rank"]
        if type(sealed) is not bytes or len(sealed) != 32 or type(file) is not str:
            raise FormatError(f"{name}: a row has no digest or no file")
        if type(rank) is not int or rank < 0 or not _is_key(row["fqn"], row["owner"]):
            raise FormatError(f"{name}: a row has no tensor or no rank")
        piece = Slice(
            TensorKey(row["fqn"], row["owner"]),
            row["dtype"],
            tuple(row["shape"]),
            Box(tuple(row["offsets"]), tuple(row["sizes"])),
        )
        check_slice(piece)
        if piece.nbytes != row["nbytes"] or row["start"] < 0:
            raise FormatError(
                f"{name}: {piece.key} has {row['nbytes']} bytes, expected {piece.nbytes}"
            )
        joined = row["blocks"] or b""
        blocks = tuple(joined[at : at + 32] for at in range(0, len(joined), 32))
        if len(joined) % 32:
            raise FormatError(f"{name}: {piece.key} has {len(joined)} bytes of block digests")
        yield Stored(piece, file, row["start"], sealed, blocks, rank)


def _is_key(fqn: object, owner: object) -> bool:
    return type(fqn) is str and (owner is None or type(owner) is int)
