"""The plan as one document of plain values: SI units, the names that others rely on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from forebay.plan.arithmetic import Plan, best_cadence_of, mean_tail_s
from forebay.plan.chain import chain_of
from forebay.plan.fleet import Fleet
from forebay.plan.inputs import FIELDS, Inputs, value_of
from forebay.plan.solve import Solution
from forebay.plan.vary import Sweep
from forebay.plan.verdict import conditions_of, goals_of, holds, needs, way_to_goal


def document_of(
    plan: Plan, fleet: Fleet, solutions: tuple[Solution, ...] = (), sweeps: tuple[Sweep, ...] = ()
) -> dict[str, Any]:
    """All of the plan. Times in seconds, sizes in bytes, losses as parts of 1."""
    sizes, drain, cadence = plan.sizes, plan.drain, plan.cadence
    return {
        "title": plan.inputs.title,
        "checkpoint_bytes": sizes.checkpoint_bytes,
        "bytes_per_node": sizes.bytes_per_node,
        "bytes_per_gpu": sizes.bytes_per_gpu,
        "largest_gpu_bytes": sizes.largest_gpu_bytes,
        "writers": sizes.writers,
        "sync": asdict(plan.sync),
        "pause": {**asdict(plan.pause), "mean_tail_s": mean_tail_s(plan)},
        "hops": [
            {
                "name": hop.name,
                "of": hop.of,
                "bytes": hop.nbytes,
                "bytes_per_s": hop.bytes_per_s,
                "seconds": hop.seconds,
                "requests_per_s": hop.requests_per_s,
                "bound": hop.bound,
            }
            for hop in plan.hops
        ],
        "drain": {
            "seconds": drain.seconds,
            "bytes_per_s": drain.average_bytes_per_s,
            "share_of_filesystem": drain.average_share,
            "fits_cadence": drain.fits_cadence,
            "exposure_s": drain.exposure_s,
            "paced_bytes_per_s": drain.paced_bytes_per_s,
            "paced_share_of_filesystem": drain.paced_share,
            "per_node_bytes_per_s": drain.per_node_bytes_per_s,
            "requests_per_s": drain.requests_per_s,
        },
        "requests": asdict(plan.requests),
        "memory": asdict(plan.memory),
        "losses": asdict(plan.losses),
        "cadence": asdict(cadence),
        "gpu_hours_lost": plan.gpu_hours_lost,
        "mfu_lost": plan.mfu_lost,
        "goodput": plan.goodput,
        "conditions": [
            {
                "name": each.name,
                "holds": each.holds,
                "need": each.need,
                "have": each.have,
                "unit": each.kind.value,
                "at": "most" if each.most else "least",
                "why": each.why,
                "change": None if each.holds else each.change,
            }
            for each in conditions_of(plan)
        ],
        "holds": holds(plan),
        "goals": [asdict(goal) for goal in goals_of(plan)],
        "way_to_goal": None if (way := way_to_goal(plan)) is None else asdict(way),
        "needs": needs(plan),
        "tiers": [
            {**asdict(tier), "best_cadence_s": best_cadence_of(plan, tier)} for tier in plan.tiers
        ],
        "fleet": _fleet(fleet),
        "chain": [asdict(line) for line in chain_of(plan)],
        "solve": [_solution(each) for each in solutions],
        "sweep": [_sweep(each) for each in sweeps],
        "inputs": inputs_of(plan.inputs),
    }


def inputs_of(inputs: Inputs) -> dict[str, dict[str, Any]]:
    """Every input by ``section.key``: value, unit, as people read it, and where it comes from."""
    found = {}
    for name, (_, given) in FIELDS.items():
        value = value_of(inputs, name)
        if value is not None:
            found[name] = {
                "value": value,
                "unit": given.kind.value,
                "text": given.kind.show(value),
                "source": inputs.sources.get(name, ""),
            }
    return found


def _fleet(fleet: Fleet) -> dict[str, Any]:
    rows = [{"mfu": mfu, "train_s": train_s} for mfu, train_s in fleet.mfu_sensitivity]
    return {**asdict(fleet), "mfu_sensitivity": rows}


def _solution(solution: Solution) -> dict[str, Any]:
    return {
        "variable": solution.variable.name,
        "unit": solution.variable.given.kind.value,
        "now": solution.now,
        "looked": list(solution.looked),
        "goals": [asdict(bound) for bound in solution.bounds],
    }


def _sweep(sweep: Sweep) -> dict[str, Any]:
    return {
        "variable": sweep.variable.name,
        "unit": sweep.variable.given.kind.value,
        "points": [
            {
                "value": value,
                "pause_s": plan.pause.total_s,
                "sync_loss": plan.sync.loss_fraction,
                "losses": asdict(plan.losses),
                "goodput": plan.goodput,
                "drain_s": plan.drain.seconds,
                "drain_fits": plan.drain.fits_cadence,
                "holds": holds(plan),
            }
            for value, plan in zip(sweep.values, sweep.plans, strict=True)
        ],
    }
