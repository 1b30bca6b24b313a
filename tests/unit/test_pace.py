"""The pace, by a clock that moves only when something sleeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.storage.pace import LARGEST_GRAIN_BYTES, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def paced(rate: float | None) -> tuple[Pace, Clock]:
    clock = Clock()
    return Pace(rate, clock=clock.time, sleep=clock.sleep), clock


def test_without_a_rate_nothing_waits() -> None:
    pace, clock = paced(None)
    for _ in range(10):
        pace.take(10**12)
    assert clock.now == 100.0
    assert pace.grain_bytes == LARGEST_GRAIN_BYTES


def test_a_burst_goes_at_once_and_the_rest_at_the_rate() -> None:
    pace, clock = paced(10e6)
    pace.take(pace.grain_bytes)
    assert clock.now == 100.0
    pace.take(10**7)
    assert clock.now == pytest.approx(101.0)


def test_idle_time_saves_up_one_burst_and_no_more() -> None:
    pace, clock = paced(10e6)
    clock.now += 3600
    pace.take(pace.grain_bytes)
    assert clock.now == 3700.0
    pace.take(10**6)
    assert clock.now == pytest.approx(3700.1)


@given(
    st.floats(1e3, 1e10),
    st.lists(st.tuples(st.integers(0, 10**8), st.floats(0, 2)), min_size=1, max_size=50),
)
def test_never_more_than_the_rate_and_one_burst(
    rate: float, takes: list[tuple[int, float]]
) -> None:
    pace, clock = paced(rate)
    gone = 0
    for nbytes, idle in takes:
        clock.now += idle
        pace.take(nbytes)
        gone += nbytes
        allowed = pace.grain_bytes + (clock.now - 100.0) * rate
        assert gone <= allowed * (1 + 1e-6) + 1


@given(st.floats(1, 1e12))
def test_grains_are_whole_pages_within_bounds(rate: float) -> None:
    grain = Pace(rate).grain_bytes
    assert 64 * 2**10 <= grain <= LARGEST_GRAIN_BYTES
    assert grain % 4096 == 0
    assert grain <= max(64 * 2**10, rate / 10)
