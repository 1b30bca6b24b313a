"""Times of many small calls, their median and p99; rates of repeated rounds, their spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import harmonic_mean

from forebay.units import show_rate, show_seconds

NOISY_BELOW = 0.7
"""A slowest round below this part of the fastest: something else had its share."""

_MOST_PARTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What ``count`` calls took. Times in seconds."""

    median_s: float
    p99_s: float
    count: int

    def __str__(self) -> str:
        return f"p99 {show_seconds(self.p99_s)} of {self.count} one after another"


def summarize(times_s: Sequence[float]) -> Samples:
    """Median and 99th percentile by rank, so that each is a time that was seen; at least one."""
    ordered = sorted(times_s)
    count = len(ordered)
    return Samples(
        median_s=ordered[math.ceil(count * 0.5) - 1],
        p99_s=ordered[math.ceil(count * 0.99) - 1],
        count=count,
    )


def spread(rates: Sequence[float]) -> str:
    """From the slowest round to the fastest, in bytes/s; ``noisy`` where they lie far apart.

    Many rounds are looked at in parts of several: one short hitch of a thousand is no noise.
    """
    if len(rates) == 1:
        return "1 round"
    each = math.ceil(len(rates) / _MOST_PARTS)
    parts = [harmonic_mean(rates[at : at + each]) for at in range(0, len(rates), each)]
    least, most = min(parts), max(parts)
    noisy = "noisy, " if least < NOISY_BELOW * most else ""
    return f"{noisy}{len(rates):,} rounds of {show_rate(least)} to {show_rate(most)}"
