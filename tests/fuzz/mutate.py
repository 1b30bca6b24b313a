"""Bytes that are nearly right: valid seeds with bits, lengths and parts of each other changed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

LARGEST_BYTES = 2**18
SIZES = (
    0,
    1,
    0x7F,
    0xFF,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
NUMBERS = (b"0", b"-1", b"1.5", b"1e999", b"9" * 5000, b"2147483648", b"9223372036854775807")
NUMBERS += (b"9223372036854775808", b"18446744073709551615", b"18446744073709551616", b"NaN")
PIECES = (
    *(b"[" * 2000, b"{" * 2000, b'{"a":' * 500, b"\x91" * 2000, b"(" * 500, b"\0", b"\xff" * 8),
    *(b'"\\ud800"', b"null", b"true", b"[]", b"{}", b'""', b"\xff\xfe", b"../", b"/etc/passwd"),
    *(b"..", b"\n", b"\x1b[2J", b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b"&b;", b"<a>" * 500),
    *(b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xd7\xff"),
    *(b"&a [1]", b"*a", b"<<: *a", b"!!set", b"!!timestamp 2001-99-99", b"? [a]\n: b\n", b"0x"),
    *(b"<Message>" + b" " * 5000, b"A" * 5000, b"\xed\xa0\x80", b"1:" * 200),
)
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?")
_WORD = re.compile(rb"[A-Za-z_]{3,}")


def mutate(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, changed in one to six places; now and then bytes of no order at all."""
    if chance.random() < 0.05:
        return chance.randbytes(chance.randrange(300))
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        _CHANGES[chance.randrange(len(_CHANGES))](chance, data, seeds)
    return bytes(data[:LARGEST_BYTES])


def _flip(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _byte(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _cut(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[chance.randrange(len(data) + 1) :]


def _remove(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    del data[at : at + chance.choice((1, 1, 4, 8, 100))]


def _size(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """A field of a length, in either order of bytes."""
    width = chance.choice((1, 2, 4, 8))
    at = chance.randrange(max(1, len(data) - width + 1))
    value = chance.choice(SIZES) % 2 ** (8 * width)
    data[at : at + width] = value.to_bytes(width, chance.choice(("little", "big")))


def _front(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """The same where most lengths stand."""
    width = chance.choice((4, 8))
    value = chance.choice(SIZES) % 2 ** (8 * width)
    data[:width] = value.to_bytes(width, chance.choice(("little", "big")))


def _number(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    found = list(_NUMBER.finditer(bytes(data[:20_000])))
    if found:
        place = chance.choice(found)
        data[place.start() : place.end()] = chance.choice(NUMBERS)


def _word(chance: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    """A word of the text takes the place of another, or something that is none does."""
    found = list(_WORD.finditer(bytes(data[:20_000])))
    others = _WORD.findall(chance.choice(seeds)[:20_000]) or [b"x"]
    if found:
        place = chance.choice(found)
        data[place.start() : place.end()] = chance.choice((*others, chance.choice(PIECES)))


def _piece(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice(PIECES)


def _repeat(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    part = data[at : at + chance.choice((1, 8, 64, 1000))]
    data[at:at] = part * chance.choice((1, 2, 50))
    del data[LARGEST_BYTES:]


def _splice(chance: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = chance.choice(seeds)
    data[chance.randrange(len(data) + 1) :] = other[chance.randrange(len(other) + 1) :]


def _noise(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.randbytes(chance.randrange(1, 40))


_CHANGES = (
    *(_flip, _byte, _cut, _remove, _size, _front, _number, _number),
    *(_word, _piece, _repeat, _splice, _noise),
)
