"""One line of the doctor: what was measured, what was expected, the verdict, what to do. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from forebay.plan.figure import Figure, Kind

SLOW_BELOW = 0.8
"""Below this part of what was expected, a rate is called slow."""

Expected = Mapping[str, Figure]
"""What the plan assumes, by its ``section.key``, with the source of each figure."""


Told = Callable[[str], None]
"""Hears what is measured next, a line for each."""


class Verdict(enum.Enum):
    """What to think of a line."""

    GOOD = "good"
    SLOW = "slow"
    """Measured, and below what was expected."""
    OFF = "off"
    """A fast path that is there and not in use, or a limit that is too low."""
    FAILED = "failed"
    """It could not be measured though it should have been."""
    NONE = "not here"
    """Nothing to measure: no accelerator, no store given."""
    MEASURED = "measured"
    """There is nothing to compare it with."""

    @property
    def holds(self) -> bool:
        """Whether the plan may go on assuming it."""
        return self not in (Verdict.SLOW, Verdict.OFF, Verdict.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line. ``field`` is the plan's field it measures, empty for none; values in SI units."""

    name: str
    hop: str
    kind: Kind
    verdict: Verdict
    measured: float | None = None
    expected: float | None = None
    source: str = ""
    """Where the expectation comes from."""
    field: str = ""
    note: str = ""
    """How it was measured, or what was seen, in a few words."""
    advice: str = ""
    """What to do should it not hold, or to have it measured."""

    @property
    def to_do(self) -> str:
        """The advice, where there is something to do."""
        nothing = self.verdict in (Verdict.GOOD, Verdict.MEASURED)
        return "" if nothing else self.advice

    @property
    def seen(self) -> str:
        """What was measured, for people."""
        return "-" if self.measured is None else self.kind.show(self.measured)

    @property
    def wanted(self) -> str:
        """What was expected, for people."""
        return "-" if self.expected is None else self.kind.show(self.expected)


def compare(
    *,
    name: str,
    hop: str,
    kind: Kind,
    measured: float,
    expected: Expected,
    field: str,
    note: str = "",
    advice: str = "",
) -> Finding:
    """A measured figure against what the plan assumes for ``field``; more of it is better."""
    figure = expected.get(field)
    found = Finding(
        name=name,
        hop=hop,
        kind=kind,
        verdict=Verdict.MEASURED,
        measured=measured,
        expected=None if figure is None else float(figure.value),
        source="" if figure is None else figure.source,
        field=field,
        note=note,
        advice=advice,
    )
    return found if figure is None else judged(found, SLOW_BELOW)


def judged(found: Finding, slow_below: float) -> Finding:
    """A compared figure with the verdict that ``slow_below`` gives it.

    A limit that is too low, or a line that says something else, keeps its own.
    """
    compared = found.measured is not None and found.expected is not None
    if not compared or found.verdict not in (Verdict.GOOD, Verdict.SLOW, Verdict.MEASURED):
        return found
    assert found.measured is not None
    assert found.expected is not None
    holds = found.measured >= slow_below * found.expected
    return replace(found, verdict=Verdict.GOOD if holds else Verdict.SLOW)


def failed(
    hop: str, name: str, kind: Kind, note: str, advice: str = "", field: str = ""
) -> Finding:
    """A line that should have been measured and could not be."""
    return Finding(
        name=name,
        hop=hop,
        kind=kind,
        verdict=Verdict.FAILED,
        note=note,
        advice=advice,
        field=field,
    )
