"""How often a time was how long, in bounded memory: any number of values, bins of 0.2 %."""

from __future__ import annotations

import math
from typing import Any

_LOG_WIDTH = math.log(1.002)


class Histogram:
    """Counts values of 0 or more. Quantiles are within 0.1 %, least, most and sum are exact."""

    __slots__ = ("bins", "count", "least", "most", "total", "zeros")

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.zeros = 0
        self.count = 0
        self.total = 0
        self.least = 0
        self.most = 0

    def add(self, value: int) -> None:
        """Count one value."""
        if value > 0:
            at = int(math.log(value) / _LOG_WIDTH)
            self.bins[at] = self.bins.get(at, 0) + 1
        else:
            self.zeros += 1
        if not self.count or value < self.least:
            self.least = value
        self.most = max(self.most, value)
        self.count += 1
        self.total += value

    def take(self, other: Histogram) -> None:
        """Count all that ``other`` has counted."""
        if not other.count:
            return
        for at, count in other.bins.items():
            self.bins[at] = self.bins.get(at, 0) + count
        self.zeros += other.zeros
        self.least = min(self.least, other.least) if self.count else other.least
        self.most = max(self.most, other.most)
        self.count += other.count
        self.total += other.total

    def quantile(self, part: float) -> float:
        """The value that ``part`` of all stay at or below; 0 of none."""
        left = math.ceil(part * self.count) - self.zeros
        if left <= 0:
            return float(self.least if self.count and self.zeros == 0 else 0)
        for at in sorted(self.bins):
            left -= self.bins[at]
            if left <= 0:
                middle = math.exp((at + 0.5) * _LOG_WIDTH)
                return min(max(middle, float(self.least)), float(self.most))
        return float(self.most)

    def document(self, scale: float) -> dict[str, Any]:
        """Count, mean, p50, p99 and largest, each divided by ``scale``; no figures of none."""
        if not self.count:
            return {"count": 0, "mean": None, "p50": None, "p99": None, "max": None}
        return {
            "count": self.count,
            "mean": self.total / self.count / scale,
            "p50": self.quantile(0.5) / scale,
            "p99": self.quantile(0.99) / scale,
            "max": self.most / scale,
        }

    def coarse(self, scale: float, bins: int = 60) -> list[tuple[float, float, int]]:
        """At most ``bins`` bars of equal width in the logarithm: from, to, count."""
        if not self.bins:
            return []
        first, last = min(self.bins), max(self.bins)
        step = max(1, -(-(last - first + 1) // bins))
        bars: dict[int, int] = {}
        for at, count in self.bins.items():
            bars[(at - first) // step] = bars.get((at - first) // step, 0) + count
        edges = {
            bar: math.exp((first + bar * step) * _LOG_WIDTH) / scale
            for each in bars
            for bar in (each, each + 1)
        }
        return [(edges[bar], edges[bar + 1], bars[bar]) for bar in sorted(bars)]
