"""What people write is parsed; what they read is short; the two agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.plan.figure import Kind
from forebay.units import (
    parse_bytes,
    parse_count,
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


@pytest.mark.parametrize(
    "seconds", [0.0123, 1.0, 59.4, 119.9, 259.2, 3600.0, 11124.0, 359_000.0, 5e6]
)
@pytest.mark.parametrize("up", [True, False])
def test_a_bound_keeps_what_it_says(seconds: float, up: bool) -> None:
    said = parse_seconds(Kind.SECONDS.bound(seconds, up=up))
    assert said >= seconds * (1 - 1e-9) if up else said <= seconds * (1 + 1e-9)
    assert said == pytest.approx(seconds, rel=0.011)


def test_what_is_shown_can_be_given() -> None:
    assert parse_seconds("4 min 19 s") == 259
    assert parse_seconds("1 h 05 min") == 3900
    assert parse_seconds("12.9 days") == pytest.approx(12.9 * 86400)
    assert parse_seconds("1e3s") == 1000
    assert parse_count("1,408") == 1408
    assert parse_count("2.812 trillion") == 2.812e12
    assert Kind.RATE.bound(10_711_142.3, up=True) == "10.8 MB/s"
    assert Kind.RATE.bound(360e9 + 1e-4, up=True) == "360 GB/s"
    assert Kind.WHOLE.bound(1408, up=True) == "1,408"


@pytest.mark.parametrize("text", ["4 min foo", "4 min 19", "1,40", "19 s min"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError):
        parse_seconds(text)
