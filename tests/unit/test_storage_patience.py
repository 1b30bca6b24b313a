"""How long a passing failure is put up with, under a clock that only moves when told to."""

from __future__ import annotations

import pytest

from forebay.errors import ConflictError, DeniedError, FullError, StoreError
from forebay.storage.patience import FIRST_WAIT_S, Patience


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def waits(patience: Patience, clock: Clock) -> list[float]:
    found = []
    while (wait_s := patience.next_wait_s()) is not None:
        found.append(wait_s)
        clock.now_s += wait_s
    return found


def test_waits_double_up_to_the_longest_and_end_at_the_deadline(clock: Clock) -> None:
    found = waits(Patience(100.0, longest_s=10.0, clock=clock, draw=lambda: 1.0), clock)
    assert found[:8] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0])
    assert max(found) == 10.0
    assert sum(found) == pytest.approx(100.0)


def test_waits_are_drawn_between_half_and_all(clock: Clock) -> None:
    for drawn, expected in ((0.0, FIRST_WAIT_S / 2), (1.0, FIRST_WAIT_S)):
        assert Patience(9.0, clock=clock, draw=lambda d=drawn: d).next_wait_s() == expected


def test_progress_moves_the_deadline_and_shortens_the_waits(clock: Clock) -> None:
    patience = Patience(10.0, clock=clock, draw=lambda: 1.0)
    for _ in range(100):
        assert patience.next_wait_s() == pytest.approx(FIRST_WAIT_S)
        clock.now_s += 9.9
        patience.progressed()
    clock.now_s += 10.0
    assert patience.next_wait_s() is None


def test_again_until_it_succeeds(clock: Clock) -> None:
    failures = [StoreError("one"), StoreError("two")]

    def call() -> str:
        if failures:
            raise failures.pop(0)
        return "done"

    assert Patience(10.0, clock=clock).again(call, clock.sleep) == "done"
    assert clock.now_s > 0


def test_again_raises_the_last_failure_at_the_deadline(clock: Clock) -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        raise StoreError(f"try {count}")

    with pytest.raises(StoreError) as caught:
        Patience(5.0, clock=clock).again(call, clock.sleep)
    assert count > 3
    assert str(caught.value) == f"try {count}"
    assert clock.now_s == pytest.approx(5.0)


@pytest.mark.parametrize("error", [DeniedError("no"), FullError("no"), ConflictError("no")])
def test_what_does_not_pass_is_not_tried_again(clock: Clock, error: Exception) -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        Patience(5.0, clock=clock).again(call, clock.sleep)
    assert calls == [1]


def test_one_try_that_takes_all_the_time_is_not_the_last() -> None:
    now = 0.0

    def hangs() -> str:
        nonlocal now
        now += 60.0
        raise StoreError("no answer")

    calls = iter([hangs, lambda: "there", hangs, hangs, hangs])
    patience = Patience(60.0, least_tries=2, clock=lambda: now)
    assert patience.again(lambda: next(calls)(), sleep=lambda _: None) == "there"
    patience.progressed()
    with pytest.raises(StoreError):
        patience.again(lambda: next(calls)(), sleep=lambda _: None)
    assert next(calls) is hangs
