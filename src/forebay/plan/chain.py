"""The plan worked line by line, as on a whiteboard: what times what is what."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.plan.arithmetic import Plan
from forebay.units import show_bytes, show_count, show_fraction, show_rate, show_seconds

_OF = {
    "d2h": "device to host",
    "nvme": "to local disks",
    "peer": "to the peer",
    "durable": "to the durable tier, all at once",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One step: what it is, how it is worked, what comes out."""

    name: str
    working: str
    result: str


def chain_of(plan: Plan) -> tuple[Line, ...]:
    """From parameters to seconds and shares, one line a step."""
    return (*_sizes(plan), *_hops(plan), *_pause(plan), *_behind(plan), *_lost(plan))


def _sizes(plan: Plan) -> list[Line]:
    inputs, sizes = plan.inputs, plan.sizes
    model, total = inputs.model, show_bytes(sizes.checkpoint_bytes)
    who = "all of them write" if inputs.layout.writers == "every" else "one replica writes"
    lines = [
        _line(
            "checkpoint",
            f"{show_count(model.params)} parameters x {model.bytes_per_param:g} B",
            total,
        ),
        _line("a node", f"{total} / {sizes.writing_nodes:,} nodes", _fine(sizes.bytes_per_node)),
        _line("a GPU", f"{total} / {sizes.writers:,} GPUs ({who})", _fine(sizes.bytes_per_gpu)),
    ]
    if inputs.layout.skew != 1:
        lines.append(
            _line(
                "largest shard",
                f"{_fine(sizes.bytes_per_gpu)} x {inputs.layout.skew:g}",
                _fine(sizes.largest_gpu_bytes),
            )
        )
    return lines


def _hops(plan: Plan) -> list[Line]:
    return [
        _line(
            _OF[hop.name],
            f"{_fine(hop.nbytes)} of {hop.of} / {show_rate(hop.bytes_per_s)} ({hop.bound})",
            show_seconds(hop.seconds),
        )
        for hop in plan.hops
    ]


def _pause(plan: Plan) -> list[Line]:
    checkpoint, sync, pause = plan.inputs.checkpoint, plan.sync, plan.pause
    cadence = show_seconds(checkpoint.cadence_s)
    durable = plan.hops[-1]
    lines = [
        _line(
            "synchronous write",
            f"{show_bytes(durable.nbytes)} / {show_rate(durable.bytes_per_s)}",
            show_seconds(sync.write_s),
        ),
        _line(
            "... of the run",
            f"{show_seconds(sync.write_s)} / {cadence}",
            show_fraction(sync.loss_fraction),
        ),
        _line(
            f"... under {show_fraction(checkpoint.goal)} from",
            f"{show_bytes(durable.nbytes)} / ({show_fraction(checkpoint.goal)} x {cadence})",
            show_rate(sync.bytes_per_s_for_goal),
        ),
    ]
    if pause.given:
        lines.append(_line("asynchronous pause", "as given", show_seconds(pause.total_s)))
    else:
        tail = (
            f"slowest of {plan.sizes.writers:,} in {show_fraction(checkpoint.quantile)} of saves, "
            f"{checkpoint.tail} {checkpoint.spread:g}"
        )
        lines.append(
            _line(
                "asynchronous pause",
                f"fixed {show_seconds(pause.fixed_s)} + copy {show_seconds(pause.copy_s)} + tail "
                f"{show_seconds(pause.tail_s)} ({tail})",
                show_seconds(pause.total_s),
            )
        )
    lines.append(
        _line(
            "... of the run",
            f"{show_seconds(pause.total_s)} / {cadence}",
            show_fraction(pause.loss_fraction),
        )
    )
    return lines


