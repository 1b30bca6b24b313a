"""Headers of Parquet pages, looked at before a reader believes them.

A few bytes of a page can claim two thousand million values, or one string a million times over, and
a reader that believes them fills the memory. Here what a page claims is bounded; what it holds is
for the reader. See parquet-format, ``PageHeader``.
"""

from __future__ import annotations

from forebay.errors import FormatError
from forebay.format.thrift import read_struct

MOST_PAGE_BYTES = 2**26
MOST_CHUNK_VALUES = 2**24
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8

_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
_TYPE, _FULL_BYTES, _BYTES = 1, 2, 3
_HEADS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
_VALUES = 1
_ENCODING = {_DATA: 2, _DICTIONARY: 2, _DATA_V2: 4}


def check_pages(chunk: memoryview, column: str, *, dictionary: bool) -> None:
    """Raise FormatError unless each page of a column chunk claims what a reader can hold.

    ``chunk`` is all of its pages, as stored. A column of which ``dictionary`` is False may have no
    dictionary: its values are as long as its pages.
    """
    allowed = {PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY} if dictionary else {PLAIN}
    at = values = 0
    while at < len(chunk):
        header, body = read_struct(chunk, at)
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
