"""The index: geometry and place of every slice, as Parquet, sorted by FQN.

A reader of another layout fetches only the row groups whose FQN range it needs; a person can query
it with DuckDB or pandas. ``rank`` is the writer; ``owner`` is set only for what was declared per
rank. ``digest`` and ``blocks`` stand in columns of their own.

Tensors of few slices come first, in row groups of their own, each part sorted: a rank that wants
the steps of its optimizer, which are single numbers, need not read past a thousand slices of each
tensor between them.
"""

from __future__ import annotations

import bisect
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forebay.errors import FormatError
from forebay.format.footer import Group, read_footer
from forebay.format.row_group import (
    INDEX_VERSION,
    LISTS,
    NAMES,
    SCHEMA,
    SEALS,
    RowGroup,
    to_arrow,
)
from forebay.format.stored import Ints, Stored, Table, Tables

ROW_GROUP_ROWS = 65_536
FEW_SLICES = 16
FEW_GROUPS = b"forebay.few_groups"

_NO_ROW = (ValueError, LookupError, TypeError, OverflowError, AttributeError, RuntimeError)

# Seals do not compress, and trying takes longer than all the rest.
_COMPRESSION = {
    f"{name}.list.element" if name in LISTS else name: "none" if name in SEALS else "zstd"
    for name in SCHEMA.names
}


def write_index(stored: Table | Iterable[Stored]) -> bytes:
    """All slices as one Parquet file, sorted by FQN, owner and offsets."""
    table = stored if isinstance(stored, Table) else Table.of(stored)
    sink = io.BytesIO()
    write_parts(lambda: [table], sink)
    return sink.getvalue()


def write_parts(parts: Callable[[], Iterable[Table]], sink: IO[bytes]) -> int:
    """As ``write_index``, a part at a time: the same bytes. Returns the number of slices.

    ``parts`` is called twice and gives tables of whole tensors, in the order of their FQNs.
    """
    some, count = Tables(), 0
    for part in parts():
        few, many = _by_slices(part)
        some.add(part.take(few))
        count += len(many)
    count += len(some)
    groups = -(-len(some) // ROW_GROUP_ROWS)
    metadata = {**SCHEMA.metadata, FEW_GROUPS: str(groups).encode()}
    with pq.ParquetWriter(
        sink,
        SCHEMA.with_metadata(metadata),
        compression=_COMPRESSION,
        use_dictionary=list(NAMES),
        write_statistics=["fqn"],
        write_page_checksum=True,
    ) as writer:

        def write(rows: Iterable[tuple[Table, Ints]]) -> None:
            for group in _row_groups(rows):
                arrow = to_arrow(group).replace_schema_metadata(metadata)
                writer.write_table(arrow, row_group_size=ROW_GROUP_ROWS)

        held = some.taken()
        write([(held, np.arange(len(held)))])
        write((part, _by_slices(part)[1]) for part in parts())
    return count


def _by_slices(table: Table) -> tuple[Ints, Ints]:
    """Rows of tensors of few slices, and those of all others, both sorted."""
    counts = np.diff(table.bounds)
    few = np.repeat(counts <= FEW_SLICES, counts)
    return table.order[few], table.order[~few]


def _row_groups(pieces: Iterable[tuple[Table, Ints]]) -> Iterator[Table]:
    """Rows of tables in tables of a row group each, the last one aside."""
    left = Tables()
    for table, rows in pieces:
        at = 0
        while at < len(rows):
            some = table.take(rows[at : at + ROW_GROUP_ROWS - len(left)])
            at += len(some)
            if len(some) == ROW_GROUP_ROWS:
                yield some
                continue
            left.add(some)
            if len(left) == ROW_GROUP_ROWS:
                yield left.taken()
    if len(left):
        yield left.taken()


def read_index(
    source: Any, fqns: Sequence[str] | None = None, name: str = "index"
) -> Iterator[Stored]:
    """Slices of the named tensors (all when None) from a seekable binary file or bytes.

    Only row groups whose FQN range can hold one of ``fqns`` are read. Raises FormatError.
    """
    for table in read_tables(source, fqns, name):
        yield from table


def read_tables(
    source: Any,
    fqns: Sequence[str] | None = None,
    name: str = "index",
    choose: Callable[[Table], Ints] | None = None,
) -> Iterator[Table]:
    """As ``read_index``, a table for each row group.

    ``choose`` gives the rows that are wanted of a table whose digests have not been read: those of
    a row group are read only when it wants some.
    """
    wanted = None if fqns is None else sorted(set(fqns))
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        groups, footer = read_footer(file, name)
        parquet = pq.ParquetFile(footer)
        if (parquet.schema_arrow.metadata or {}).get(b"forebay.index") != INDEX_VERSION:
            raise FormatError(f"{name}: not an index of version 1")
        if parquet.schema_arrow.names != SCHEMA.names:
            raise FormatError(
                f"{name}: columns {parquet.schema_arrow.names} are not those of an index"
            )
        few = int((parquet.schema_arrow.metadata or {}).get(FEW_GROUPS, b"0"))
        whole: set[str] = set()
        for number, group in enumerate(groups):
            if wanted is not None and number == few:  # no other part has slices of these
                wanted = sorted(set(wanted) - whole)
            if wanted is not None and not _may_hold(group, wanted):
                continue
            places = RowGroup(file, parquet.metadata, number, group, name)
            rows = places.of(wanted)
            whole |= places.fqns(rows) if number < few else set()
            found = places.sealed(rows if choose is None else places.chosen(rows, choose))
            if len(found):
                yield found
    except (pa.ArrowException, MemoryError, OSError, *_NO_ROW) as error:
        raise FormatError(f"{name}: not a readable index: {error}") from error


def joined_index(data: bytes, name: str = "index") -> Table:
    """All of an index. Raises FormatError."""
    tables = Tables()
    for table in read_tables(data, None, name):
        tables.add(table)
    return tables.taken()


def _may_hold(group: Group, wanted: list[str]) -> bool:
    if group.first is None or group.last is None:
        return True
    first = bisect.bisect_left(wanted, group.first)
    return first < len(wanted) and wanted[first] <= group.last
