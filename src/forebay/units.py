"""Bytes, seconds and rates: parse what people write, print what people read. SI throughout."""

from __future__ import annotations

import math
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
    "days": 86400.0,
}
_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}
_COUNT |= {"million": 1e6, "billion": 1e9, "trillion": 1e12}
_THOUSANDS = re.compile(r"(?<=[0-9])[,_](?=[0-9]{3}(?![0-9]))")
_DURATION = re.compile(r"[0-9.]+\s*[A-Za-z]+\s*")  # one of several, as in 4 min 19 s
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
    """``'30min'``, ``'3.09h'`` or ``'4 min 19 s'`` -> seconds; a bare number is seconds.

    Raises UsageError.
    """
    several = _DURATION.findall(text)
    if _NUMBER.fullmatch(text) is None and len(several) > 1 and "".join(several) == text.strip():
        return sum(map(parse_seconds, several))
    number, unit = _split(text, "duration", "30min")
    scale = _SECONDS.get(unit.lower() or "s")
    if scale is None:
        raise UsageError(f"duration: unknown unit {unit!r} in {text!r}, expected s, min, h, d")
    return number * scale


def parse_rate(text: str) -> float:
    """``'55GB/s'`` or ``'400Gbit/s'`` -> bytes per second. Raises UsageError."""
    size, slash, per = text.strip().rpartition("/")
    if not slash or per.strip().lower() != "s":
        raise UsageError(f"rate: expected bytes per second such as 55GB/s, found {text!r}")
    size = size.strip()
    if size.lower().endswith("bit"):
        return parse_bytes(size[:-3]) / 8
    if size.endswith("b"):  # of a link it means bits, of a disk bytes
        unit = size.lstrip("0123456789. ")
        raise UsageError(
            f"rate: {unit}/s in {text!r} may mean bits or bytes: write {unit[:-1].upper()}bit/s or "
            f"{unit.upper()}/s"
        )
    return float(parse_bytes(size))


def parse_count(text: str) -> float:
    """``'405e9'``, ``'405B'`` (billions), ``'15.6T'`` -> a number of things. Raises UsageError."""
    number, unit = _split(_THOUSANDS.sub("", text), "count", "405e9 or 405B")
    scale = _COUNT.get(unit.lower())
    if scale is None:
        raise UsageError(f"count: unknown unit {unit!r} in {text!r}, expected k, M, B or T")
    return number * scale


def parse_flops(text: str) -> float:
    """``'989TFLOPS'`` or ``'989e12'`` -> floating-point operations a second. Raises UsageError."""
    bare = re.sub(r"(?i)\s*(flop/s|flops?)\s*$", "", text.strip())
    return parse_count(bare)


def parse_fraction(text: str) -> float:
    """``'3%'`` or ``'0.03'`` -> a part of one, 0 to 1. Raises UsageError."""
    bare = text.strip()
    number, unit = _split(bare.removesuffix("%"), "fraction", "3% or 0.03")
    part = number / 100 if bare.endswith("%") else number
    if unit or part > 1:
        raise UsageError(f"fraction: expected 0 to 1, or 0% to 100%, found {text!r}")
    return part


def show_bytes(count: float) -> str:
    """Bytes with an SI unit and three significant figures: ``'6.48 TB'``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB"):
        if abs(value) < 999.5 or unit == "ZB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def show_seconds(seconds: float) -> str:
    """Seconds in the unit a person would choose: ``'12 ms'``, ``'30 min'``, ``'1 h 05 min'``."""
    if math.isinf(seconds):
        return "never"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 100:
        return f"{hours} h {minutes:02d} min" if minutes else f"{hours} h"
    return f"{seconds / 86400:.3g} days"


def show_rate(bytes_per_s: float) -> str:
    """Bytes per second with an SI unit: ``'3.6 GB/s'``."""
    return f"{show_bytes(bytes_per_s)}/s"


def show_count(count: float) -> str:
    """A number of things: whole below a million, then ``'405 billion'``, ``'15.6 trillion'``."""
    value = float(count)
    if math.isinf(value):
        return "without end"
    if abs(value) < 999_999.5:
        return f"{value:,.0f}" if value == round(value) else f"{value:,.3g}"
    for word in ("million", "billion", "trillion"):
        value /= 1e6 if word == "million" else 1e3
        if abs(value) < 999.5 or word == "trillion":
            return f"{value:.4g} {word}"
    raise AssertionError("unreachable")


def show_flops(flops: float) -> str:
    """Floating-point operations per second: ``'989 TFLOP/s'``."""
    for scale, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if flops >= scale and (unit != "P" or flops >= 1e16):
            return f"{flops / scale:.4g} {unit}FLOP/s"
    return f"{flops:.4g} FLOP/s"


def show_fraction(part: float) -> str:
    """A part of one in per cent with three figures, as ``'3.6 %'``; below a millionth ``'0 %'``."""
    return "0 %" if abs(part) < 1e-6 else f"{part * 100:.3g} %"
