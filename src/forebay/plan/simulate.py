"""Runs of one scenario played out, each with a stream of chance of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.errors import UsageError
from forebay.plan.draws import Draws
from forebay.plan.load import Load
from forebay.plan.resolve import DAY_S
from forebay.plan.run import Run
from forebay.plan.scenario import NS, NoProgressError, Scenario, check
from forebay.plan.story import Story
from forebay.plan.tally import PARTS, Tally

RUNS = 10
DAYS = 54.0
SEED = 0
_MOST_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """All runs of a scenario: their sum, each one's goodput, and the first one as it went."""

    scenario: Scenario
    runs: int
    days: float
    seed: int
    tally: Tally
    goodputs: tuple[float, ...]
    load: Load
    """Of the first run."""
    story: Story
    """Of the first run."""

    @property
    def goodput(self) -> float:
        """Useful part of all runs together."""
        return self.tally.goodput

    @property
    def standard_error(self) -> float | None:
        """Of the mean goodput; None of a single run."""
        if self.runs < 2:
            return None
        mean = math.fsum(self.goodputs) / self.runs
        square = math.fsum((each - mean) ** 2 for each in self.goodputs)
        return math.sqrt(square / (self.runs - 1) / self.runs)

    def part(self, name: str) -> float:
        """One of ``PARTS``, as a part of all time."""
        nanoseconds: int = getattr(self.tally, f"{name}_ns")
        return nanoseconds / self.tally.total_ns


def simulate(
    scenario: Scenario, *, runs: int = RUNS, days: float = DAYS, seed: int = SEED
) -> Simulation:
    """Play ``runs`` runs of ``days`` days each; run number i is the same for any ``runs``.

    Raises UsageError for what cannot be played, NoProgressError where no run got anywhere.
    """
    import numpy as np  # here: the plan's arithmetic needs none of it

    check(scenario, runs=runs, days=days)
    if not 0 <= seed <= _MOST_SEED:
        raise UsageError(f"--seed: expected 0 to {_MOST_SEED}, found {seed}")
    end_ns = max(1, round(days * DAY_S * NS))
    total, goodputs = Tally(), []
    first, story = Load(end_ns), Story()
    for index in range(runs):
        streams = np.random.SeedSequence(seed, spawn_key=(index,)).spawn(2)
        failures, times = (np.random.Generator(np.random.PCG64(each)) for each in streams)
        load, told = (first, story) if index == 0 else (Load(end_ns), None)
        one = Run(scenario, Draws(scenario, failures, times), load, end_ns, told).play()
        goodputs.append(one.goodput)
        total.take(one)
    if not total.useful_ns:
        raise NoProgressError(
            f"simulate: no run made any progress: a failure every {scenario.mtbf_s:.3g} s, every "
            "one of them before a checkpoint was complete: expected a shorter cadence, a faster "
            "restart or fewer failures"
        )
    assert sum(getattr(total, f"{name}_ns") for name in PARTS) == total.total_ns
    return Simulation(
        scenario=scenario,
        runs=runs,
        days=days,
        seed=seed,
        tally=total,
        goodputs=tuple(goodputs),
        load=first,
        story=story,
    )
