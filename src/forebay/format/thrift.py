"""Thrift's compact protocol, read: what Parquet's own headers are written in.

pyarrow reads them too, and ends the process, or fills the memory, where some of them lie. Here they
are only data: numbers, bytes, lists and structs by field number. See the Thrift specification,
"Thrift Compact protocol encoding".
"""

from __future__ import annotations

from typing import Any

from forebay.errors import FormatError

_DEEPEST = 16
_LONGEST_VARINT = 10
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


def read_struct(data: memoryview, at: int = 0) -> tuple[dict[int, Any], int]:
    """The struct at a place, and where it ends. Raises FormatError.

    Doubles and maps, which Parquet's headers have none of, are None and refused.
    """
    return _struct(data, at, 0)


def _struct(data: memoryview, at: int, depth: int) -> tuple[dict[int, Any], int]:
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
        kind &= 15
        if kind in (_TRUE, _FALSE):  # the kind is the value
            fields[field] = kind == _TRUE
        else:
            fields[field], at = _value(data, at, kind, depth)


def _value(data: memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_I16, _I32, _I64):
        return _zigzag(data, at)
    if kind == _BINARY:
        length, at = _varint(data, at)
        if length > len(data) - at:
            raise FormatError("a header has bytes past its end")
        return bytes(data[at : at + length]), at + length
    if depth >= _DEEPEST:
        raise FormatError("a header is nested too deep")
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)
    if kind in (_LIST, _SET):
        return _list(data, at, depth + 1)
    if kind in (_TRUE, _FALSE, _BYTE):  # in a list a truth value takes a byte
        return _byte(data, at)
    if kind == _DOUBLE:
        return None, at + 8
    raise FormatError(f"a header has a field of kind {kind}")


def _list(data: memoryview, at: int, depth: int) -> tuple[list[Any], int]:
    head, at = _byte(data, at)
    count = head >> 4
    if count == 15:
        count, at = _varint(data, at)
    if count > len(data) - at:  # each takes a byte at the least
        raise FormatError("a header has a list longer than itself")
    items = []
    for _ in range(count):
        item, at = _value(data, at, head & 15, depth)
        items.append(item)
    return items, at


def _byte(data: memoryview, at: int) -> tuple[int, int]:
    if not 0 <= at < len(data):
        raise FormatError("a header has no end")
    return data[at], at + 1


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        byte, at = _byte(data, at)
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at
    raise FormatError("a header has a number without an end")


def _zigzag(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
