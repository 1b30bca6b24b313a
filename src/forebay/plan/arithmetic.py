"""The plan: sizes, hops, pause, drain, losses, cadence and conditions of one set of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from forebay.plan import hops, losses, tail
from forebay.plan.fleet import HOUR_S, Fleet, fleet_of
from forebay.plan.hops import Drain, Hop, Requests, Sizes
from forebay.plan.inputs import Inputs
from forebay.plan.losses import Level
from forebay.plan.resolve import DAY_S
from forebay.plan.tiers import (
    Tier,
    best_of,
    disturbed_s,
    is_near,
    levels_of,
    tiers_of,
    with_losses,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous:
    """Everyone waits for the filesystem: what a write costs at this cadence."""

    write_s: float
    loss_fraction: float
    bytes_per_s_for_goal: float
    """Bytes/s of the filesystem from which its loss is within the goal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The barrier waits for the host copy. ``total_s`` = fixed + copy + tail, or as given."""

    fixed_s: float
    copy_s: float
    """The largest shard at the rate of the copy: a typical rank."""
    tail_s: float
    """What the slowest rank takes longer, in the stated quantile of saves."""
    total_s: float
    given: bool
    loss_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Room on a node that writes, in bytes."""

    arena_bytes_per_node: float
    nvme_bytes_per_node: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Parts of the run. The four are first order, each apart; ``total`` is exact: 1 - goodput."""

    pause: float
    rework: float
    restart: float
    interference: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The cadence given and the best one, in seconds: exact; Young's and Daly's beside it."""

    given_s: float
    best_s: float
    best_total: float
    young_s: float
    daly_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that follows from ``inputs``."""

    inputs: Inputs
    sizes: Sizes
    hops: tuple[Hop, ...]
    sync: Synchronous
    pause: Pause
    drain: Drain
    requests: Requests
    memory: Memory
    tiers: tuple[Tier, ...]
    levels: tuple[Level, ...]
    losses: Losses
    cadence: Cadence
    goodput: float
    mfu_lost: float
    gpu_hours_lost: float


def work(inputs: Inputs, *, best: bool = True) -> Plan:
    """Work the plan out; without ``best`` the search for the best cadence is left out.

    Raises nothing that ``resolve`` let pass.
    """
    sizes = hops.sizes_of(inputs)
    ways = hops.hops_of(inputs, sizes)
    drain = hops.drain_of(inputs, sizes)
    pause = _pause(inputs, sizes, ways[0])
    tiers = tiers_of(inputs, sizes, ways, drain, hops.busy_of(inputs, sizes, drain))
    levels = losses.in_whole(levels_of(tiers, inputs.checkpoint.cadence_s))
    tiers = with_losses(tiers, levels, inputs.failures.mtbf_s)
    shortest_s = hops.shortest_cadence_s(inputs, sizes, drain) if best else None
    good = goodput_of(inputs, tiers, levels, pause.total_s)
    return Plan(
        inputs=inputs,
        sizes=sizes,
        hops=ways,
        sync=_synchronous(inputs, sizes),
        pause=pause,
        drain=drain,
        requests=hops.requests_of(inputs, sizes),
        memory=_memory(inputs, sizes),
        tiers=tiers,
        levels=levels,
        losses=_losses(inputs, tiers, levels, pause, good),
        cadence=_cadence(inputs, tiers, levels, pause.total_s, shortest_s),
        goodput=good,
        mfu_lost=inputs.training.mfu * (1 - good),
        gpu_hours_lost=inputs.cluster.gpus * inputs.training.run_s / HOUR_S * (1 - good),
    )


def with_gpus(inputs: Inputs, gpus: int) -> Inputs:
    """The same job on another number of GPUs: data parallel and failures grow with them.

    The model is cut as before; the rate of failures of a node stays, and so the job's MTBF changes.
    """
    layout, per_node = inputs.layout, inputs.cluster.gpus_per_node
    nodes = gpus / per_node
    return replace(
        inputs,
        cluster=replace(inputs.cluster, gpus=gpus),
        layout=replace(layout, dp=gpus // (layout.tp * layout.pp * layout.cp)),
        failures=replace(inputs.failures, mtbf_s=DAY_S / (nodes * inputs.failures.per_node_day)),
    )


def work_fleet(plan: Plan) -> Fleet:
    """The fleet equation of a plan; with a deadline it works out plans of other sizes too."""
    at: Callable[[int], float] = lambda gpus: work(with_gpus(plan.inputs, gpus), best=False).goodput  # noqa: E731
    return fleet_of(plan.inputs, plan.goodput, at)


def disturbance_s(inputs: Inputs, tiers: tuple[Tier, ...], cadence_s: float) -> float:
    """What the drains of one near cadence cost, in seconds of steps."""
    checkpoint = inputs.checkpoint
    return disturbed_s(
        tiers,
        near_s=checkpoint.cadence_s,
        cadence_s=cadence_s,
        interference=checkpoint.interference,
    )


def goodput_of(
    inputs: Inputs, tiers: tuple[Tier, ...], levels: tuple[Level, ...], pause_s: float
) -> float:
    """Exact goodput of these levels; what drains disturb counts as if it were pause.

    Cadences of outer tiers are rounded up to whole numbers of the inner ones, as a run takes them.
    """
    levels = losses.in_whole(levels)
    cost_s = pause_s + disturbance_s(inputs, tiers, levels[0].cadence_s)
    return losses.goodput(levels, pause_s=cost_s, mtbf_s=inputs.failures.mtbf_s)


def cost_of(inputs: Inputs, tiers: tuple[Tier, ...], pause_s: float) -> float:
    """What one more checkpoint costs, in seconds: the pause, and what its near copies disturb."""
    near_s = inputs.checkpoint.cadence_s
    return pause_s + sum(tier.disturbs_s for tier in tiers if is_near(tier, near_s))


def mean_tail_s(plan: Plan) -> float:
    """What the slowest rank takes longer than a typical one on average, in seconds."""
    checkpoint, copy_s = plan.inputs.checkpoint, plan.pause.copy_s
    mean_s = tail.mean_slowest_s(
        copy_s, ranks=plan.sizes.writers, tail=checkpoint.tail, spread=checkpoint.spread
    )
    return mean_s - copy_s


def best_cadence_of(plan: Plan, tier: Tier) -> float | None:
    """The best cadence of a tier, in seconds; None where nothing is recovered from it."""
    return best_of(tier, near_s=plan.cadence.best_s, mtbf_s=plan.inputs.failures.mtbf_s)


def _synchronous(inputs: Inputs, sizes: Sizes) -> Synchronous:
    rate, _ = hops.store_rate(inputs, sizes)
    cadence_s = inputs.checkpoint.cadence_s
    write_s = sizes.checkpoint_bytes / rate
    return Synchronous(
        write_s=write_s,
        loss_fraction=write_s / cadence_s,
        bytes_per_s_for_goal=sizes.checkpoint_bytes / (inputs.checkpoint.goal * cadence_s),
    )


def _pause(inputs: Inputs, sizes: Sizes, copy: Hop) -> Pause:
    checkpoint = inputs.checkpoint
    slowest = tail.slowest_s(
        copy.seconds,
        ranks=sizes.writers,
        tail=checkpoint.tail,
        spread=checkpoint.spread,
        quantile=checkpoint.quantile,
    )
    total = checkpoint.fixed_s + slowest
    if checkpoint.pause_s is not None:
        total = checkpoint.pause_s
    return Pause(
        fixed_s=checkpoint.fixed_s,
        copy_s=copy.seconds,
        tail_s=slowest - copy.seconds,
        total_s=total,
        given=checkpoint.pause_s is not None,
        loss_fraction=total / checkpoint.cadence_s,
    )


def _memory(inputs: Inputs, sizes: Sizes) -> Memory:
    checkpoint = inputs.checkpoint
    copies = int(checkpoint.local) + int(checkpoint.mirror)
    return Memory(
        arena_bytes_per_node=checkpoint.slots * sizes.writers_per_node * sizes.largest_gpu_bytes,
        # those that are kept, and the one that is being written
        nvme_bytes_per_node=(checkpoint.local_keep + 1) * sizes.bytes_per_node * copies,
    )


def _losses(
    inputs: Inputs, tiers: tuple[Tier, ...], levels: tuple[Level, ...], pause: Pause, good: float
) -> Losses:
    rework, restart = losses.first_order(levels, mtbf_s=inputs.failures.mtbf_s)
    cadence_s = inputs.checkpoint.cadence_s
    return Losses(
        pause=pause.loss_fraction,
        rework=rework,
        restart=restart,
        interference=disturbance_s(inputs, tiers, cadence_s) / cadence_s,
        total=1 - good,
    )


def _cadence(
    inputs: Inputs,
    tiers: tuple[Tier, ...],
    levels: tuple[Level, ...],
    pause_s: float,
    shortest_s: float | None,
) -> Cadence:
    mtbf_s = inputs.failures.mtbf_s
    cost_s = cost_of(inputs, tiers, pause_s)
    best_s = given_s = inputs.checkpoint.cadence_s
    if shortest_s is not None:
        best_s = losses.best_cadence_s(levels, pause_s=cost_s, mtbf_s=mtbf_s, shortest_s=shortest_s)
    good = goodput_of(inputs, tiers, losses.at_cadence(levels, best_s), pause_s)
    return Cadence(
        given_s=given_s,
        best_s=best_s,
        best_total=1 - good,
        young_s=losses.young_s(cost_s, mtbf_s),
        daly_s=losses.daly_s(cost_s, mtbf_s),
    )
