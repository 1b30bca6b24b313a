"""A figure of the plan: its kind, which says how it is written, and where it comes from."""

from __future__ import annotations

import enum
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forebay.errors import UsageError
from forebay.units import (
    parse_bytes,
    parse_count,
    parse_flops,
    parse_fraction,
    parse_rate,
    parse_seconds,
    show_bytes,
    show_count,
    show_flops,
    show_fraction,
    show_rate,
    show_seconds,
)

Value = float | int | str | bool
"""What a figure may be; None beside it where it may be left out."""

_NEGATIVE = re.compile(r"\s*-\s*[0-9.]")
_LEAST, _MOST = 1e-12, 1e24
_LONGEST_TEXT = 1000
_MOST_BITS = 1000
_YES, _NO = {"yes", "true", "on"}, {"no", "false", "off"}


class Kind(enum.Enum):
    """How a figure is written; the value is its unit in JSON, empty for a bare number."""

    BYTES = "B"
    RATE = "B/s"
    SECONDS = "s"
    FLOPS = "FLOP/s"
    PER_S = "1/s"
    FRACTION = "of 1"
    COUNT = "count"
    WHOLE = "whole"
    NUMBER = "number"
    TEXT = "text"
    YES_NO = "yes/no"

    def parse(self, text: str) -> Value:
        """What ``text`` says. Raises UsageError with what was expected."""
        match self:
            case Kind.BYTES:
                return parse_bytes(text)
            case Kind.RATE:
                return parse_rate(text)
            case Kind.SECONDS:
                return parse_seconds(text)
            case Kind.FLOPS:
                return parse_flops(text)
            case Kind.PER_S:
                return parse_count(text.strip().removesuffix("/s"))
            case Kind.FRACTION:
                return parse_fraction(text)
            case Kind.COUNT:
                return parse_count(text)
            case Kind.NUMBER:
                try:
                    return float(text)
                except ValueError:
                    raise UsageError(f"expected a bare number, found {text!r}") from None
            case Kind.WHOLE:
                number = parse_count(text)
                if number != round(number):
                    raise UsageError(f"expected a whole number, found {text!r}")
                return round(number)
            case Kind.YES_NO:
                word = text.strip().lower()
                if word not in _YES | _NO:
                    raise UsageError(f"expected yes or no, found {text!r}")
                return word in _YES
            case Kind.TEXT:
                return text.strip()

    def show(self, value: Value | None) -> str:
        """``value`` with its unit, for people."""
        if value is None:
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, str):
            return value
        match self:
            case Kind.BYTES:
                return show_bytes(value)
            case Kind.RATE:
                return show_rate(value)
            case Kind.SECONDS:
                return show_seconds(value)
            case Kind.FLOPS:
                return show_flops(value)
            case Kind.PER_S:
                return f"{show_count(value)}/s"
            case Kind.FRACTION:
                return show_fraction(value)
            case Kind.COUNT | Kind.WHOLE:
                return show_count(value)
            case _:
                return f"{value:g}"

    def bound(self, value: Value | None, *, up: bool) -> str:
        """``value`` as ``show``, rounded up or down: what is shown then keeps the bound."""
        if value is None or isinstance(value, bool | str) or not 0 < value < math.inf:
            return self.show(value)
        return self.show(self.rounded(value, up=up))

    def rounded(self, value: float, *, up: bool) -> float:
        """The nearest value above or below that ``show`` writes in full; ``value`` above 0."""
        unit = _DAY_S if self is Kind.SECONDS and value >= _DAYS_FROM_S else 1.0
        grain = unit * 10.0 ** (math.floor(math.log10(value / unit)) - 2)
        if self is Kind.WHOLE and value < _COUNTED:
            grain = 1.0
        elif self is Kind.SECONDS and _SECONDS_FROM_S <= value < _DAYS_FROM_S:
            grain = 1.0 if value < _MINUTES_FROM_S else 60.0
        parts = value / grain
        # what floating point adds to a round figure is no reason to pass on to the next
        whole = math.ceil(parts * (1 - 1e-12)) if up else math.floor(parts * (1 + 1e-12))
        return whole * grain


_COUNTED = 999_999.5
_DAY_S = 86400.0
_SECONDS_FROM_S, _MINUTES_FROM_S, _DAYS_FROM_S = 120.0, 3600.0, 360_000.0
"""From where `show_seconds` counts in whole seconds, whole minutes, days."""
_UNITS = {Kind.BYTES, Kind.RATE, Kind.SECONDS}


def brief(raw: object, show: Callable[[object], str] = str) -> str:
    """What a file holds, as a message may show it: never more than was written."""
    if isinstance(raw, str):
        return show(raw)
    if isinstance(raw, int) and raw.bit_length() > _MOST_BITS:
        return f"a number of {raw.bit_length()} bits"
    # a value that stands for a thousand others would be written out a thousand times
    return reprlib.repr(raw) if isinstance(raw, Mapping | list | tuple | set) else show(raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A value in SI units and the words that say where it comes from."""

    value: Value
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What may be given for one field: its name in a file, its flag, its kind and its bounds."""

    key: str
    kind: Kind
    help: str
    zero: bool = False
    """Whether nothing at all is a sensible value."""
    choices: tuple[str, ...] = ()

    def read(self, raw: object, where: str) -> Value:
        """A value as a file or a flag has it: text with a unit, or a bare number.

        Raises UsageError: one line with what, where, expected and found.
        """
        if isinstance(raw, bool):
            text = "yes" if raw else "no"
        elif isinstance(raw, int | float | str):
            text = repr(raw) if isinstance(raw, float) else brief(raw)
            if len(text) > _LONGEST_TEXT:
                raise UsageError(f"{where}: expected {self._example()}, found {text[:40]}...")
        else:
            raise UsageError(f"{where}: expected {self._example()}, found {brief(raw, repr)}")
        if self.kind not in (Kind.TEXT, Kind.YES_NO) and _NEGATIVE.match(text):
            raise UsageError(
                f"{where}: expected {'0 or more' if self.zero else 'more than 0'}, found {text}"
            )
        if self.kind in _UNITS and isinstance(raw, int | float):  # YAML reads 1:30 as 90
            raise UsageError(f"{where}: expected {self._example()}, with its unit, found {text}")
        try:
            value = self.kind.parse(text)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        if not self.zero and not isinstance(value, str | bool) and value == 0:
            raise UsageError(f"{where}: expected more than 0, found {text}")
        if not isinstance(value, str | bool) and value and not _LEAST <= value <= _MOST:
            raise UsageError(f"{where}: {text} is beyond what can be worked with")
        if self.choices and value not in self.choices:
            raise UsageError(f"{where}: expected {' or '.join(self.choices)}, found {text!r}")
        return value

    def _example(self) -> str:
        example = {
            Kind.BYTES: "a size such as 2TB",
            Kind.RATE: "a rate such as 55GB/s",
            Kind.SECONDS: "a time such as 30min",
            Kind.FLOPS: "a rate such as 989TFLOPS",
            Kind.FRACTION: "a part such as 3% or 0.03",
            Kind.YES_NO: "yes or no",
            Kind.TEXT: "a word",
        }
        return example.get(self.kind, "a number")
