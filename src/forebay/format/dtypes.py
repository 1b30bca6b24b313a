"""Element types: the name Forebay writes, the size of one element, the tag safetensors knows.

Names are torch's own without the prefix (``float32``, ``bfloat16``). A type that the safetensors
format lacks is stored as raw bytes (tag ``U8``, last dimension multiplied by the item size); the
true name stands in the record.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import FormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementType:
    """One element type: ``item_bytes`` per element, ``tag`` is None where safetensors has none."""

    name: str
    item_bytes: int
    tag: str | None
    numpy: str | None


def _table(*rows: tuple[str, int, str | None, str | None]) -> dict[str, ElementType]:
    return {
        name: ElementType(name=name, item_bytes=item, tag=tag, numpy=numpy)
        for name, item, tag, numpy in rows
    }


ELEMENT_TYPES = _table(
    ("bool", 1, "BOOL", "bool"),
    ("uint8", 1, "U8", "uint8"),
    ("int8", 1, "I8", "int8"),
    ("int16", 2, "I16", "int16"),
    ("uint16", 2, "U16", "uint16"),
    ("int32", 4, "I32", "int32"),
    ("uint32", 4, "U32", "uint32"),
    ("int64", 8, "I64", "int64"),
    ("uint64", 8, "U64", "uint64"),
    ("float16", 2, "F16", "float16"),
    ("bfloat16", 2, "BF16", None),
    ("float32", 4, "F32", "float32"),
    ("float64", 8, "F64", "float64"),
    ("float8_e4m3fn", 1, "F8_E4M3", None),
    ("float8_e5m2", 1, "F8_E5M2", None),
    ("float8_e4m3fnuz", 1, None, None),
    ("float8_e5m2fnuz", 1, None, None),
    ("float8_e8m0fnu", 1, None, None),
    ("complex32", 4, None, None),
    ("complex64", 8, None, "complex64"),
    ("complex128", 16, None, "complex128"),
)


def element_type(name: str) -> ElementType:
    """Look a type up by name. Raises FormatError for a name this version does not know."""
    try:
        return ELEMENT_TYPES[name]
    except KeyError:
        raise FormatError(
            f"dtype: unknown element type {name!r}; written by a newer version? upgrade forebay"
        ) from None
