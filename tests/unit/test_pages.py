"""Pages of an index that claim more than a reader can hold are refused before it believes them."""

from __future__ import annotations

import contextlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.format.index import write_index
from forebay.format.pages import (
    MOST_CHUNK_VALUES,
    MOST_PAGE_BYTES,
    PLAIN,
    RLE_DICTIONARY,
    check_pages,
)
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Stored

DATA, INDEX, DICTIONARY, DATA_V2 = range(4)
HEADS = {DATA: 5, INDEX: 6, DICTIONARY: 7, DATA_V2: 8}


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def number(value: int) -> bytes:
    """A field of 32 bits, one after the last one."""
    return b"\x15" + varint(value << 1 if value >= 0 else (-value << 1) - 1)


def page(
    *,
    kind: int = DATA,
    values: int = 3,
    encoding: int = PLAIN,
    full: int = 4,
    stored: int = 4,
    body: bytes = b"abcd",
    more: bytes = b"",
) -> bytes:
    head = number(values) + (b"\x15\0\x15\0" if kind == DATA_V2 else b"") + number(encoding) + more
    jump = bytes([(HEADS[kind] - 3) << 4 | 12])
    return number(kind) + number(full) + number(stored) + jump + head + b"\0\0" + body


@pytest.mark.parametrize("kind", [DATA, DATA_V2])
def test_pages_as_they_should_be(kind: int) -> None:
    check_pages(memoryview(page(kind=kind) * 3), "x", dictionary=False)
    coded = page(kind=DICTIONARY) + page(kind=kind, encoding=RLE_DICTIONARY)
    check_pages(memoryview(coded), "x", dictionary=True)


@pytest.mark.parametrize(
    ("pages", "dictionary", "why"),
    [
        (page(values=MOST_CHUNK_VALUES + 1), False, "values in a row group"),
        (page(values=MOST_CHUNK_VALUES // 2 + 1) * 2, False, "values in a row group"),
        (page(values=-1), False, "values in a row group"),
        (page(full=MOST_PAGE_BYTES + 1), False, "limit"),
        (page(full=-1), False, "limit"),
        (page(stored=5), False, "limit"),
        (page(stored=-20), False, "limit"),
        (page(kind=DICTIONARY), False, "encoding"),
        (page(encoding=RLE_DICTIONARY), False, "encoding"),
        (page(encoding=7), True, "encoding"),  # strings by their prefixes: ends without end
        (page(kind=INDEX), True, "kind"),
        (b"\0", True, "kind"),
        (number(0) + b"\0", True, "kind"),
        (b"\x0c" * 50, True, "kind|deep|no end"),
        (page()[:-5], True, "no end|limit"),
        (page(more=b"\x19\xf5" + varint(2**30)), True, "longer than itself"),
        (page(more=b"\x1f"), True, "kind 15"),
        (b"\x15" + b"\xff" * 11, True, "number without an end"),
    ],
)
def test_pages_that_lie(pages: bytes, dictionary: bool, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        check_pages(memoryview(pages), "x", dictionary=dictionary)


@given(st.binary(max_size=60))
def test_garbage_ends(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        check_pages(memoryview(data), "x", dictionary=True)


def test_all_that_a_writer_says_in_a_header_is_passed() -> None:
    """Statistics, checksums and truth values stand between what is looked at."""
    rows = [
        Stored(Slice(TensorKey(f"w{i}"), "int8", (2,), Box((0,), (2,))), "f", 0, bytes(32), (), 0)
        for i in range(500)
    ]
    for data in (write_index(rows), _rich(write_index(rows))):
        group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
        for column in map(group.column, range(group.num_columns)):
            begin = column.data_page_offset
            if column.has_dictionary_page:
                begin = min(begin, column.dictionary_page_offset)
            chunk = memoryview(data)[begin : begin + column.total_compressed_size]
            check_pages(chunk, column.path_in_schema, dictionary=column.has_dictionary_page)


def _rich(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    table = pq.read_table(pa.BufferReader(data))
    pq.write_table(table, sink, data_page_version="2.0", data_page_size=64, write_statistics=True)
    return sink.getvalue().to_pybytes()
