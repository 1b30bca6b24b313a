"""The byte budget, under a clock that only moves when somebody sleeps."""

from __future__ import annotations

import threading

import pytest

from forebay.errors import UsageError
from forebay.storage.pace import LARGEST_GRAIN_BYTES, Pace

RATE = 64 * 2**20


class Clock:
    """Seconds; sleeping moves them."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    return Pace(RATE, clock=clock, sleep=clock.sleep)


def test_no_limit_never_sleeps(clock: Clock) -> None:
    pace = Pace(None, clock=clock, sleep=clock.sleep)
    for _ in range(10):
        pace.take(10**12)
    assert clock.slept_s == []
    assert pace.grain_bytes == LARGEST_GRAIN_BYTES


def test_the_first_grain_is_free(pace: Pace, clock: Clock) -> None:
    pace.take(pace.grain_bytes)
    assert clock.slept_s == []
    pace.take(RATE)
    assert clock.slept_s == [pytest.approx(1.0)]


def test_the_rate_holds_over_time(pace: Pace, clock: Clock) -> None:
    count = 1000
    for _ in range(count):
        pace.take(2**20)
    expected_s = (count * 2**20 - pace.grain_bytes) / RATE
    assert clock.now_s - 100.0 == pytest.approx(expected_s)


def test_no_window_sees_more_than_its_share_and_a_grain(pace: Pace, clock: Clock) -> None:
    passed: list[tuple[float, int]] = []
    for _ in range(200):
        pace.take(pace.grain_bytes)
        passed.append((clock.now_s, pace.grain_bytes))
    for start_s, _ in passed:
        inside = sum(nbytes for at_s, nbytes in passed if start_s <= at_s < start_s + 1.0)
        assert inside <= RATE + pace.grain_bytes


def test_idle_time_is_saved_only_up_to_the_grain(pace: Pace, clock: Clock) -> None:
    clock.now_s += 3600
    pace.take(RATE)
    assert clock.slept_s == [pytest.approx((RATE - pace.grain_bytes) / RATE)]


def test_more_than_the_grain_waits_for_all_of_it(pace: Pace, clock: Clock) -> None:
    pace.take(10 * RATE)
    assert sum(clock.slept_s) == pytest.approx(10 - pace.grain_bytes / RATE)


def test_threads_share_one_budget() -> None:
    """The clock stands still, so that the debt shows every byte that any thread took."""
    slept_s: list[float] = []
    pace = Pace(RATE, clock=lambda: 0.0, sleep=slept_s.append)
    threads = [
        threading.Thread(target=lambda: [pace.take(2**20) for _ in range(100)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert max(slept_s) == pytest.approx((800 * 2**20 - pace.grain_bytes) / RATE)


@pytest.mark.parametrize("rate", [1.0, 1e4, 1e6, 1e7, 1e9, 1e12])
def test_a_grain_is_whole_pages_and_bounded(rate: float) -> None:
    grain = Pace(rate).grain_bytes
    assert grain % 4096 == 0
    assert 64 * 2**10 <= grain <= LARGEST_GRAIN_BYTES


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(UsageError, match="pace: expected more than 0"):
        Pace(rate)
