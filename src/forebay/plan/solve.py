"""The inverse: for which values of one input does each goal hold?"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import UsageError
from forebay.plan.arithmetic import work
from forebay.plan.fleet import replica_gpus
from forebay.plan.inputs import Inputs, value_of
from forebay.plan.vary import Variable, at, variable
from forebay.plan.verdict import holds
from forebay.units import show_fraction, show_seconds

_GRID = 200
_HALVINGS = 50
_REACH = 1e6  # how far around the value as it is, each way

_OF_PAUSE = {f"checkpoint.{key}" for key in ("fixed", "spread", "quantile")}

GOALS = ("pause", "pause_loss", "drain", "sync_loss", "total_loss", "conditions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A goal and where it holds: from ``smallest`` to ``largest``; None: as far as was looked.

    ``holds`` is False where no value meets it.
    """

    goal: str
    text: str
    holds: bool
    smallest: float | None
    largest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Bounds of one variable. ``looked`` is the range that was searched; ``now`` its value."""

    variable: Variable
    now: float | None
    looked: tuple[float, float]
    bounds: tuple[Bound, ...]


def solve(inputs: Inputs, key: str) -> Solution:
    """Where each goal holds, as ``key`` varies and all else stays. Raises UsageError.

    A grid of 200 values over twelve decades (a fraction: up to 1) finds where a goal holds, then
    bisection finds the ends of the first stretch in which it does.
    """
    what = variable(key)
    if what.key in ("goal", "pause_limit"):
        raise UsageError(f"--solve: {what.key} is a goal itself: vary an input instead")
    if inputs.checkpoint.pause_s is not None and what.name in _OF_PAUSE:
        raise UsageError(f"--solve {what.key}: the pause is given, so nothing depends on it")
    now = _now(inputs, what)
    low, high = _range(inputs, what, now)
    values = [low * (high / low) ** (step / _GRID) for step in range(_GRID + 1)]
    checks = [_checks(at(inputs, what, value)) for value in values]
    bounds = []
    for goal in GOALS:
        good = [each[goal] for each in checks]
        bounds.append(_bound(inputs, what, goal, values, good))
    return Solution(variable=what, now=now, looked=(low, high), bounds=tuple(bounds))


def _bound(
    inputs: Inputs, what: Variable, goal: str, values: list[float], good: list[bool]
) -> Bound:
    text = _text(inputs, goal)
    if not any(good):
        return Bound(goal=goal, text=text, holds=False, smallest=None, largest=None)
    first = good.index(True)
    last = first
    while last + 1 < len(good) and good[last + 1]:
        last += 1

    def edge(outside: float, inside: float) -> float:
        for _ in range(_HALVINGS):
            middle = (outside * inside) ** 0.5
            if _checks(at(inputs, what, middle))[goal]:
                inside = middle
            else:
                outside = middle
        if what.name == "cluster.gpus":
            return float(at(inputs, what, inside).cluster.gpus)
        return inside

    return Bound(
        goal=goal,
        text=text,
        holds=True,
        smallest=edge(values[first - 1], values[first]) if first else None,
        largest=edge(values[last + 1], values[last]) if last + 1 < len(values) else None,
    )


def _checks(inputs: Inputs) -> dict[str, bool]:
    plan = work(inputs, best=False)
    checkpoint = inputs.checkpoint
    return {
        "pause": plan.pause.total_s <= checkpoint.pause_limit_s,
        "pause_loss": plan.pause.loss_fraction < checkpoint.goal,
        "drain": plan.drain.fits_cadence,
        "sync_loss": plan.sync.loss_fraction < checkpoint.goal,
        "total_loss": plan.losses.total < checkpoint.goal,
        "conditions": holds(plan),
    }


def _text(inputs: Inputs, goal: str) -> str:
    limit = show_fraction(inputs.checkpoint.goal)
    return {
        "pause": f"pause under {show_seconds(inputs.checkpoint.pause_limit_s)}",
        "pause_loss": f"pause under {limit} of the run",
        "drain": "drain within the durable cadence",
        "sync_loss": f"a synchronous write under {limit} of the run",
        "total_loss": f"all losses under {limit} of the run",
        "conditions": "every condition holds",
    }[goal]


def _now(inputs: Inputs, what: Variable) -> float | None:
    name = "failures.restart_peer" if what.name == "failures.restart" else what.name
    value = value_of(inputs, name)
    return None if value is None else float(value)


def _range(inputs: Inputs, what: Variable, now: float | None) -> tuple[float, float]:
    unit = what.given.kind.value
    middle = now or {"B/s": 1e11, "s": 60.0, "1/s": 1e3, "B": 1e9}.get(unit, 1.0)
    low, high = middle / _REACH, middle * _REACH
    if what.name == "cluster.gpus":
        return float(replica_gpus(inputs)), float(2**24)
    if what.key in ("peer_cadence", "durable_cadence"):
        return inputs.checkpoint.cadence_s, max(high, inputs.checkpoint.cadence_s * _REACH)
    if unit == "of 1":
        return 1e-6, 1.0
    if unit == "whole":
        return 1.0, max(1024.0, middle * 64)
    return low, high


def bound_text(solution: Solution, bound: Bound) -> str:
    """A bound for people: ``at least 360 GB/s``."""
    kind = solution.variable.given.kind
    show = kind.show
    if not bound.holds:
        low, high = solution.looked
        return f"nothing from {show(low)} to {show(high)} is enough"
    low_text = "" if bound.smallest is None else f"at least {kind.bound(bound.smallest, up=True)}"
    high_text = "" if bound.largest is None else f"at most {kind.bound(bound.largest, up=False)}"
    return ", ".join(filter(None, (low_text, high_text))) or "anything"
