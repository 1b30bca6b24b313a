"""Bytes, seconds and rates: parse what people write, print what people read. SI throughout."""

from __future__ import annotations

import re

from forebay.errors import UsageError

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_SECONDS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_LARGEST = 1e100
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-z/]*)\s*")


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise UsageError(f"{what}: expected a number with a unit such as {example}, found {text!r}")
    number = float(found[1])
    if number > _LARGEST:
        raise UsageError(f"{what}: {text!r} is too large")
    return number, found[2]


def parse_bytes(text: str) -> int:
    """``'64MiB'`` or ``'1.5 GB'`` -> bytes. Decimal units are SI. Raises UsageError."""
    number, unit = _split(text, "size", "64MiB")
    name = unit.lower()
    name = name.removesuffix("b")
    scale = _DECIMAL.get(name) or _BINARY.get(name)
    if scale is None:
        raise UsageError(f"size: unknown unit {unit!r} in {text!r}, expected B, kB, MB, GiB ...")
    return round(number * scale)


def parse_seconds(text: str) -> float:
    """``'30min'`` or ``'3.09h'`` -> seconds; a bare number is seconds. Raises UsageError."""
    number, unit = _split(text, "duration", "30min")
    scale = _SECONDS.get(unit.lower() or "s")
    if scale is None:
        raise UsageError(f"duration: unknown unit {unit!r} in {text!r}, expected s, min, h, d")
    return number * scale


def parse_rate(text: str) -> float:
    """``'55GB/s'`` -> bytes per second. Raises UsageError."""
    size, slash, per = text.strip().rpartition("/")
    if not slash or per.strip().lower() != "s":
        raise UsageError(f"rate: expected bytes per second such as 55GB/s, found {text!r}")
    return float(parse_bytes(size))


def show_bytes(count: float) -> str:
    """Bytes with an SI unit and three significant figures: ``'6.48 TB'``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def show_seconds(seconds: float) -> str:
    """Seconds in the unit a person would choose: ``'12 ms'``, ``'3.2 s'``, ``'1 h 05 min'``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def show_rate(bytes_per_s: float) -> str:
    """Bytes per second with an SI unit: ``'3.6 GB/s'``."""
    return f"{show_bytes(bytes_per_s)}/s"
