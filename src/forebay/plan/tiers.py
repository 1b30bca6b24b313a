"""The tiers a checkpoint is in, what each survives, and what a failure therefore costs."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.plan.hops import Drain, Hop
from forebay.plan.inputs import Inputs
from forebay.plan.losses import Level

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
    restart_s: float
    load_s: float
    """Reading one checkpoint back from it, part of the restart."""
    share: float
    loss: float


def tiers_of(inputs: Inputs, hops: tuple[Hop, ...], drain: Drain) -> tuple[Tier, ...]:
    """The tiers that are on, from the nearest; what needs one that is off goes farther."""
    checkpoint, failures, cluster = inputs.checkpoint, inputs.failures, inputs.cluster
    by_name = {hop.name: hop for hop in hops}
    local_s = by_name["nvme"].seconds if checkpoint.local else 0.0
    peer_s = by_name["peer"].seconds if checkpoint.mirror else 0.0
    node_bytes = by_name["durable"].nbytes / max(1, inputs.nodes)
    storage = inputs.storage
    read = storage.per_node_read_bytes_per_s
    if storage.filesystem_read_bytes_per_s is not None:
        read = min(read, storage.filesystem_read_bytes_per_s / inputs.nodes)
    # name, on, cadence, lag, restart, load, share
    rows = [
        (
            "memory",
            True,
            checkpoint.cadence_s,
            0.0,
            failures.restart_memory_s,
            by_name["d2h"].seconds,
            failures.share_memory,
        ),
        (
            "local",
            checkpoint.local,
            checkpoint.cadence_s,
            local_s,
            failures.restart_local_s,
            node_bytes / cluster.nvme_read_bytes_per_s,
            failures.share_local,
        ),
        (
            "peer",
            checkpoint.mirror,
            checkpoint.peer_cadence_s,
            local_s + peer_s,
            failures.restart_peer_s,
            node_bytes / cluster.peer_bytes_per_s,
            failures.share_peer,
        ),
        (
            "durable",
            True,
            checkpoint.durable_cadence_s,
            drain.seconds,
            failures.restart_durable_s,
            node_bytes / read,
            failures.share_durable,
        ),
    ]
    tiers: list[Tier] = []
    carried = 0.0
    for name, on, cadence_s, lag_s, restart_s, load_s, share in rows:
        carried += share
        if not on:
            continue
        loss = carried * (cadence_s / 2 + lag_s + restart_s) / failures.mtbf_s
        tiers.append(
            Tier(
                name=name,
                survives=SURVIVES[name],
                cadence_s=cadence_s,
                lag_s=lag_s,
                restart_s=restart_s,
                load_s=load_s,
                share=carried,
                loss=loss,
            )
        )
        carried = 0.0
    return tuple(tiers)


def levels_of(tiers: tuple[Tier, ...], near_s: float) -> tuple[Level, ...]:
    """Kinds of failure by the tier they leave, with the shortest cadence first.

    What leaves a near tier may also be recovered from one farther out with a shorter cadence.
    """
    levels: list[Level] = []
    shortest = float("inf")
    for tier in reversed(tiers):
        shortest = min(shortest, tier.cadence_s)
        levels.insert(
            0,
            Level(
                share=tier.share,
                cadence_s=shortest,
                lag_s=tier.lag_s,
                restart_s=tier.restart_s,
                near=tier.name != "durable" and shortest == near_s,
            ),
        )
    return tuple(levels)
