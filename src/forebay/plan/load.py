"""What the shared filesystem was written with as time went on, in a fixed number of bins."""

from __future__ import annotations

BINS = 432  # of 54 days: three hours each


class Load:
    """Bytes written in each of up to ``BINS`` equal parts of a run, and the fastest write of each.

    Bounded, however many writes there are.
    """

    __slots__ = ("bin_ns", "nbytes", "peaks")

    def __init__(self, end_ns: int) -> None:
        self.bin_ns = max(1, -(-end_ns // BINS))
        bins = -(-end_ns // self.bin_ns)
        self.nbytes, self.peaks = [0.0] * bins, [0.0] * bins

    def add(self, since_ns: int, until_ns: int, bytes_per_ns: float) -> None:
        """A write at an even rate."""
        first = since_ns // self.bin_ns
        for index in range(first, min(len(self.nbytes) - 1, until_ns // self.bin_ns) + 1):
            low = max(since_ns, index * self.bin_ns)
            high = min(until_ns, (index + 1) * self.bin_ns)
            if high > low:
                self.nbytes[index] += (high - low) * bytes_per_ns
                self.peaks[index] = max(self.peaks[index], bytes_per_ns)
