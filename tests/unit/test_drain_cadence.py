"""Which snapshots go to the durable tier by time: one word for all nodes, whatever their clocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay.drain.cadence import Cadence
from forebay.errors import DeadlineError
from forebay.storage.memory import MemoryStore


def made(
    store: MemoryStore,
    node: int = 0,
    every_s: float | None = 60.0,
    nap: Callable[[float], None] = lambda _: None,
    clock: Callable[[], float] = lambda: 0.0,
) -> Cadence:
    return Cadence(store, node=node, every_s=every_s, limit_s=10.0, nap=nap, clock=clock)


def test_by_count_everything_here_is_durable() -> None:
    store = MemoryStore()
    assert all(made(store, every_s=None).durable(step, "a", 0.0, 2) for step in range(5))
    assert list(store.list("")) == []


def test_one_in_a_minute() -> None:
    cadence = made(MemoryStore())
    told = [cadence.durable(step, "a", 1000.0 + 25 * step, 1) for step in range(8)]
    assert told == [True, False, False, True, False, False, True, False]


def test_a_clock_that_is_set_holds_nothing_up() -> None:
    cadence = made(MemoryStore())
    clock_s = [9000.0, 9050.0, 1000.0, 1030.0, 1060.0, 90_000.0, 1070.0, 1120.0, 1130.0]
    told = [cadence.durable(step, "a", at_s, 1) for step, at_s in enumerate(clock_s)]
    assert told == [True, False, True, False, True, True, True, False, True]


def test_other_nodes_go_by_the_word_of_node_0() -> None:
    """Their own times, far apart, do not matter."""
    store = MemoryStore()
    first, second = made(store), made(store, node=1)
    for step in range(12):
        word = first.durable(step, "a", 25.0 * step, 2)
        assert second.durable(step, "a", 9000.0 * step, 2) is word
    assert len(list(store.list("cadence/"))) <= 9, "old words are deleted"


def test_a_node_waits_for_the_word() -> None:
    store = MemoryStore()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            made(store).durable(1, "a", 0.0, 2)

    assert made(store, node=1, nap=nap).durable(1, "a", 0.0, 2) is True
    assert len(naps) == 3


def test_a_node_does_not_wait_for_ever() -> None:
    now_s = [0.0]

    def nap(seconds: float) -> None:
        now_s[0] += seconds

    cadence = made(MemoryStore(), node=1, nap=nap, clock=lambda: now_s[0])
    with pytest.raises(DeadlineError, match="step 7: node 0 has not said within 10 s"):
        cadence.durable(7, "a", 0.0, 2)
    assert now_s[0] < 13


def test_the_next_agent_repeats_what_was_said() -> None:
    store = MemoryStore()
    first = made(store)
    assert first.durable(1, "a", 0.0, 2) is True
    assert first.durable(2, "a", 30.0, 2) is False
    again = made(store)
    assert again.durable(2, "a", 30.0, 2) is False
    assert again.durable(1, "a", 0.0, 2) is True
    assert again.durable(3, "a", 59.0, 2) is False
    assert again.durable(4, "a", 61.0, 2) is True
