"""One input changed, all others as they were: what sweeps and inverses are made of."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any

from forebay.errors import UsageError
from forebay.plan.arithmetic import Plan, with_gpus, work
from forebay.plan.figure import Given, Kind
from forebay.plan.fleet import replica_gpus
from forebay.plan.inputs import FIELDS, SHAPE, TIERS, Inputs, value_of
from forebay.plan.resolve import DAY_S, FOLLOWS_CADENCE, RESTART

POINTS = 25
_MOST_POINTS = 1000
_TIED = ("checkpoint.peer_cadence", "checkpoint.durable_cadence")
_FOLLOW = {  # others must change with these: give them as flags, where all of it is checked
    *(f"model.{key}" for key in SHAPE),
    *(f"failures.share_{tier}" for tier in TIERS),
    *("cluster.gpus_per_node", "checkpoint.quantile"),
}
_NUMERIC = set(Kind) - {Kind.TEXT, Kind.YES_NO}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An input by its ``section.key``; ``failures.restart`` is all four restarts at once."""

    name: str
    given: Given

    @property
    def key(self) -> str:
        """Its name without the section."""
        return self.name.partition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A variable, its values, and the plan at each."""

    variable: Variable
    values: tuple[float, ...]
    plans: tuple[Plan, ...]


def variable(key: str) -> Variable:
    """The variable of a key such as ``cadence`` or ``drain-rate``. Raises UsageError."""
    wanted = key.strip().lstrip("-").replace("-", "_").lower()
    if wanted == RESTART.key:
        return Variable(name="failures.restart", given=RESTART)
    known: dict[str, Variable] = {}
    for name, (_, given) in FIELDS.items():
        if given.kind in _NUMERIC and not name.startswith("layout.") and name not in _FOLLOW:
            known[given.key] = Variable(name=name, given=given)
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(sorted(known))}"
        raise UsageError(f"unknown variable {key!r}: {hint}")
    return known[wanted]


def at(inputs: Inputs, what: Variable, value: float) -> Inputs:
    """``inputs`` with one variable changed, and what follows from it.

    Cadences that were not given follow the cadence; GPUs take failures and data parallel with
    them; the job's MTBF and the rate of a node stay in step. GPUs are whole replicas of the model.
    """
    section, _, key = what.name.partition(".")
    if what.name == "cluster.gpus":
        step = replica_gpus(inputs)
        return with_gpus(inputs, max(1, round(value / step)) * step)
    changes: dict[str, Any] = {}
    if key == RESTART.key:
        changes = {f"restart_{tier}_s": value for tier in TIERS}
    else:
        whole = what.given.kind is Kind.WHOLE
        changes[FIELDS[what.name][0]] = max(1, round(value)) if whole else value
    if what.name == "checkpoint.cadence":
        for name in _TIED:
            attribute = FIELDS[name][0]
            tied = inputs.sources.get(name) == FOLLOWS_CADENCE
            longer = max(value, float(value_of(inputs, name) or 0))
            changes[attribute] = value if tied else longer
    elif what.name == "failures.mtbf":
        changes["per_node_day"] = DAY_S / (inputs.nodes * value)
    elif what.name == "failures.node_failures":
        changes["mtbf_s"] = DAY_S / (inputs.nodes * value)
    elif what.name in _TIED and value < inputs.checkpoint.cadence_s * (1 - 1e-9):
        raise UsageError(
            f"{key.replace('_', '-')}: expected the cadence {inputs.checkpoint.cadence_s:g} s or "
            f"more, found {value:g} s"
        )
    part = replace(getattr(inputs, section), **changes)
    sections: dict[str, Any] = {section: part}
    return replace(inputs, **sections)


def sweep(inputs: Inputs, text: str, *, points: int = POINTS) -> Sweep:
    """``'cadence=1min:60min'`` -> plans at ``points`` values, evenly spaced in their logarithm.

    Raises UsageError.
    """
    key, equals, span = text.partition("=")
    first, colon, last = span.partition(":")
    if not equals or not colon:
        raise UsageError(
            f"--sweep: expected VARIABLE=FROM:TO such as cadence=1min:60min, found {text!r}"
        )
    if not 2 <= points <= _MOST_POINTS:
        raise UsageError(f"--points: expected 2 to {_MOST_POINTS}, found {points}")
    what = variable(key)
    low, high = (_positive(what, end) for end in (first, last))
    if not low < high:
        raise UsageError(f"--sweep: expected FROM below TO, found {text!r}")
    values = tuple(low * (high / low) ** (step / (points - 1)) for step in range(points))
    found = tuple(at(inputs, what, value) for value in values)
    if what.given.kind is Kind.WHOLE:  # rounded to what can be: each once
        each = {int(value_of(one, what.name) or 0): one for one in found}
        values, found = tuple(map(float, each)), tuple(each.values())
    return Sweep(variable=what, values=values, plans=tuple(work(one) for one in found))


def _positive(what: Variable, text: str) -> float:
    value = what.given.read(text, f"--sweep {what.key}")
    number = float(value)
    if number <= 0:
        raise UsageError(f"--sweep {what.key}: expected more than 0, found {text}")
    return number
