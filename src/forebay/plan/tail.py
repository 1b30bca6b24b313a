"""The slowest of many: every rank must have copied before training goes on."""

from __future__ import annotations

import math
from statistics import NormalDist

_STEPS = 400
_NORMAL = NormalDist()


def slowest_s(typical_s: float, *, ranks: int, tail: str, spread: float, quantile: float) -> float:
    """A time that the slowest of ``ranks`` stays below in ``quantile`` of all saves, in seconds.

    Ranks are independent, each distributed by ``tail``: ``lognormal`` with median ``typical_s``
    and deviation ``spread`` of its logarithm; ``normal`` with mean ``typical_s`` and deviation
    ``spread * typical_s``; ``exponential``: ``typical_s`` and on top an exponential time of mean
    ``spread * typical_s``; ``none``. P(max <= x) = F(x)^n, so a rank must be within its
    ``quantile^(1/n)`` quantile.
    """
    if tail == "none" or spread == 0:
        return typical_s
    beyond = -math.expm1(math.log(quantile) / ranks)  # 1 - quantile^(1/n), without cancellation
    return _inverse(typical_s, beyond, tail, spread)


def mean_slowest_s(typical_s: float, *, ranks: int, tail: str, spread: float) -> float:
    """Mean time of the slowest of ``ranks``, in seconds; the distributions of ``slowest_s``."""
    if tail == "none" or spread == 0:
        return typical_s
    total = 0.0
    for step in range(_STEPS):
        beyond = -math.expm1(math.log((step + 0.5) / _STEPS) / ranks)
        total += _inverse(typical_s, beyond, tail, spread)
    return total / _STEPS


def _inverse(typical_s: float, beyond: float, tail: str, spread: float) -> float:
    """The time that one rank exceeds with probability ``beyond``."""
    if tail == "exponential":
        return typical_s * (1 - spread * math.log(beyond))
    deviations = -_NORMAL.inv_cdf(beyond)
    if tail == "normal":
        return typical_s * max(0.0, 1 + spread * deviations)
    return typical_s * math.exp(spread * deviations)
