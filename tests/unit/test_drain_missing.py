"""Which snapshots are given up, and when."""

from __future__ import annotations

from forebay.drain.missing import GRACE_S, Missing
from forebay.format.messages import Phase
from tests.unit.test_drain_job import part, snapshot


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_dead_rank_that_staged_nothing_ends_the_wait_after_the_grace() -> None:
    alive, clock = {0, 1}, Clock()
    missing = Missing(lambda rank, _: rank in alive, clock)
    waiting = snapshot(part(0))
    assert missing.look([waiting]) == []
    clock.now_s += 1000.0
    assert missing.look([waiting]) == []
    alive.discard(1)
    assert missing.look([waiting]) == []
    clock.now_s += GRACE_S + 0.1
    assert missing.look([waiting]) == [(waiting, "ranks 1 ended before they had staged it")]


def test_a_rank_that_staged_in_the_grace_is_not_missing() -> None:
    clock = Clock()
    missing = Missing(lambda *_: False, clock)
    waiting = snapshot(part(0))
    assert missing.look([waiting]) == []
    waiting.parts[1] = part(1)
    clock.now_s += GRACE_S + 0.1
    assert missing.look([waiting]) == []


def test_a_rank_back_within_the_grace_starts_it_anew() -> None:
    alive: set[int] = set()
    clock = Clock()
    missing = Missing(lambda rank, _: rank in alive, clock)
    waiting = snapshot(part(0))
    missing.look([waiting])
    alive |= {0, 1}
    clock.now_s += GRACE_S + 0.1
    assert missing.look([waiting]) == []
    alive.clear()
    assert missing.look([waiting]) == []


def test_a_living_rank_that_went_past_is_missing_for_good() -> None:
    clock = Clock()
    missing = Missing(lambda *_: True, clock)
    waiting = snapshot(part(0, step=1, staged_s=1.0), step=1)
    later = snapshot(part(0, step=2, staged_s=2.0), part(1, step=2, staged_s=2.0), step=2)
    later.phase = Phase.COMMITTED
    assert missing.look([waiting, later]) == []
    clock.now_s += GRACE_S + 0.1
    given_up = missing.look([waiting, later])
    assert given_up == [(waiting, "ranks 1 staged later steps and not this one")]


def test_an_attempt_is_orphaned_once_none_of_its_ranks_lives() -> None:
    alive, clock = {0}, Clock()
    missing = Missing(lambda rank, attempt: rank in alive and attempt == "a", clock)
    whole = snapshot(part(0), part(1), attempt="a.2")
    missing.look([whole])
    assert missing.orphaned_s("a") is None
    alive.clear()
    missing.look([whole])
    clock.now_s += 5.0
    missing.look([whole])
    assert missing.orphaned_s("a") == 100.0
