"""What came of a run, or of several."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from forebay.plan.histogram import Histogram

LOSSES = ("pause", "rework", "restart", "interference")
PARTS = ("useful", *LOSSES)
COUNTS = (
    "due",
    "taken",
    "skipped",
    "torn",
    "superseded",
    "lost_in_flight",
    "failed_restarts",
)


def _histograms() -> tuple[Histogram, ...]:
    return tuple(Histogram() for _ in range(4))


@dataclass(slots=True, kw_only=True)
class Tally:
    """Times in nanoseconds; the five ``PARTS`` add up to ``total_ns``, to the last one."""

    total_ns: int = 0
    useful_ns: int = 0
    """Training that is in the model at the end."""
    pause_ns: int = 0
    rework_ns: int = 0
    """Training that a failure took back."""
    restart_ns: int = 0
    interference_ns: int = 0
    """What steps took longer beside drains."""
    due: int = 0
    """Checkpoints whose time had come."""
    taken: int = 0
    skipped: int = 0
    """No slot was free."""
    torn: int = 0
    """A failure came in the pause."""
    superseded: int = 0
    """Replaced by a newer one before they began to drain."""
    lost_in_flight: int = 0
    """Taken, and lost before they were complete where the failure left anything."""
    failed_restarts: int = 0
    drained_bytes: float = 0.0
    drain_ns: int = 0
    """Time in which the durable tier was written to."""
    peak_bytes_per_ns: float = 0.0
    pauses: Histogram = field(default_factory=Histogram)
    reached: tuple[Histogram, ...] = field(default_factory=_histograms)
    """From the call of save until it is complete in memory, local, peer, durable."""
    lost: Histogram = field(default_factory=Histogram)
    """Training taken back a failure."""
    restarts: Histogram = field(default_factory=Histogram)
    """From a failure until training goes on."""
    failures: list[int] = field(default_factory=lambda: [0] * 4)
    """By the nearest tier that they leave: memory, local, peer, durable."""
    recovered: list[int] = field(default_factory=lambda: [0] * 5)
    """By the tier gone back to; the last: none had one, from the beginning."""

    @property
    def goodput(self) -> float:
        """Useful part of the time, 0 to 1."""
        return self.useful_ns / self.total_ns if self.total_ns else 0.0

    def take(self, other: Tally) -> None:
        """Add another run's."""
        for each in fields(self):
            mine, its = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Histogram):
                mine.take(its)
            elif isinstance(mine, tuple):
                for one, another in zip(mine, its, strict=True):
                    one.take(another)
            elif isinstance(mine, list):
                setattr(self, each.name, [a + b for a, b in zip(mine, its, strict=True)])
            elif each.name.startswith("peak"):
                setattr(self, each.name, max(mine, its))
            else:
                setattr(self, each.name, mine + its)
