"""One line of the doctor: what was measured, what was expected, the verdict, what to do. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from forebay.plan.figure import Figure, Kind

SLOW_BELOW = 0.8
"""Below this part of what was expected, a rate is called slow."""

Expected = Mapping[str, Figure]
"""What the plan assumes, by its ``section.key``, with the source of each figure."""


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
    """What to do; empty when nothing is."""


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
    more_is_better: bool = True,
    slow_below: float = SLOW_BELOW,
) -> Finding:
    """A measured figure against what the plan assumes for ``field``; advice where it is slow."""
    figure = expected.get(field)
    wanted = None if figure is None else float(figure.value)
    verdict = Verdict.MEASURED
    if wanted is not None:
        ratio = measured / wanted if more_is_better else wanted / max(measured, 1e-12)
        verdict = Verdict.GOOD if ratio >= slow_below else Verdict.SLOW
    return Finding(
        name=name,
        hop=hop,
        kind=kind,
        verdict=verdict,
        measured=measured,
        expected=wanted,
        source="" if figure is None else figure.source,
        field=field,
        note=note,
        advice="" if verdict.holds else advice,
    )
