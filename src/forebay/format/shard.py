"""The image of one rank: a valid safetensors file whose data starts at a 4 KiB boundary.

    8 bytes little-endian   length of the header text, itself included in no count
    header                  JSON, padded with spaces so that 8 + length is a multiple of 4096
    data                    the tensors, row-major, widest element type first, no gap

The layout follows from sizes alone, before any byte is copied. Widest first keeps every tensor
aligned to its own element size without padding, which the safetensors format does not allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from forebay.errors import FormatError
from forebay.format.dtypes import ELEMENT_TYPES, element_type
from forebay.format.slices import Slice, is_sane

PAGE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses larger ones
_BY_TAG = {t.tag: t for t in ELEMENT_TYPES.values() if t.tag is not None}


def round_up(nbytes: int, unit: int = PAGE_BYTES) -> int:
    """The next multiple of ``unit``."""
    return -(-nbytes // unit) * unit


@dataclass(frozen=True, slots=True)
class Placed:
    """A slice and its byte range in the image: ``start`` counts from the start of the file."""

    slice: Slice
    name: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The layout of one shard file; ``header`` includes the length word and the padding."""

    header: bytes
    placed: tuple[Placed, ...]
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor as a header states it; ``start`` counts from the start of the file."""

    name: str
    tag: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def _entry_name(piece: Slice, alone: bool) -> str:
    if alone:
        return piece.key.fqn
    return piece.key.fqn + "@" + ",".join(map(str, piece.box.offsets))


def _tag_and_shape(piece: Slice) -> tuple[str, list[int]]:
    kind = element_type(piece.dtype)
    if kind.tag is not None:
        return kind.tag, list(piece.box.sizes)
    sizes = list(piece.box.sizes) or [1]
    return "U8", [*sizes[:-1], sizes[-1] * kind.item_bytes]


def plan_image(pieces: Iterable[Slice], metadata: dict[str, str]) -> Image:
    """Lay slices out in one image. Empty slices are left out. Deterministic in its arguments.

    ``metadata`` becomes the header's ``__metadata__`` (strings only, as the format demands).
    """
    kept = [piece for piece in pieces if piece.nbytes]
    kept.sort(key=lambda s: (-element_type(s.dtype).item_bytes, s.key.fqn, s.box))
    count: dict[str, int] = {}
    for piece in kept:
        count[piece.key.fqn] = count.get(piece.key.fqn, 0) + 1
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    ranges: list[tuple[Slice, str, int]] = []
    for piece in kept:
        name = _entry_name(piece, count[piece.key.fqn] == 1)
        while name in header:  # "w@0" may be a path of its own; a record goes by bytes, not names
            name += "~"
        tag, shape = _tag_and_shape(piece)
        header[name] = {"dtype": tag, "shape": shape, "data_offsets": [at, at + piece.nbytes]}
        ranges.append((piece, name, at))
        at += piece.nbytes
    text = msgspec.json.encode(header)
    data_start = round_up(8 + len(text))
    text = text.ljust(data_start - 8, b" ")
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(f"image: header of {len(text)} bytes exceeds {MAX_HEADER_BYTES}")
    return Image(
        header=len(text).to_bytes(8, "little") + text,
        placed=tuple(Placed(p, name, data_start + a, p.nbytes) for p, name, a in ranges),
        total_bytes=data_start + at,
    )


def header_bytes_of(first: bytes, file_bytes: int, name: str = "image") -> int:
    """Size of length word and header, from the first 8 bytes. Raises FormatError when insane."""
    if len(first) < 8:
        raise FormatError(f"{name}: {file_bytes} bytes long, too short for a header")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > file_bytes:
        raise FormatError(
            f"{name}: header claims {length} bytes, file has {file_bytes}, limit {MAX_HEADER_BYTES}"
        )
    return 8 + length


def read_header(header: bytes, file_bytes: int, name: str = "image") -> list[Entry]:
    """Parse length word and header; strict: no hole, no overlap, nothing beyond the file.

    Raises FormatError naming ``name`` and what differs.
    """
    end = header_bytes_of(header, file_bytes, name)
    if len(header) < end:
        raise FormatError(f"{name}: header cut at {len(header)} of {end} bytes")
    try:
        found = msgspec.json.decode(header[8:end], type=dict[str, dict[str, object]])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FormatError(
            f"{name}: header is not the JSON of a safetensors file: {error}"
        ) from None
    entries = []
    for key, value in found.items():
        if key != "__metadata__":
            entries.append(_read_entry(name, key, value, end))
    entries.sort(key=lambda e: (e.start, e.nbytes))
    at = end
    for entry in entries:
        if entry.start != at:
            raise FormatError(f"{name}: {entry.name!r} starts at {entry.start}, expected {at}")
        at += entry.nbytes
    if at != file_bytes:
        raise FormatError(f"{name}: tensors end at byte {at}, file has {file_bytes}")
    return entries


def _read_entry(name: str, key: str, value: dict[str, object], data_start: int) -> Entry:
    try:
        row = msgspec.convert(value, type=_Row)
    except msgspec.ValidationError as error:
        raise FormatError(f"{name}: entry {key!r}: {error}") from None
    kind = _BY_TAG.get(row.dtype)
    start, end = row.data_offsets
    if not is_sane(row.shape):
        raise FormatError(f"{name}: entry {key!r} has more elements than any tensor")
    if kind is None or any(n < 0 for n in row.shape) or start < 0:
        raise FormatError(f"{name}: entry {key!r} has dtype {row.dtype!r}, shape {row.shape}")
    if end - start != math.prod(row.shape) * kind.item_bytes:
        raise FormatError(
            f"{name}: entry {key!r} spans {end - start} bytes, "
            f"its shape {row.shape} of {row.dtype} needs {math.prod(row.shape) * kind.item_bytes}"
        )
    return Entry(
        name=key,
        tag=row.dtype,
        shape=tuple(row.shape),
        start=data_start + start,
        nbytes=end - start,
    )


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]
