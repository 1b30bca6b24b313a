"""The exact form against its closed case, a simulation, and the classics."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.plan.losses import (
    Level,
    at_cadence,
    best_cadence_s,
    daly_s,
    exact_goodput,
    first_order,
    goodput,
    young_s,
)

MTBF_S = 11124.0


def level(
    cadence_s: float, share: float = 1.0, lag_s: float = 0.0, restart_s: float = 300.0
) -> Level:
    return Level(share=share, cadence_s=cadence_s, lag_s=lag_s, restart_s=restart_s)


def played(levels: list[Level], pause_s: float, mtbf_s: float, segments: int, seed: int) -> float:
    """Goodput of one run, failure by failure, with nothing but the rules."""
    draw = random.Random(seed)
    periods = [round(each.cadence_s / levels[0].cadence_s) for each in levels]
    shares = [each.share for each in levels]
    segment_s = levels[0].cadence_s + pause_s
    now_s, done = 0.0, 0
    fails_s = draw.expovariate(1 / mtbf_s)
    while done < segments:
        if fails_s >= now_s + segment_s:
            now_s, done = now_s + segment_s, done + 1
            continue
        now_s, kind = fails_s, draw.choices(range(len(levels)), shares)[0]
        fails_s = now_s + draw.expovariate(1 / mtbf_s)
        while fails_s < now_s + levels[kind].restart_s + levels[kind].lag_s:
            now_s, kind = fails_s, max(kind, draw.choices(range(len(levels)), shares)[0])
            fails_s = now_s + draw.expovariate(1 / mtbf_s)
        now_s += levels[kind].restart_s + levels[kind].lag_s
        done = done // periods[kind] * periods[kind]
    return done * levels[0].cadence_s / now_s


@pytest.mark.parametrize(
    ("pause_s", "restart_s", "published"),
    [(1, 300, 0.896), (6.3, 300, 0.894), (20, 300, 0.886), (60, 300, 0.866)],
)
def test_one_kind_of_failure_is_the_exact_segment_formula(
    pause_s: float, restart_s: float, published: float
) -> None:
    found = exact_goodput(useful_s=1800, pause_s=pause_s, mtbf_s=MTBF_S, restart_s=restart_s)
    assert found == pytest.approx(published, abs=0.001)
    mine = goodput([level(1800, restart_s=restart_s)], pause_s=pause_s, mtbf_s=MTBF_S)
    assert mine == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(
    "levels",
    [
        [level(600)],
        [level(60, 0.7), level(1800, 0.3, lag_s=259)],
        [level(60, 0.6), level(300, 0.3, lag_s=30), level(1800, 0.1, lag_s=259, restart_s=800)],
    ],
    ids=["one", "two", "three"],
)
def test_several_kinds_are_what_a_simulation_finds(levels: list[Level]) -> None:
    exact = goodput(levels, pause_s=5, mtbf_s=3000)
    runs = [
        played(levels, 5, 3000, 60_000 if len(levels) > 1 else 6_000, seed) for seed in range(8)
    ]
    mean = sum(runs) / len(runs)
    error = (sum((run - mean) ** 2 for run in runs) / (len(runs) - 1) / len(runs)) ** 0.5
    assert abs(mean - exact) < 4 * error + 1e-4
    assert error < 0.005


def test_kinds_that_are_alike_are_one() -> None:
    whole = goodput([level(1800)], pause_s=1, mtbf_s=MTBF_S)
    halves = [level(1800, 0.5), level(1800, 0.5)]
    assert goodput(halves, pause_s=1, mtbf_s=MTBF_S) == pytest.approx(whole, rel=1e-12)


def test_first_order_is_the_limit_of_few_failures() -> None:
    levels = [level(60, 0.9), level(600, 0.1, lag_s=100)]
    rework, restart = first_order(levels, mtbf_s=1e7)
    exact = 1 - goodput(levels, pause_s=1e-9, mtbf_s=1e7)
    assert exact == pytest.approx(rework + restart, rel=0.001)


@given(
    cadence_s=st.floats(1, 1e5),
    factor=st.floats(1, 100),
    pause_s=st.floats(1e-3, 1e3),
    mtbf_s=st.floats(10, 1e7),
    share=st.floats(0, 1),
    restart_s=st.floats(0.1, 1e5),
    lag_s=st.floats(0, 1e5),
)
def test_goodput_is_a_part_and_falls_with_every_trouble(
    cadence_s: float,
    factor: float,
    pause_s: float,
    mtbf_s: float,
    share: float,
    restart_s: float,
    lag_s: float,
) -> None:
    near = level(cadence_s, 1 - share, restart_s=restart_s)
    far = level(cadence_s * factor, share, lag_s=lag_s, restart_s=restart_s)
    found = goodput([near, far], pause_s=pause_s, mtbf_s=mtbf_s)
    assert 0 <= found <= cadence_s / (cadence_s + pause_s) + 1e-12
    slack = 1e-9
    assert goodput([near, far], pause_s=2 * pause_s, mtbf_s=mtbf_s) <= found + slack
    assert goodput([near, far], pause_s=pause_s, mtbf_s=2 * mtbf_s) >= found - slack
    slower = level(cadence_s * factor, share, lag_s=2 * lag_s + 1, restart_s=restart_s)
    assert goodput([near, slower], pause_s=pause_s, mtbf_s=mtbf_s) <= found + slack


@pytest.mark.parametrize(
    ("pause_s", "young_min"), [(64.8, 20.0), (12.96, 9.0), (6.48, 6.3), (1, 2.5), (0.6, 1.9)]
)
def test_young(pause_s: float, young_min: float) -> None:
    assert young_s(pause_s, MTBF_S) / 60 == pytest.approx(young_min, abs=0.06)


def test_daly_is_close_to_the_exact_best() -> None:
    for pause_s in (0.1, 1.0, 10.0, 100.0):
        exact = best_cadence_s([level(1800)], pause_s=pause_s, mtbf_s=MTBF_S)
        assert daly_s(pause_s, MTBF_S) == pytest.approx(exact, rel=0.002)
    assert daly_s(2 * MTBF_S, MTBF_S) == MTBF_S


def test_the_best_cadence_is_better_than_its_neighbours() -> None:
    levels = (
        level(1800, 0.9),
        Level(share=0.1, cadence_s=3600, lag_s=60, restart_s=300, near=False),
    )
    best_s = best_cadence_s(levels, pause_s=2, mtbf_s=MTBF_S)

    def good(cadence_s: float) -> float:
        return goodput(at_cadence(levels, cadence_s), pause_s=2, mtbf_s=MTBF_S)

    assert good(best_s) >= max(good(best_s * 0.9), good(best_s * 1.1))
    assert [each.cadence_s for each in at_cadence(levels, 60)] == [60, 3600]
    assert [each.cadence_s for each in at_cadence(levels, 7200)] == [7200, 7200]


def test_a_run_that_never_gets_there_has_no_goodput() -> None:
    assert goodput([level(1e6)], pause_s=1, mtbf_s=60) == 0
    assert exact_goodput(useful_s=1e6, pause_s=1, mtbf_s=60, restart_s=1) == 0
