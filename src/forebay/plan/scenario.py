"""What is played: the times, rates and odds of one strategy, from the plan's own arithmetic."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from forebay.errors import UsageError
from forebay.plan import hops
from forebay.plan.arithmetic import Plan, work
from forebay.plan.inputs import TIERS, Inputs
from forebay.plan.resolve import DAY_S, FOLLOWS_CADENCE

NS = 1_000_000_000
"""The clock counts whole nanoseconds: the parts of a run then add up to it exactly."""
_MOST_DAYS = 36_500
_MOST_RUNS = 100_000
_MOST_EVENTS = 50_000_000
_LEAST_ODDS = 1e-6


class NoProgressError(UsageError):
    """Failures leave such a run nothing."""


class Strategy(enum.Enum):
    """How checkpoints are written; the value is its name on the command line."""

    TIERED = "tiered"
    """A pause for the host copy, then local disk, peer and, under a budget, the durable tier."""
    ASYNCHRONOUS = "asynchronous"
    """A pause for the host copy, then the durable tier, as fast as it goes; nothing nearer."""
    SYNCHRONOUS = "synchronous"
    """Everyone waits until all is in the durable tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One strategy of one plan. Cadence in nanoseconds of useful time, other times in seconds."""

    plan: Plan
    strategy: Strategy
    paced: bool
    tiers: tuple[bool, ...]
    """Which of memory, local, peer and durable there are."""
    fixed_s: float
    """Of the pause; all of it, where the pause is given."""
    copy_s: float
    """Of a typical rank, in the pause."""
    cadence_ns: int
    peer_every: int
    """Every how many checkpoints one goes to the peer."""
    durable_every: int
    restart_s: tuple[float, ...]
    """By the tier it goes back to; none is shorter than the reading in it."""
    shares: tuple[float, ...]
    """Failures by the nearest tier that they leave."""
    mtbf_s: float
    slots: int
    drain_bytes_per_s: float
    """All nodes together, on the way to the durable tier."""
    asked_bytes_per_s: float
    """What the nodes would write to it if it took all of that."""
    interference: float
    disturbs: tuple[float, float, float]
    """How much of the interference a write to local, peer and durable has while it lasts."""

    @property
    def drain_s(self) -> float:
        """All of a checkpoint on its way to the durable tier."""
        return self.plan.sizes.checkpoint_bytes / self.drain_bytes_per_s

    @property
    def link_s(self) -> float:
        """A node's part through its own link to the durable tier."""
        storage = self.plan.inputs.storage
        return self.plan.sizes.bytes_per_node / storage.per_node_bytes_per_s

    @property
    def name(self) -> str:
        """The strategy in a few words."""
        if self.strategy is Strategy.SYNCHRONOUS:
            return "synchronous"
        pace = "" if self.paced else ", unpaced"
        return f"{self.strategy.value}{pace}"


def scenario_of(
    plan: Plan, strategy: Strategy = Strategy.TIERED, *, paced: bool = True
) -> Scenario:
    """What of ``plan`` is played under ``strategy``.

    ``paced``: a tiered drain keeps to its budget; the other two never do. Raises UsageError where
    the run could not advance.
    """
    inputs, sizes = plan.inputs, plan.sizes
    checkpoint, failures = inputs.checkpoint, inputs.failures
    paced = paced and strategy is Strategy.TIERED
    near = strategy is Strategy.TIERED
    on = (near, near and checkpoint.local, near and checkpoint.mirror, True)
    most, _ = hops.store_rate(inputs, sizes)
    rate = plan.drain.paced_bytes_per_s if paced else most
    links = inputs.storage.per_node_bytes_per_s * sizes.writing_nodes
    drain_s = sizes.checkpoint_bytes / rate
    busy = hops.busy_of(inputs, sizes, replace(plan.drain, seconds=drain_s))
    restarts = {tier.name: max(tier.restart_s, tier.load_s) for tier in plan.tiers}
    for name in TIERS:
        restarts.setdefault(name, getattr(failures, f"restart_{name}_s"))
    cadence_s = checkpoint.cadence_s
    return Scenario(
        plan=plan,
        strategy=strategy,
        paced=paced,
        tiers=on,
        fixed_s=checkpoint.fixed_s if checkpoint.pause_s is None else checkpoint.pause_s,
        copy_s=plan.pause.copy_s if checkpoint.pause_s is None else 0.0,
        cadence_ns=max(1, round(cadence_s * NS)),
        peer_every=_whole(checkpoint.peer_cadence_s, cadence_s),
        durable_every=_whole(checkpoint.durable_cadence_s, cadence_s) if near else 1,
        restart_s=tuple(restarts[name] for name in TIERS),
        shares=tuple(getattr(failures, f"share_{name}") for name in TIERS),
        mtbf_s=failures.mtbf_s,
        slots=checkpoint.slots,
        drain_bytes_per_s=rate,
        asked_bytes_per_s=rate if paced else links,
        interference=0.0 if strategy is Strategy.SYNCHRONOUS else checkpoint.interference,
        disturbs=(1.0, 1.0, min(1.0, busy["durable"] / drain_s)),
    )


