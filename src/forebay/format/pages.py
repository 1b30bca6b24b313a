"""Headers of Parquet pages, looked at before a reader believes them.

A few bytes of a page can claim two thousand million values, or one string a million times over, and
a reader that believes them fills the memory. Here what a page claims is bounded; what it holds is
for the reader. A header is a Thrift struct in the compact protocol: parquet-format, ``PageHeader``.
"""

from __future__ import annotations

from typing import Any

from forebay.errors import FormatError

MOST_PAGE_BYTES = 2**26
MOST_CHUNK_VALUES = 2**24
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8

_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
_TYPE, _FULL_BYTES, _BYTES = 1, 2, 3
_HEADS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
_VALUES = 1
_ENCODING = {_DATA: 2, _DICTIONARY: 2, _DATA_V2: 4}
_DEEPEST = 8
_LONGEST_VARINT = 10


def check_pages(chunk: memoryview, column: str, *, dictionary: bool) -> None:
    """Raise FormatError unless each page of a column chunk claims what a reader can hold.

    ``chunk`` is all of its pages, as stored. A column of which ``dictionary`` is False may have no
    dictionary: its values are as long as its pages.
    """
    allowed = {PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY} if dictionary else {PLAIN}
    at = values = 0
    while at < len(chunk):
        header, body = _struct(chunk, at, 0)
        kind = header.get(_TYPE)
        if type(kind) is not int or type(head := header.get(_HEADS.get(kind, 0))) is not dict:
            raise FormatError(f"{column}: a page of kind {kind}")
        full, stored, count = header.get(_FULL_BYTES), header.get(_BYTES), head.get(_VALUES)
        if not (type(full) is type(stored) is type(count) is int):
            raise FormatError(f"{column}: a page that does not say how large it is")
        if not 0 <= full <= MOST_PAGE_BYTES or not 0 <= stored <= len(chunk) - body:
            raise FormatError(f"{column}: a page of {full} bytes, limit {MOST_PAGE_BYTES}")
        values += count
        if count < 0 or values > MOST_CHUNK_VALUES:
            raise FormatError(f"{column}: {values} values in a row group")
        if head.get(_ENCODING[kind]) not in allowed or (kind == _DICTIONARY and not dictionary):
            raise FormatError(f"{column}: a page of encoding {head.get(_ENCODING[kind])}")
        at = body + stored


def _struct(data: memoryview, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Numbers and structs of a struct by field number, and where it ends; the rest is passed."""
    fields: dict[int, Any] = {}
    field = 0
    while True:
        kind, at = _byte(data, at)
        if kind == 0:
            return fields, at
        if kind >> 4:
            field += kind >> 4
        else:
            field, at = _zigzag(data, at)
        fields[field], at = _value(data, at, kind & 15, depth)


def _value(data: memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise FormatError("a page's header is nested too deep")
    if kind in (1, 2):  # true and false: the kind is the value
        return None, at
    if kind == 3:
        return None, at + 1
    if kind in (4, 5, 6):
        return _zigzag(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _varint(data, at)
        return None, at + length
    if kind in (9, 10):
        head, at = _byte(data, at)
        count = head >> 4
        if count == 15:
            count, at = _varint(data, at)
        if count > len(data):
            raise FormatError("a page's header has a list longer than itself")
        for _ in range(count):
            # In a list a truth value takes a byte, as a number of eight bits does.
            inner = 3 if head & 15 in (1, 2) else head & 15
            _, at = _value(data, at, inner, depth + 1)
        return None, at
    if kind == 12:
        return _struct(data, at, depth + 1)
    raise FormatError(f"a page's header has a field of kind {kind}")


def _byte(data: memoryview, at: int) -> tuple[int, int]:
    if not 0 <= at < len(data):
        raise FormatError("a page's header has no end")
    return data[at], at + 1


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        byte, at = _byte(data, at)
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at
    raise FormatError("a page's header has a number without an end")


def _zigzag(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
