"""Where an entry stands in the state, written as one string: its FQN.

The parts of a path are dictionary keys and list positions, joined by ``/``:
``model/layers.0.weight``, ``optimizer/state/layers.0.weight/exp_avg``, ``history/3/loss``.
The writing is one to one: ``/`` and ``~`` inside a key are escaped as in RFC 6901, and a key that
is not a string carries a mark, so that ``0`` and ``"0"`` stay two keys.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

from forebay.errors import FormatError, StateError

Key: TypeAlias = "str | int | float | bool | None"
_MAX_BITS = 13_000  # Python writes no integer of very many more digits


class Position(int):
    """A position in a list or tuple, as against an integer key of a dictionary."""


def write_part(key: object) -> str:
    """One part of a path. Raises StateError for a key of a type that cannot be written."""
    if isinstance(key, Position):
        return str(int(key))
    if key is None or isinstance(key, bool):
        return f"#{key}"
    if type(key) is int:
        if key.bit_length() > _MAX_BITS:
            raise StateError(f"a key is an integer of {key.bit_length()} bits: make it a str")
        return f"#{key}"
    if type(key) is float:
        return f"#{key.hex()}"
    if type(key) is str and _storable(key):
        text = key.replace("~", "~0").replace("/", "~1")
        if text == "":
            return "~3"
        return "~2" + text[1:] if text.startswith("#") else text
    raise StateError(
        f"key {key!r} has type {type(key).__name__}; keys of a state may be str (valid Unicode), "
        "int, float, bool or None: convert it before save"
    )


def _storable(text: str) -> bool:
    """False for text with lone surrogates, which UTF-8 cannot write."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_part(part: str) -> Key:
    """The key that ``write_part`` wrote; a list position reads as its decimal string."""
    if part.startswith("#"):
        text = part[1:]
        if text in ("True", "False"):
            return text == "True"
        if text == "None":
            return None
        try:
            if text in ("inf", "-inf", "nan") or "0x" in text:
                return float.fromhex(text)
            return int(text)
        except (ValueError, OverflowError):
            raise FormatError(f"path: part {part!r} is not a key of a known type") from None
    if part == "~3":
        return ""
    if part.startswith("~2"):
        part = "#" + part[2:]
    return part.replace("~1", "/").replace("~0", "~")


def join(parent: str, key: object) -> str:
    """The path of ``key`` below ``parent``; the root is the empty string."""
    if type(key) is str:  # nearly all are, and a save asks for the same ones every time
        return _join_text(parent, key)
    part = write_part(key)
    return f"{parent}/{part}" if parent else part


@functools.lru_cache(maxsize=1 << 16)
def _join_text(parent: str, key: str) -> str:
    part = write_part(key)
    return f"{parent}/{part}" if parent else part


def split(path: str) -> list[str]:
    """The written parts of a path, root first."""
    return path.split("/") if path else []


def parent_of(path: str) -> str:
    """The path one level up; of a top-level entry, the root ``''``."""
    return path.rpartition("/")[0]


def component(path: str) -> str:
    """The top-level entry a path belongs to (``model``, ``optimizer``)."""
    return path.partition("/")[0]
