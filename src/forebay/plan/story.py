"""What happened to one run: its failures, and what had been lost by then."""

from __future__ import annotations

from dataclasses import dataclass

MOST_EVENTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure. Times in nanoseconds; the four losses are those since the run began."""

    at_ns: int
    kind: int
    """The nearest tier that it leaves: 0 memory to 3 durable."""
    source: int
    """The tier gone back to; 4: none had a checkpoint."""
    lost_ns: int
    """Training taken back."""
    pause_ns: int
    rework_ns: int
    restart_ns: int
    interference_ns: int


class Story:
    """The first failures of a run, ``MOST_EVENTS`` at most: bounded, however many there are."""

    __slots__ = ("failures", "left_out")

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.left_out = 0

    def tell(self, failure: Failure) -> None:
        """Keep one, or count it where there is no room."""
        if len(self.failures) < MOST_EVENTS:
            self.failures.append(failure)
        else:
            self.left_out += 1
