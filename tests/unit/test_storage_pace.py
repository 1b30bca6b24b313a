"""The byte budget, under a clock that only moves when somebody sleeps."""

from __future__ import annotations

import threading

import pytest

from forebay.errors import UsageError
from forebay.storage.pace import LARGEST_GRAIN_BYTES, Pace, start_delay_s

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
    assert 4096 <= grain <= LARGEST_GRAIN_BYTES


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(UsageError, match="pace: expected more than 0"):
        Pace(rate)


def test_requests_have_a_budget_of_their_own(clock: Clock) -> None:
    pace = Pace(None, 100.0, clock=clock, sleep=clock.sleep)
    for _ in range(500):
        pace.ask()
    assert clock.now_s - 100.0 == pytest.approx((500 - 1) / 100)
    pace.take(10**12)
    assert clock.now_s - 100.0 == pytest.approx((500 - 1) / 100)


def test_a_push_back_halves_the_rate_and_it_comes_back_gently(pace: Pace, clock: Clock) -> None:
    assert pace.share == 1.0
    assert pace.pushed_back()
    assert pace.share == 0.5
    assert pace.bytes_per_s == pytest.approx(RATE / 2)
    assert not pace.pushed_back(), "what many requests are told at once is one event"
    assert pace.share == 0.5
    clock.now_s += 1.0
    assert pace.share == pytest.approx(0.55)
    assert pace.pushed_back()
    assert pace.share == pytest.approx(0.275)
    clock.now_s += 100.0
    assert pace.share == 1.0


def test_a_push_back_slows_what_is_sent(pace: Pace, clock: Clock) -> None:
    pace.pushed_back()
    pace.take(pace.grain_bytes)
    before_s = clock.now_s
    pace.take(RATE // 4)
    assert clock.now_s - before_s == pytest.approx(0.5)


def test_the_share_has_a_floor_and_bounds_the_lanes(pace: Pace, clock: Clock) -> None:
    assert pace.lanes(8) == 8
    for _ in range(20):
        clock.now_s += 1.0
        pace.pushed_back()
    assert pace.share == pytest.approx(1 / 16)
    assert pace.lanes(8) == 1
    clock.now_s += 8.75
    assert pace.lanes(8) == 4


def test_late_replies_are_a_push_back(pace: Pace, clock: Clock) -> None:
    for _ in range(50):
        clock.now_s += 0.1
        assert not pace.replied(0.1)
    assert not pace.replied(0.9), "under a second is never late"
    clock.now_s += 2
    assert pace.replied(5.0)
    assert pace.share == 0.5


def test_a_store_that_is_always_slow_is_not_late(pace: Pace, clock: Clock) -> None:
    for _ in range(50):
        clock.now_s += 2.0
        assert not pace.replied(3.0)
    assert pace.share == 1.0


def test_nodes_begin_at_times_of_their_own() -> None:
    """2,048 nodes over 10 s: no tenth of a second sees more than three times its share."""
    delays_s = [start_delay_s(f"run node {node}", 10.0) for node in range(2048)]
    assert all(0 <= delay_s < 10.0 for delay_s in delays_s)
    assert delays_s == [start_delay_s(f"run node {node}", 10.0) for node in range(2048)]
    tenths = [0] * 100
    for delay_s in delays_s:
        tenths[int(delay_s * 10)] += 1
    assert max(tenths) < 3 * 20.48
    assert min(tenths) > 0
    assert start_delay_s("any", 0.0) == 0.0
