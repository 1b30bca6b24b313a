"""What has to be true: conditions of a short pause, goals beside them, and what would meet them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forebay.plan import hops, losses
from forebay.plan.arithmetic import Plan, cost_of, goodput_of
from forebay.plan.figure import Kind
from forebay.plan.tiers import is_near
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
        return f"{'at most' if self.most else 'at least'} {self.kind.show(self.need)}"

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
            checkpoint.cadence_s * max(1, checkpoint.slots - 1),
            sum(hop.seconds for hop in near) if near else drain.seconds,
            Kind.SECONDS,
            "a slot is free again before the save after next needs it"
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
            f"a durable cadence of {show_seconds(drain.seconds)} or more, a larger budget, or a "
            "faster store",
        )
    )
    found.append(
        _least(
            "link to the store",
            drain.wanted_bytes_per_s / sizes.writing_nodes,
            storage.per_node_bytes_per_s,
            Kind.RATE,
            "the drain of one node, as budget or setting ask for it, passes its own link",
            "a lower drain rate",
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
                plan.requests.requests * drain.wanted_bytes_per_s / sizes.checkpoint_bytes,
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
    None where it is met already, and where nothing of this is enough.
    """
    if plan.losses.total < plan.inputs.checkpoint.goal:
        return None
    given_s = plan.inputs.checkpoint.durable_cadence_s
    short_s = plan.drain.seconds * _ROOM
    if given_s >= plan.drain.seconds:
        short_s = min(given_s, short_s)
    as_is_s = max(level.restart_s for level in plan.levels)
    for restart_s in (as_is_s, min(as_is_s, IN_PLACE_S)):
        for durable_s in (max(given_s, short_s), short_s):
            if way := _way(plan, restart_s, durable_s):
                return way
    longest_s = _longest_restart_s(plan, short_s)
    return None if longest_s is None else _way(plan, longest_s, short_s)


def needs(plan: Plan) -> str | None:
    """What the total needs to be under the goal, in words; None where it is."""
    if plan.losses.total < plan.inputs.checkpoint.goal:
        return None
    way = way_to_goal(plan)
    return no_way(plan) if way is None else way.text


def no_way(plan: Plan) -> str:
    """Why there is no ``way_to_goal``: what the pause and the failures leave."""
    checkpoint, mtbf_s = plan.inputs.checkpoint, plan.inputs.failures.mtbf_s
    longest_s = checkpoint.goal**2 * mtbf_s / 2  # Young: the best cadence loses sqrt(2 d / M)
    if plan.pause.total_s > longest_s:
        return (
            f"a pause of {show_seconds(longest_s)} or less: with one of "
            f"{show_seconds(plan.pause.total_s)} even the best cadence loses more (sqrt(2 d / M))"
        )
    return "fewer failures, or tiers that survive more of them: no cadence and no restart is enough"


def _way(plan: Plan, restart_s: float, durable_s: float) -> Way | None:
    mtbf_s, goal = plan.inputs.failures.mtbf_s, plan.inputs.checkpoint.goal
    cost_s = cost_of(plan.inputs, plan.tiers, plan.pause.total_s)
    levels = _changed(plan, restart_s, durable_s)
    tiers = tuple(
        tier if is_near(tier, plan.cadence.given_s) else replace(tier, cadence_s=durable_s)
        for tier in plan.tiers
    )
    shortest = sum(hop.seconds for hop in plan.hops if hop.name in ("nvme", "peer"))
    best_s = losses.best_cadence_s(levels, pause_s=cost_s, mtbf_s=mtbf_s, shortest_s=shortest)

    def total(cadence_s: float) -> float:
        at = losses.at_cadence(levels, cadence_s)
        return 1 - goodput_of(plan.inputs, tiers, at, plan.pause.total_s)

    at_best = total(best_s)
    if at_best >= goal:
        return None
    low, high = best_s, best_s
    while total(high) < goal and high < mtbf_s:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < goal else (low, middle)
    on = " and ".join(tier.name for tier in plan.tiers if tier.name != "durable")
    return Way(
        restart_s=restart_s,
        best_cadence_s=best_s,
        longest_cadence_s=low,
        durable_cadence_s=durable_s,
        total_at_best=at_best,
        text=f"restart within {show_seconds(restart_s)}, a checkpoint to {on} every "
        f"{show_seconds(low)} or less (best {show_seconds(best_s)}: {show_fraction(at_best)}), a "
        f"durable one every {show_seconds(durable_s)}",
    )


def _changed(plan: Plan, restart_s: float, durable_s: float) -> tuple[losses.Level, ...]:
    return tuple(
        replace(
            level,
            restart_s=min(level.restart_s, restart_s),
            cadence_s=level.cadence_s if level.near else durable_s,
        )
        for level in plan.levels
    )


def _longest_restart_s(plan: Plan, durable_s: float) -> float | None:
    if _way(plan, 1e-3, durable_s) is None:
        return None
    low, high = 1e-3, max(level.restart_s for level in plan.levels)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _way(plan, middle, durable_s) else (low, middle)
    return low


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
