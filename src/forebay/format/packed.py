"""Compressed objects, and the head that every versioned one begins with."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import zstandard

from forebay.errors import FormatError

_MOST_EXPANSION = 2**15  # of zstd: a block of 128 KiB takes 4 bytes at the least


class _Head(msgspec.Struct):
    version: int
    features: list[str] = []


def pack(data: bytes) -> bytes:
    """``data`` as one zstd frame that states its size and ends in a checksum.

    A commit vouches for a record that it has read: what was wrong on the way must not pass.
    """
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)


def unpack(data: bytes, limit: int, name: str) -> bytes:
    """What ``pack`` was given. Raises FormatError before it allocates more than ``limit``."""
    try:
        size = zstandard.frame_content_size(data)
        if size < 0 or size > limit or size > len(data) * _MOST_EXPANSION:
            raise FormatError(f"{name}: {len(data)} bytes claim to hold {size}, limit {limit}")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{name}: not a zstd frame: {error}") from None


def require_readable(text: bytes, version: int, features: Collection[str], name: str) -> None:
    """Raise FormatError unless JSON ``text`` is of ``version`` and needs only known features.

    Lets the errors of a text that is no JSON with such a head pass to the caller.
    """
    head = msgspec.json.decode(text, type=_Head)
    if head.version != version:
        raise FormatError(
            f"{name}: version {head.version}, this forebay reads {version}: upgrade it"
        )
    unknown = sorted(set(head.features) - set(features))
    if unknown:
        raise FormatError(f"{name}: needs features this forebay lacks: {unknown}: upgrade it")
