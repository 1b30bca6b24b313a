"""The tiers a checkpoint is in, what each survives, and what a failure therefore costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from forebay.plan.hops import Drain, Hop, Sizes, read_s
from forebay.plan.inputs import Inputs
from forebay.plan.losses import Level, young_s

SURVIVES = {
    "memory": "the trainer's death",
    "local": "the agent's death, a reboot",
    "peer": "the loss of a node",
    "durable": "the loss of the job or the cluster",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tier in use. ``share``: failures that are recovered from it, those of missing tiers too.

    ``loss``: rework and restart of these failures, a part of the run, first order.
    """

    name: str
    survives: str
    cadence_s: float
    lag_s: float
    takes_s: float
    """The way to it alone."""
    restart_s: float
    load_s: float
    """Reading one checkpoint back from it, part of the restart."""
    share: float
    loss: float
    disturbs_s: float
    """What one more checkpoint in it costs the training beyond the pause, in seconds of steps."""


def tiers_of(
    inputs: Inputs, sizes: Sizes, hops: tuple[Hop, ...], drain: Drain, busy: Mapping[str, float]
) -> tuple[Tier, ...]:
    """The tiers that are on, from the nearest; what needs one that is off goes farther.

    ``busy``: seconds in which a checkpoint on its way to a tier disturbs training.
    """
    checkpoint, failures, cluster = inputs.checkpoint, inputs.failures, inputs.cluster
    seconds = {hop.name: hop.seconds for hop in hops}
    node_bytes = hops[-1].nbytes / inputs.nodes  # what a node reads at a restart
    peer_read = min(cluster.peer_bytes_per_s, cluster.nvme_read_bytes_per_s)
    local_s = seconds.get("nvme", 0.0)
    peer_s = seconds.get("peer", 0.0)
    tiers: list[Tier] = []
    carried = 0.0

    def add(
        name: str, share: float, cadence_s: float, takes_s: float, lag_s: float,
        restart_s: float, load_s: float,
    ) -> None:  # fmt: skip
        nonlocal carried
        share += carried
        carried = 0.0
        tiers.append(
            Tier(
                name=name,
                survives=SURVIVES[name],
                cadence_s=cadence_s,
                lag_s=lag_s,
                takes_s=takes_s,
                restart_s=restart_s,
                load_s=load_s,
                share=share,
                loss=0.0,
                disturbs_s=checkpoint.interference * busy.get(name, 0.0),
            )
        )

    add("memory", failures.share_memory, checkpoint.cadence_s, seconds["d2h"], 0.0,
        failures.restart_memory_s, seconds["d2h"])  # fmt: skip
    carried = failures.share_local
    if checkpoint.local:
        add("local", 0.0, checkpoint.cadence_s, local_s, local_s,
            failures.restart_local_s, node_bytes / cluster.nvme_read_bytes_per_s)  # fmt: skip
    carried += failures.share_peer
    if checkpoint.mirror:
        add("peer", 0.0, checkpoint.peer_cadence_s, peer_s, local_s + peer_s,
            failures.restart_peer_s, node_bytes / peer_read)  # fmt: skip
    add("durable", failures.share_durable, checkpoint.durable_cadence_s, drain.seconds,
        local_s + drain.seconds, failures.restart_durable_s,
        read_s(inputs, sizes, node_bytes))  # fmt: skip
    return tuple(tiers)


def with_losses(
    tiers: tuple[Tier, ...], levels: tuple[Level, ...], mtbf_s: float
) -> tuple[Tier, ...]:
    """``tiers`` with what the failures that leave each cost, wherever they are recovered from."""
    return tuple(
        replace(
            tier,
            loss=level.share * (level.cadence_s / 2 + level.lag_s + level.restart_s) / mtbf_s,
        )
        for tier, level in zip(tiers, levels, strict=True)
    )


def is_near(tier: Tier, near_s: float) -> bool:
    """Whether a tier takes every checkpoint, so that it follows the near cadence."""
    return tier.name != "durable" and tier.cadence_s == near_s


def disturbed_s(
    tiers: tuple[Tier, ...], *, near_s: float, cadence_s: float, interference: float
) -> float:
    """What all drains of one near cadence cost, in seconds of steps, at ``cadence_s``.

    Tiers that follow the near cadence (``near_s`` as given) cost it every time, others by theirs.
    """
    cost_s = 0.0
    for tier in tiers:
        own_s = cadence_s if is_near(tier, near_s) else max(tier.cadence_s, cadence_s)
        cost_s += tier.disturbs_s * cadence_s / own_s
    return min(cost_s, interference * cadence_s)


def best_of(tier: Tier, *, near_s: float, mtbf_s: float) -> float | None:
    """The best cadence of a tier, in seconds, where the nearest has ``near_s``; None: never.

    A copy farther out costs no pause, only what it disturbs: Young's form with that cost and the
    failures that need it. Not more often than the nearest, and not before the last copy is done.
    """
    if tier.name in ("memory", "local"):
        return near_s
    if not tier.share:
        return None
    return max(near_s, tier.takes_s, young_s(tier.disturbs_s, mtbf_s / tier.share))


def levels_of(tiers: tuple[Tier, ...], near_s: float) -> tuple[Level, ...]:
    """Kinds of failure by the tier they leave, with the shortest cadence first.

    What leaves a near tier may also be recovered from one farther out with a shorter cadence.
    """
    levels: list[Level] = []
    chosen = tiers[-1]
    for tier in reversed(tiers):
        if tier.cadence_s <= chosen.cadence_s:
            chosen = tier
        levels.insert(
            0,
            Level(
                share=tier.share,
                cadence_s=chosen.cadence_s,
                lag_s=chosen.lag_s,
                restart_s=chosen.restart_s,
                near=is_near(chosen, near_s),
            ),
        )
    return tuple(levels)
