"""What people write is parsed; what they read is short; the two agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.units import (
    parse_bytes,
    parse_rate,
    parse_seconds,
    show_bytes,
    show_rate,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("64MiB", 64 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("1.5gb", 1_500_000_000),
        (" 2 k ", 2000),
        ("3TiB", 3 * 2**40),
        (".5kB", 500),
        ("1e3B", 1000),
        ("2P", 2 * 10**15),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30min", 1800), ("3.09h", 11124), ("2", 2), ("250 ms", 0.25), ("1d", 86400), ("5M", 300)],
)
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


def test_rates() -> None:
    assert parse_rate("55GB/s") == 55e9
    assert parse_rate(" 1 MiB / s ") == 2**20


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 XB", "1,5GB", "nan", "inf", "1GB/s", "0x10"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="size: "):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "min", "-1s", "1 week", "1:30", "nan"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="duration: "):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["55GB", "55GB/h", "GB/s", "/s", "", "1/2/s"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rate(text)


@pytest.mark.parametrize("text", ["1e400", "1e400GB"])
def test_more_than_a_float_holds_is_refused(text: str) -> None:
    for parse in (parse_bytes, parse_seconds):
        with pytest.raises(UsageError):
            parse(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (6_480_000_000_000, "6.48 TB"),
        (12_345_678, "12.3 MB"),
    ],
)
def test_shown_bytes(count: int, text: str) -> None:
    assert show_bytes(count) == text
    assert show_rate(count) == f"{text}/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.012, "12 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (3.2, "3.2 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h"),
        (3900, "1 h 05 min"),
    ],
)
def test_shown_seconds(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@given(st.integers(0, 10**15))
def test_shown_bytes_parse_back_to_three_figures(count: int) -> None:
    assert parse_bytes(show_bytes(count)) == pytest.approx(count, rel=0.0051)