def check(scenario: Scenario, *, runs: int, days: float) -> None:
    """Refuse what cannot be played, or not to an end. Raises UsageError, one line."""
    if not 1 <= runs <= _MOST_RUNS:
        raise UsageError(f"--runs: expected 1 to {_MOST_RUNS}, found {runs}")
    if not 0 < days <= _MOST_DAYS:
        raise UsageError(f"--days: expected more than 0, at most {_MOST_DAYS}, found {days:g}")
    inputs = scenario.plan.inputs
    told = inputs.sources.get("checkpoint.peer_cadence", FOLLOWS_CADENCE)
    if told != FOLLOWS_CADENCE and not inputs.checkpoint.mirror:
        raise UsageError(
            "peer-cadence: expected only where there is a peer tier, found mirror no: leave one of "
            "the two out"
        )
    run_s = days * DAY_S
    saves, failures = run_s * NS / scenario.cadence_ns, run_s / scenario.mtbf_s
    if (events := runs * (saves + failures)) > _MOST_EVENTS:
        raise UsageError(
            f"simulate: expected at most {_MOST_EVENTS:,} checkpoints and failures in all runs, "
            f"found about {events:.3g}: fewer --runs or --days, or a longer --cadence"
        )
    stuck(scenario, run_s)


def stuck(scenario: Scenario, run_s: float) -> None:
    """Refuse a run whose failures leave no progress. Raises UsageError, one line."""
    mtbf_s = scenario.mtbf_s
    nearest = scenario.tiers.index(True)
    segment_s = scenario.cadence_ns / NS + typical_pause_s(scenario)
    least_s = segment_s + min(scenario.restart_s[nearest:])
    # the odds of one segment and a restart without a failure, over the tries that a run has; of a
    # run that ends before its first checkpoint, those that nothing fails in it
    whole_s = min(least_s, run_s)
    tries = max(1.0, run_s / min(mtbf_s, whole_s))
    if math.exp(-min(700.0, whole_s / mtbf_s)) * tries < _LEAST_ODDS:
        raise NoProgressError(
            f"simulate: the run would make no progress: a failure every {mtbf_s:.3g} s, but "
            f"{least_s:.3g} s from a restart over a cadence to the next {scenario.strategy.value} "
            "checkpoint: expected a shorter cadence, a faster restart or fewer failures"
        )


def typical_pause_s(scenario: Scenario) -> float:
    """The pause without its tail, in seconds."""
    pause_s = scenario.fixed_s + scenario.copy_s
    if scenario.strategy is Strategy.SYNCHRONOUS:
        pause_s += scenario.drain_s
    return pause_s


def plan_at(inputs: Inputs, cadence_s: float, durable_s: float | None = None) -> Plan:
    """The plan of these inputs with other cadences, in seconds; the peer's follows the near one."""
    checkpoint = replace(
        inputs.checkpoint,
        cadence_s=cadence_s,
        peer_cadence_s=cadence_s,
        durable_cadence_s=cadence_s if durable_s is None else durable_s,
    )
    return work(replace(inputs, checkpoint=checkpoint), best=False)


def _whole(outer_s: float, inner_s: float) -> int:
    """An outer cadence in inner ones: one due between two is taken at the later."""
    return max(1, math.ceil(outer_s / inner_s - 1e-9))
