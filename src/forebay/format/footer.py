"""The footer of the index: which rows a row group has, and where its columns lie.

pyarrow parses it as well, to read columns, but is asked nothing of what it says there: a footer
that lies can make it end the process. See parquet-format, ``FileMetaData``.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from forebay.errors import FormatError
from forebay.format.part import Part
from forebay.format.thrift import read_struct

READ_AHEAD_BYTES = 2**18
MAGIC = b"PAR1"
MOST_FOOTER_BYTES = 2**28

_GROUPS = 4
_COLUMNS, _ROWS = 1, 3
_META = 3
_PATH, _STORED_BYTES, _DATA_PAGE, _DICTIONARY_PAGE, _STATISTICS = 3, 7, 9, 11, 12
_LAST, _FIRST = 5, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The pages of one column in one row group: bytes ``begin`` to ``end`` of the file."""

    column: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A row group. ``first`` and ``last`` bound its first column, sorted; None where unsaid."""

    rows: int
    chunks: tuple[Chunk, ...]
    first: str | None
    last: str | None


def read_footer(file: Any, name: str) -> tuple[list[Group], Part]:
    """The row groups of a seekable binary file, and its footer as a file of its own.

    One read, or two when the footer is larger than READ_AHEAD_BYTES. Raises FormatError.
    """
    size = file.seek(0, io.SEEK_END)
    if size < 12:
        raise FormatError(f"{name}: {size} bytes are no Parquet file")
    part = Part(file, max(0, size - READ_AHEAD_BYTES), size)
    nbytes = int.from_bytes(part.data[-8:-4], "little")
    if part.data[-4:] != MAGIC or nbytes > min(size - 12, MOST_FOOTER_BYTES):
        raise FormatError(f"{name}: no Parquet file, or one cut off")
    if nbytes + 8 > len(part.data):
        part = Part(file, size - 8 - nbytes, size)
    fields, _ = read_struct(part.data[-8 - nbytes : -8])
    try:
        return [_group(group, size) for group in fields[_GROUPS]], part
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{name}: a footer that lacks something: {error!r}") from None


def _group(fields: dict[int, Any], size: int) -> Group:
    chunks = tuple(_chunk(column[_META], size) for column in fields[_COLUMNS])
    statistics = fields[_COLUMNS][0][_META].get(_STATISTICS, {})
    first, last = statistics.get(_FIRST), statistics.get(_LAST)
    return Group(
        rows=_number(fields[_ROWS]),
        chunks=chunks,
        first=None if first is None else first.decode(),
        last=None if last is None else last.decode(),
    )


def _chunk(meta: dict[int, Any], size: int) -> Chunk:
    begin = _number(meta[_DATA_PAGE])
    if _DICTIONARY_PAGE in meta:
        begin = min(begin, _number(meta[_DICTIONARY_PAGE]))
    end = begin + _number(meta[_STORED_BYTES])
    if end > size:
        raise ValueError(f"pages at {begin} to {end} of {size} bytes")
    return Chunk(column=meta[_PATH][0].decode(), begin=begin, end=end)


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a number belongs")
    return value
