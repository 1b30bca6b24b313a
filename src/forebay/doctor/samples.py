"""Times of many small calls: their median, and the one that 99 of 100 stay below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.units import show_seconds


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