def _behind(plan: Plan) -> list[Line]:
    inputs, drain, sizes = plan.inputs, plan.drain, plan.sizes
    checkpoint, requests = inputs.checkpoint, plan.requests
    durable = show_seconds(checkpoint.durable_cadence_s)
    share = (
        ""
        if drain.average_share is None
        else f", {show_fraction(drain.average_share)} of the filesystem"
    )
    paced = (
        "" if drain.paced_share is None else f", {show_fraction(drain.paced_share)} of it meanwhile"
    )
    fits = "fits" if drain.fits_cadence else "DOES NOT FIT"
    copies = int(checkpoint.local) + int(checkpoint.mirror)
    lines = [
        _line(
            "drain, on average",
            f"{show_bytes(sizes.checkpoint_bytes)} / {durable}",
            show_rate(drain.average_bytes_per_s) + share,
        ),
        _line(
            "drain, paced",
            f"{show_bytes(sizes.checkpoint_bytes)} / {show_rate(drain.paced_bytes_per_s)} "
            f"({show_rate(drain.per_node_bytes_per_s)} a node{paced})",
            f"{show_seconds(drain.seconds)}, {fits} {durable}",
        ),
        _line(
            "work not yet durable, on average",
            f"{durable} / 2 + {show_seconds(drain.seconds)}",
            show_seconds(drain.exposure_s),
        ),
        _line(
            "memory of a node",
            f"{checkpoint.slots} slots x {sizes.writers_per_node} ranks x "
            f"{_fine(sizes.largest_gpu_bytes)}",
            show_bytes(plan.memory.arena_bytes_per_node),
        ),
    ]
    if copies:
        lines.append(
            _line(
                "local disks of a node",
                f"({checkpoint.local_keep} kept + 1) x {copies} copies x "
                f"{show_bytes(sizes.bytes_per_node)}",
                show_bytes(plan.memory.nvme_bytes_per_node),
            )
        )
    limit = (
        "no limit stated"
        if requests.limit_per_s is None
        else f"limit {show_count(requests.limit_per_s)}/s"
    )
    lines.append(
        _line(
            "requests",
            f"{requests.requests:,} for {requests.objects:,} objects / "
            f"{show_seconds(drain.seconds)}",
            f"{show_count(drain.requests_per_s)}/s, {limit}",
        )
    )
    return lines


def _lost(plan: Plan) -> list[Line]:
    failures, found, cadence = plan.inputs.failures, plan.losses, plan.cadence
    mtbf = show_seconds(failures.mtbf_s)
    ages = " + ".join(
        f"{show_fraction(level.share)} x ({show_seconds(level.cadence_s)} / 2 + "
        f"{show_seconds(level.lag_s)})"
        for level in plan.levels
        if level.share
    )
    back = " + ".join(
        f"{show_fraction(level.share)} x {show_seconds(level.restart_s)}"
        for level in plan.levels
        if level.share
    )
    return [
        _line("loss to rework", f"({ages}) / {mtbf}", show_fraction(found.rework)),
        _line("loss to restart", f"({back}) / {mtbf}", show_fraction(found.restart)),
        _line(
            "loss to interference",
            " + ".join(
                f"{show_seconds(tier.disturbs_s)} / {show_seconds(tier.cadence_s)}"
                for tier in plan.tiers
                if tier.disturbs_s
            )
            or "nothing",
            show_fraction(found.interference),
        ),
        _line(
            "together",
            "exact: Poisson failures, in pauses and restarts too",
            f"{show_fraction(found.total)}, goodput {show_fraction(plan.goodput)}",
        ),
        _line(
            "best cadence",
            f"exact; Young {show_seconds(cadence.young_s)}, Daly {show_seconds(cadence.daly_s)}",
            f"{show_seconds(cadence.best_s)}, {show_fraction(cadence.best_total)} lost, durable "
            f"every {show_seconds(plan.tiers[-1].cadence_s)}",
        ),
        _line(
            "GPU-hours lost",
            f"{plan.inputs.cluster.gpus:,} GPUs x {show_seconds(plan.inputs.training.run_s)} x "
            f"{show_fraction(found.total)}",
            show_count(round(plan.gpu_hours_lost)),
        ),
        _line(
            "MFU lost",
            f"{show_fraction(plan.inputs.training.mfu)} x {show_fraction(found.total)}",
            f"{plan.mfu_lost * 100:.3g} points",
        ),
    ]


def _fine(nbytes: float) -> str:
    """Bytes with four figures, as sums of a whiteboard need them."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.0f} B"


def _line(name: str, working: str, result: str) -> Line:
    return Line(name=name, working=working, result=result)
