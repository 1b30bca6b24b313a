"""The slowest of many ranks."""

from __future__ import annotations

import math
import random

import pytest

from forebay.plan.tail import mean_slowest_s, slowest_s


@pytest.mark.parametrize(("spread", "factor"), [(0.1, 1.49), (0.2, 2.21), (0.5, 7.2)])
def test_lognormal_of_16384(spread: float, factor: float) -> None:
    half = slowest_s(1.0, ranks=16384, tail="lognormal", spread=spread, quantile=0.5)
    assert half == pytest.approx(factor, rel=0.02)


def test_normal_of_16384_and_512() -> None:
    for ranks, deviations in ((16384, 3.96), (512, 3.03)):
        mean = mean_slowest_s(1.0, ranks=ranks, tail="normal", spread=0.1)
        assert (mean - 1) / 0.1 == pytest.approx(deviations, rel=0.01)


def test_exponential_of_16384() -> None:
    mean = mean_slowest_s(1.0, ranks=16384, tail="exponential", spread=1.0)
    assert mean - 1 == pytest.approx(math.log(16384) + 0.5772, rel=0.005)


@pytest.mark.parametrize("tail", ["normal", "lognormal", "exponential"])
def test_a_quantile_is_what_is_drawn(tail: str) -> None:
    draw = random.Random(7)
    one = {
        "normal": lambda: max(0.0, draw.gauss(2, 0.4)),
        "lognormal": lambda: 2 * math.exp(draw.gauss(0, 0.2)),
        "exponential": lambda: 2 + draw.expovariate(1 / 0.4),
    }[tail]
    slowest = sorted(max(one() for _ in range(64)) for _ in range(2000))
    said = slowest_s(2.0, ranks=64, tail=tail, spread=0.2, quantile=0.9)
    assert said == pytest.approx(slowest[1800], rel=0.03)


def test_no_tail_is_the_typical_rank() -> None:
    assert slowest_s(2.0, ranks=100, tail="none", spread=0.3, quantile=0.99) == 2
    assert mean_slowest_s(2.0, ranks=100, tail="normal", spread=0) == 2
