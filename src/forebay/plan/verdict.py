"""What has to be true: conditions of a short pause, goals beside them, and what would meet them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from forebay.plan import hops, losses
from forebay.plan.arithmetic import Plan, goodput_of
from forebay.plan.figure import Kind
from forebay.units import show_bytes, show_fraction, show_rate, show_seconds

IN_PLACE_S = 65.0
"""Restart without a requeue at 16,384 GPUs: ByteRobust (arXiv 2509.16293), Table 7."""
_LEAST_GOODPUT = 0.1
_ROOM = 1.25  # a cadence this much longer than the drain leaves it room for a bad day


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """``need`` and ``have`` in the SI unit of ``kind``; ``change``: what to do where it fails."""

    name: str
    holds: bool
    need: float
    have: float
    kind: Kind
    most: bool
    """Whether ``need`` is the most that may be, not the least."""
    why: str
    change: str

    @property
    def need_text(self) -> str:
        """Need with its unit, as ``at least 3.6 GB/s``."""
        return f"{'at most' if self.most else 'at least'} " + self.kind.bound(
            self.need, up=not self.most
        )

    @property
    def words(self) -> str:
        """Why, and where it fails what to change."""
        return self.why if self.holds else f"{self.why}. Change: {self.change}"

    @property
    def have_text(self) -> str:
        """Have with its unit."""
        return self.kind.show(self.have)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A loss against the goal: as it is, and whether it holds."""

    name: str
    value: float
    goal: float
    holds: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Cadences and a restart with which the total loss meets the goal. Times in seconds."""

    restart_s: float
    best_cadence_s: float
    longest_cadence_s: float
    durable_cadence_s: float
    total_at_best: float
    text: str


def holds(plan: Plan) -> bool:
    """Whether every condition holds."""
    return all(condition.holds for condition in conditions_of(plan))


def conditions_of(plan: Plan) -> tuple[Condition, ...]:
    """Each with need, have, whether it holds, and what to change."""
    inputs, sizes, drain = plan.inputs, plan.sizes, plan.drain
    checkpoint, cluster, storage = inputs.checkpoint, inputs.cluster, inputs.storage
    limit_s, pause = checkpoint.pause_limit_s, plan.pause
    factor = 1 + pause.tail_s / pause.copy_s
    left_s = limit_s - checkpoint.fixed_s  # where nothing is left, "fixed cost" says so
    copy, _ = hops.copy_rate(inputs, sizes)
    found = [
        _most(
            "pause",
            limit_s,
            pause.total_s,
            Kind.SECONDS,
            "the barrier waits for the copy of the slowest rank, and for nothing else",
            "pinned memory, an even sharding, every rank its own shard",
        ),
        _most(
            "fixed cost",
            max(limit_s - pause.copy_s * factor, 0.0),
            checkpoint.fixed_s,
            Kind.SECONDS,
            "no collective, planning round or allocation inside the pause: planning anew took 62 s "
            "at 405B on 8,960 GPUs (ByteCheckpoint)",
            "plan and allocate before the first step",
        ),
        _least(
            "device to host",
            sizes.largest_gpu_bytes * factor / (left_s if left_s > 0 else limit_s),
            copy,
            Kind.RATE,
            f"{show_bytes(sizes.largest_gpu_bytes)} a GPU within the limit, the slowest rank too",
            "pinned memory; smaller shards: every rank writes its own",
        ),
        _least(
            "host memory",
            plan.memory.arena_bytes_per_node,
            cluster.host_memory_bytes * cluster.host_share,
            Kind.BYTES,
            f"{checkpoint.slots} slots a rank, touched before the first step",
            "fewer slots, every rank its own shard, or more of the host's memory",
        ),
    ]
    near = [hop for hop in plan.hops if hop.name in ("nvme", "peer")]
    found.append(
        _most(
            "free slot",
            checkpoint.cadence_s * checkpoint.slots,
            sum(hop.seconds for hop in near) if near else drain.seconds,
            Kind.SECONDS,
            f"a slot is free again when its next turn comes, {checkpoint.slots} cadences later"
            + ("" if near else "; without a near tier it waits for the durable one"),
            "a local tier, faster disks, more slots, or a longer cadence",
        )
    )
    if near:
        found.append(
            _least(
                "local disks",
                sizes.bytes_per_node * len(near) / checkpoint.cadence_s,
                cluster.nvme_bytes_per_s,
                Kind.RATE,
                "own images and those of a peer are written within a cadence",
                "more or faster disks, or a longer cadence",
            )
        )
        found.append(
            _least(
                "room on local disks",
                plan.memory.nvme_bytes_per_node,
                cluster.nvme_capacity_bytes,
                Kind.BYTES,
                f"{checkpoint.local_keep} kept and one being written, own and a peer's",
                "keep fewer, or larger disks",
            )
        )
    if checkpoint.mirror:
        found.append(
            _least(
                "link to the peer",
                sizes.bytes_per_node / checkpoint.peer_cadence_s,
                cluster.peer_bytes_per_s,
                Kind.RATE,
                "a node's bytes reach its peer within the peer cadence",
                "a faster link, or a longer peer cadence",
            )
        )
    found.append(
        _least(
            "drain",
            drain.average_bytes_per_s,
            drain.paced_bytes_per_s,
            Kind.RATE,
            f"{show_bytes(sizes.checkpoint_bytes)} drain in {show_seconds(drain.seconds)}, within "
            f"the durable cadence of {show_seconds(checkpoint.durable_cadence_s)}",
            f"a durable cadence of {Kind.SECONDS.bound(drain.seconds, up=True)} or more, a "
            "larger budget, or a faster store",
        )
    )
    # a rate that was given is meant; a budget is only the most that may be
    asked = (
        drain.average_bytes_per_s
        if storage.drain_bytes_per_s is None
        else (drain.wanted_bytes_per_s)
    )
    found.append(
        _least(
            "link to the store",
            asked / sizes.writing_nodes,
            storage.per_node_bytes_per_s,
            Kind.RATE,
            "what one node has to drain passes its own link",
            "a longer durable cadence, or more nodes that write"
            if storage.drain_bytes_per_s is None
            else "a lower drain rate",
        )
    )
    if storage.filesystem_bytes_per_s is not None:
        found.append(
            _least(
                "share of the filesystem",
                max(drain.average_bytes_per_s, drain.wanted_bytes_per_s),
                storage.filesystem_bytes_per_s * storage.budget,
                Kind.RATE,
                f"the drain stays within {show_fraction(storage.budget)} of "
                f"{show_rate(storage.filesystem_bytes_per_s)}",
                "a longer durable cadence, a lower drain rate, or a larger budget",
            )
        )
    if plan.requests.limit_per_s is not None:
        found.append(
            _least(
                "requests",
                plan.requests.requests * asked / sizes.checkpoint_bytes,
                plan.requests.limit_per_s,
                Kind.PER_S,
                f"{plan.requests.requests:,} requests for {plan.requests.objects:,} objects, "
                "spread over the drain",
                "more prefixes, larger parts, or a slower drain",
            )
        )
    # the one of those in use whose restart leaves the least beside its reading
    tier = max(
        (each for each in plan.tiers if each.share), key=lambda one: one.load_s / one.restart_s
    )
    found.append(
        _least(
            "restart",
            tier.load_s,
            tier.restart_s,
            Kind.SECONDS,
            f"a restart from the {tier.name} tier reads the checkpoint back, all nodes at once",
            f"expect a longer restart from the {tier.name} tier, or read faster",
        )
    )
    found.append(
        _least(
            "progress",
            _LEAST_GOODPUT,
            plan.goodput,
            Kind.FRACTION,
            "the run advances between two interruptions",
            "a shorter cadence, a faster restart, or fewer failures",
        )
    )
    return tuple(found)


def goals_of(plan: Plan) -> tuple[Goal, ...]:
    """The synchronous loss, the pause alone and the total, each against the goal."""
    goal, cadence = plan.inputs.checkpoint.goal, show_seconds(plan.inputs.checkpoint.cadence_s)
    limit = show_fraction(goal)
    sync, pause, total = plan.sync, plan.pause, plan.losses
    return (
        _goal(
            "sync",
            sync.loss_fraction,
            goal,
            f"a synchronous write takes {show_seconds(sync.write_s)}, "
            f"{show_fraction(sync.loss_fraction)} of a cadence of {cadence}: "
            f"under {limit} only from "
            f"{show_rate(sync.bytes_per_s_for_goal)}",
        ),
        _goal(
            "pause",
            pause.loss_fraction,
            goal,
            f"the pause alone, {show_seconds(pause.total_s)}, is "
            f"{show_fraction(pause.loss_fraction)} "
            f"of a cadence of {cadence}",
        ),
        _goal(
            "total",
            total.total,
            goal,
            f"all together {show_fraction(total.total)}: rework {show_fraction(total.rework)}, "
            f"restart {show_fraction(total.restart)}; a shorter pause does not change these",
        ),
    )


def way_to_goal(plan: Plan) -> Way | None:
    """What brings the total under the goal: near cadence, durable cadence and restart.

    The first of these that meets it: restart and durable cadence as they are, a durable cadence as
    short as the drain allows, a restart in place, and at last the longest restart that meets it.
    No restart is shorter than the reading in it. The plan with these in it meets the goal. None
    where it is met already, and where nothing of this is enough.
    """
    if plan.losses.total < plan.inputs.checkpoint.goal:
        return None
    given_s = plan.inputs.checkpoint.durable_cadence_s
    short_s = plan.drain.seconds * _ROOM
    if given_s >= plan.drain.seconds:
        short_s = min(given_s, short_s)
    reads_s = Kind.SECONDS.rounded(_reads_s(plan), up=True)
    as_is_s = max(reads_s, *(tier.restart_s for tier in plan.tiers))
    for restart_s in (as_is_s, min(as_is_s, max(IN_PLACE_S, reads_s))):
        for durable_s in (max(given_s, short_s), short_s):
            if way := _way(plan, restart_s, durable_s):
                return way
    return _with_longest_restart(plan, short_s, reads_s, as_is_s)


def _reads_s(plan: Plan) -> float:
    return max(tier.load_s for tier in plan.tiers if tier.share)


def needs(plan: Plan) -> str | None:
    """What the total needs to be under the goal, in words; None where it is."""
    if plan.losses.total < plan.inputs.checkpoint.goal:
        return None
    way = way_to_goal(plan)
    return no_way(plan) if way is None else way.text


def no_way(plan: Plan) -> str:
    """Why there is no ``way_to_goal``: what pause, store and failures leave."""
    checkpoint, mtbf_s = plan.inputs.checkpoint, plan.inputs.failures.mtbf_s
    longest_s = checkpoint.goal**2 * mtbf_s / 2  # Young: the best cadence loses sqrt(2 d / M)
    if plan.pause.total_s > longest_s:
        return (
            f"a pause of {Kind.SECONDS.bound(longest_s, up=False)} or less: with one of "
            f"{show_seconds(plan.pause.total_s)} even the best cadence loses more (sqrt(2 d / M))"
        )
    if _way(plan, IN_PLACE_S, 0.0, at_once=True):
        return (
            "a faster way to the durable tier and back: a drain of "
            f"{show_seconds(plan.drain.seconds)} and a reading of {show_seconds(_reads_s(plan))} "
            "lose more than the rest"
        )
    return "fewer failures, or tiers that survive more of them: no cadence and no restart is enough"


def _way(plan: Plan, restart_s: float, durable_s: float, *, at_once: bool = False) -> Way | None:
    """The longest near cadence that meets the goal with these, the durable a multiple of it.

    ``at_once``: as if nothing took time on its way to the durable tier.
    """
    inputs, mtbf_s, goal = plan.inputs, plan.inputs.failures.mtbf_s, plan.inputs.checkpoint.goal
    levels = tuple(
        losses.Level(
            share=tier.share,
            cadence_s=plan.cadence.given_s if tier.name != "durable" else durable_s,
            lag_s=0.0 if at_once and tier.name == "durable" else tier.lag_s,
            restart_s=min(tier.restart_s, restart_s),
            near=tier.name != "durable",
        )
        for tier in plan.tiers
    )
    tiers = tuple(
        replace(tier, cadence_s=level.cadence_s)
        for tier, level in zip(plan.tiers, levels, strict=True)
    )
    cost_s = plan.pause.total_s + sum(
        tier.disturbs_s for tier in plan.tiers if tier.name != "durable"
    )
    shortest_s = 0.0
    if not at_once:
        shortest_s = hops.shortest_cadence_s(inputs, plan.sizes, plan.drain)
    best_s = losses.best_cadence_s(levels, pause_s=cost_s, mtbf_s=mtbf_s, shortest_s=shortest_s)

    def total(cadence_s: float) -> float:
        at = losses.at_cadence(levels, cadence_s)
        return 1 - goodput_of(inputs, tiers, at, plan.pause.total_s)

    if total(best_s) >= goal:
        return None
    low, high = best_s, best_s
    while total(high) < goal and high < mtbf_s:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < goal else (low, middle)
    # said in round figures, which are right as they are said
    longest_s = max(Kind.SECONDS.rounded(low, up=False), best_s)
    while longest_s > best_s and total(longest_s) >= goal:  # a multiple more of the durable one
        longest_s = max(Kind.SECONDS.rounded(longest_s * 0.98, up=False), best_s)
    durable_s = ceil(max(durable_s, longest_s) / longest_s - 1e-9) * longest_s
    on = " and ".join(tier.name for tier in plan.tiers if tier.name != "durable")
    return Way(
        restart_s=restart_s,
        best_cadence_s=best_s,
        longest_cadence_s=longest_s,
        durable_cadence_s=durable_s,
        total_at_best=total(best_s),
        text=f"restart within {Kind.SECONDS.bound(restart_s, up=False)}, a checkpoint to {on} "
        f"every {Kind.SECONDS.bound(longest_s, up=False)} (best {show_seconds(best_s)}: "
        f"{show_fraction(total(best_s))}), a durable one every "
        f"{Kind.SECONDS.bound(durable_s, up=False)}",
    )


def _with_longest_restart(plan: Plan, durable_s: float, low_s: float, high_s: float) -> Way | None:
    found = _way(plan, low_s, durable_s)
    if found is None:
        return None
    for _ in range(30):
        middle_s = (low_s + high_s) / 2
        way = _way(plan, middle_s, durable_s)
        low_s, high_s = (low_s, middle_s) if way is None else (middle_s, high_s)
    restart_s = max(Kind.SECONDS.rounded(low_s, up=False), found.restart_s)
    return _way(plan, restart_s, durable_s) or found


def _least(name: str, need: float, have: float, kind: Kind, why: str, change: str) -> Condition:
    return Condition(
        name=name,
        holds=have >= need,
        need=need,
        have=have,
        kind=kind,
        most=False,
        why=why,
        change=change,
    )


def _most(name: str, need: float, have: float, kind: Kind, why: str, change: str) -> Condition:
    return Condition(
        name=name,
        holds=have <= need,
        need=need,
        have=have,
        kind=kind,
        most=True,
        why=why,
        change=change,
    )


def _goal(name: str, value: float, goal: float, text: str) -> Goal:
    return Goal(name=name, value=value, goal=goal, holds=value < goal, text=text)
