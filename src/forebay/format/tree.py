"""Typed encoding of the state's structure and of its values that are not tensors.

A state is written as a flat list of entries, one for each container, tensor and value, in the
order in which the state holds them. A list or tuple without a tensor in it is one value. Values
come back as what they were: int, float, bool, None, str, bytes, complex, list, tuple, set, dict
with keys of any of these, OrderedDict, and, by name, torch.Size, torch.dtype, torch.device.
Nothing else is encoded: what has no place here is refused with its path. No pickle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from forebay.errors import FormatError, StateError

MAX_DEPTH = 64
_MAX_DIGITS = 4000  # of an integer: Python itself refuses to parse many more
_MAX_BITS = 13_000  # below so many digits


class Container(msgspec.Struct, tag="c", array_like=True, frozen=True):
    """A dict, OrderedDict, list or tuple that is not a plain value; ``length`` of its children."""

    path: str
    kind: Literal["dict", "odict", "list", "tuple"]
    length: int


class Tensor(msgspec.Struct, tag="t", array_like=True, frozen=True):
    """A tensor at ``path`` whose bytes are stored under ``fqn`` (another path when tied).

    ``shape`` is global. ``host`` says what it was: a torch tensor on the CPU, one on an
    accelerator, or a numpy array. ``sharded`` is True for a DTensor.
    """

    path: str
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    host: Literal["cpu", "accelerator", "numpy"]
    sharded: bool


class Value(msgspec.Struct, tag="v", array_like=True, frozen=True):
    """A value at ``path``, encoded by ``encode_value``."""

    path: str
    data: bytes


Entry: TypeAlias = Container | Tensor | Value

_TREE = msgspec.msgpack.Decoder(list[Entry])


def write_tree(entries: Iterable[Entry]) -> bytes:
    """Entries as msgpack; equal entries give equal bytes."""
    return msgspec.msgpack.encode(list(entries))


def read_tree(data: bytes, name: str = "tree") -> list[Entry]:
    """Parse what ``write_tree`` wrote. Raises FormatError, also for a path named twice."""
    try:
        entries = _TREE.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"{name}: not a tree of entries: {error}") from None
    seen: set[str] = set()
    for entry in entries:
        if entry.path in seen:
            raise FormatError(f"{name}: entry {entry.path!r} stands twice")
        seen.add(entry.path)
    return entries


@dataclass(frozen=True, slots=True)
class Named:
    """A framework's constant by name, where the framework is not loaded: ``torch.dtype`` ..."""

    kind: str
    text: str


_NAMED_KINDS = {"torch.dtype", "torch.device", "torch.Size"}


def encode_value(value: object, path: str) -> bytes:
    """Encode one value that holds no tensor. Raises StateError naming ``path``."""
    try:
        return msgspec.msgpack.encode(_pack(value, path, 0))
    except RecursionError:
        raise StateError(
            f"{path}: nested deeper than {MAX_DEPTH}: a reference to itself?"
        ) from None
    except UnicodeEncodeError:
        raise StateError(f"{path}: a text in it is not valid Unicode: save it as bytes") from None


def decode_value(data: bytes, path: str, named: Callable[[Named], Any] | None = None) -> Any:
    """The value ``encode_value`` wrote. ``named`` turns a constant into the framework's own.

    Raises FormatError naming ``path``.
    """
    try:
        raw = msgspec.msgpack.decode(data, type=Any)
        return _unpack(raw, named or (lambda constant: constant), 0)
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise FormatError(f"{path}: not an encoded value: {error}") from None


def _pack(value: object, path: str, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise StateError(f"{path}: nested deeper than {MAX_DEPTH}: a reference to itself?")
    kind = type(value)
    if value is None or kind in (bool, str, bytes, float):
        return value
    if kind is int:
        assert isinstance(value, int)
        if value.bit_length() > _MAX_BITS:
            raise StateError(f"{path}: an integer of {value.bit_length()} bits: save it as bytes")
        return value if -(2**63) <= value < 2**63 else ["int", str(value)]
    if kind is complex:
        assert isinstance(value, complex)
        return ["complex", value.real, value.imag]
    if kind is bytearray:
        assert isinstance(value, bytearray)
        return ["bytearray", bytes(value)]
    if kind in (list, tuple):
        assert isinstance(value, list | tuple)
        return [
            kind.__name__,
            [_pack(item, f"{path}/{i}", depth + 1) for i, item in enumerate(value)],
        ]
    if kind in (set, frozenset):
        assert isinstance(value, set | frozenset)
        packed = [_pack(item, path, depth + 1) for item in value]
        return [kind.__name__, sorted(packed, key=msgspec.msgpack.encode)]
    if kind in (dict, OrderedDict):
        assert isinstance(value, dict)
        pairs = [
            [_pack(k, path, depth + 1), _pack(v, f"{path}/{k}", depth + 1)]
            for k, v in value.items()
        ]
        return ["dict" if kind is dict else "odict", pairs]
    full = f"{kind.__module__}.{kind.__qualname__}"
    if full == "torch.Size":
        return ["named", full, ",".join(map(str, value))]  # type: ignore[call-overload]
    if full in _NAMED_KINDS:
        return ["named", full, str(value)]
    raise StateError(
        f"{path}: a value of type {full} cannot be saved; give an object with state_dict(), "
        "a tensor, a numpy array, or plain values"
    )


def _unpack(raw: Any, named: Callable[[Named], Any], depth: int) -> Any:
    if depth > 4 * MAX_DEPTH:
        raise ValueError("nested too deeply")
    if not isinstance(raw, list):
        if raw is not None and type(raw) not in (bool, int, float, str, bytes):
            raise ValueError(f"a bare {type(raw).__name__} has no place here")
        return raw
    tag = raw[0]
    if tag == "int":
        if len(raw[1]) > _MAX_DIGITS:
            raise ValueError("integer too long")
        return int(raw[1])
    if tag == "complex":
        return complex(raw[1], raw[2])
    if tag == "bytearray":
        if type(raw[1]) is not bytes:
            raise ValueError("a bytearray is not of bytes")
        return bytearray(raw[1])
    if tag in ("list", "tuple", "set", "frozenset"):
        items = [_unpack(item, named, depth + 1) for item in raw[1]]
        maker: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "list": list}
        return maker[tag](items)
    if tag in ("dict", "odict"):
        pairs = [(_unpack(k, named, depth + 1), _unpack(v, named, depth + 1)) for k, v in raw[1]]
        return dict(pairs) if tag == "dict" else OrderedDict(pairs)
    if tag == "named" and raw[1] in _NAMED_KINDS:
        return named(Named(raw[1], str(raw[2])))
    raise ValueError(f"unknown tag {tag!r}")
