"""The same job under three strategies, side by side, over values of one input."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import UsageError
from forebay.plan.inputs import Inputs
from forebay.plan.scenario import NoProgressError, Strategy, plan_at, scenario_of
from forebay.plan.simulate import Simulation, simulate
from forebay.plan.vary import Variable, at, variable

NEAR_S = 60.0
FAR_S = 900.0
_MOST_VALUES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one strategy came to, at one value of what is varied; None: nothing is.

    ``stuck``: why it could not be played to a result.
    """

    value: float | None
    strategy: Strategy
    cadence_s: float
    durable_cadence_s: float
    simulation: Simulation | None
    stuck: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All rows; those of one value stand together."""

    variable: Variable | None
    rows: tuple[Row, ...]


def compare(
    inputs: Inputs,
    text: str | None = None,
    *,
    near_s: float = NEAR_S,
    far_s: float = FAR_S,
    runs: int,
    days: float,
    seed: int,
) -> Comparison:
    """Synchronous and asynchronous at the inputs' cadence; tiered at ``near_s`` and ``far_s``.

    ``text``: ``'filesystem=100GB/s,1TB/s'``, each value with the same seed. A strategy that gets
    nowhere is a row that says so. Raises UsageError for what cannot be.
    """
    if far_s < near_s:
        raise UsageError(
            f"--far-cadence: expected the near cadence {near_s:g} s or more, found {far_s:g} s"
        )
    what, values = (None, (None,)) if text is None else _values(text)
    rows: list[Row] = []
    for value in values:
        each = inputs if what is None or value is None else at(inputs, what, value)
        cadence_s = each.checkpoint.cadence_s
        tiered = plan_at(each, near_s, far_s)
        whole = plan_at(each, cadence_s)
        for strategy, one, far in (
            (Strategy.SYNCHRONOUS, whole, cadence_s),
            (Strategy.ASYNCHRONOUS, whole, cadence_s),
            (Strategy.TIERED, tiered, far_s),
        ):
            found, why = None, None
            try:
                found = simulate(scenario_of(one, strategy), runs=runs, days=days, seed=seed)
            except NoProgressError as error:
                why = str(error)
            rows.append(
                Row(
                    value=value,
                    strategy=strategy,
                    cadence_s=one.inputs.checkpoint.cadence_s,
                    durable_cadence_s=far,
                    simulation=found,
                    stuck=why,
                )
            )
    return Comparison(variable=what, rows=tuple(rows))


def _values(text: str) -> tuple[Variable, tuple[float | None, ...]]:
    """``'KEY=VALUE,VALUE'`` read. Raises UsageError."""
    key, equals, listed = text.partition("=")
    words = [word for word in listed.split(",") if word.strip()]
    if not equals or not 1 <= len(words) <= _MOST_VALUES:
        raise UsageError(
            "--vary: expected VARIABLE=VALUE,VALUE such as filesystem=100GB/s,1TB/s, at most "
            f"{_MOST_VALUES} values, found {text!r}"
        )
    what = variable(key)
    return what, tuple(float(what.given.read(word, f"--vary {what.key}")) for word in words)
