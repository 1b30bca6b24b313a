"""A simulation as one document of plain values: SI units, nothing of the machine or the moment."""

from __future__ import annotations

from typing import Any

from forebay.plan.compare import Comparison, Row
from forebay.plan.document import inputs_of
from forebay.plan.inputs import TIERS, value_of
from forebay.plan.load import Load
from forebay.plan.scenario import NS, Scenario
from forebay.plan.simulate import Simulation
from forebay.plan.story import Story
from forebay.plan.tally import COUNTS, PARTS

KINDS = ("process", "host", "node", "rack")
"""Failures by the nearest tier that they leave, in the order of ``TIERS``."""
SOURCES = (*TIERS, "nothing")
"""What a run goes back to after one."""


def simulation_document(found: Simulation) -> dict[str, Any]:
    """All of a simulation, its inputs too. Parts of time are parts of 1 and add up to 1."""
    inputs = found.scenario.plan.inputs
    return {"title": inputs.title, **_figures(found), "inputs": inputs_of(inputs)}


def comparison_document(found: Comparison) -> dict[str, Any]:
    """Every row of a comparison. ``value``: of the input that was varied, in its SI unit."""
    variable = found.variable
    return {
        "variable": None if variable is None else variable.name,
        "unit": None if variable is None else variable.given.kind.value,
        "rows": [_row(row) for row in found.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "value": row.value,
        "strategy": row.strategy.value,
        "cadence_s": row.cadence_s,
        "durable_cadence_s": row.durable_cadence_s,
        "stuck": row.stuck,
        "simulation": None if row.simulation is None else _figures(row.simulation),
    }


def _figures(found: Simulation) -> dict[str, Any]:
    tally, scenario = found.tally, found.scenario
    plan = scenario.plan
    return {
        "strategy": scenario.strategy.value,
        "runs": found.runs,
        "days": found.days,
        "seed": found.seed,
        "nodes": plan.inputs.nodes,
        "scenario": _scenario(scenario),
        "goodput": {
            "mean": found.goodput,
            "standard_error": found.standard_error,
            "least": min(found.goodputs),
            "most": max(found.goodputs),
            "each": list(found.goodputs),
        },
        "planned_goodput": plan.goodput if scenario.tiers[0] else None,
        "parts": {name: found.part(name) for name in PARTS},
        "seconds": {
            "total": tally.total_ns / NS,
            **{name: getattr(tally, f"{name}_ns") / NS for name in PARTS},
        },
        "pause_s": tally.pauses.document(NS),
        "reached_s": {
            name: tally.reached[index].document(NS)
            for index, name in enumerate(TIERS)
            if scenario.tiers[index]
        },
        "checkpoints": {name: getattr(tally, name) for name in COUNTS},
        "failures": dict(zip(KINDS, tally.failures, strict=True)),
        "recovered_from": dict(zip(SOURCES, tally.recovered, strict=True)),
        "lost_work_s": {**tally.lost.document(NS), "total": tally.lost.total / NS},
        "restart_s": tally.restarts.document(NS),
        "filesystem": {**filesystem_of(found), "load": _load(found.load)},
        "first_run": _story(found.story),
    }


def _story(story: Story) -> dict[str, Any]:
    """Failures of the first run, in their order; those beyond the bound are counted alone."""
    return {
        "failures": [
            {
                "at_s": each.at_ns / NS,
                "kind": KINDS[each.kind],
                "went_back_to": SOURCES[each.source],
                "lost_s": each.lost_ns / NS,
            }
            for each in story.failures
        ],
        "left_out": story.left_out,
    }


def filesystem_of(found: Simulation) -> dict[str, Any]:
    """What the durable tier saw. Bytes/s; parts are of its rate, None where it has none."""
    tally, scenario = found.tally, found.scenario
    total = value_of(scenario.plan.inputs, "storage.filesystem")
    peak, mean = tally.peak_bytes_per_ns * NS, tally.drained_bytes / (tally.total_ns / NS)
    rate = float(total) if total is not None else None
    return {
        "peak_bytes_per_s": peak,
        "mean_bytes_per_s": mean,
        "asked_bytes_per_s": scenario.asked_bytes_per_s if peak else 0.0,
        "peak_share": None if rate is None else peak / rate,
        "asked_share": None if rate is None else (scenario.asked_bytes_per_s if peak else 0) / rate,
        "mean_share": None if rate is None else mean / rate,
        "busy_part": tally.drain_ns / tally.total_ns,
    }


def _load(load: Load) -> dict[str, Any]:
    """Of the first run: bytes/s on average in each bin, and the fastest in it."""
    width_s = load.bin_ns / NS
    return {
        "bin_s": width_s,
        "mean_bytes_per_s": [nbytes / width_s for nbytes in load.nbytes],
        "peak_bytes_per_s": [peak * NS for peak in load.peaks],
    }


def _scenario(scenario: Scenario) -> dict[str, Any]:
    return {
        "paced": scenario.paced,
        "tiers": [name for name, on in zip(TIERS, scenario.tiers, strict=True) if on],
        "cadence_s": scenario.cadence_ns / NS,
        "peer_every": scenario.peer_every if scenario.tiers[2] else None,
        "durable_every": scenario.durable_every,
        "mtbf_s": scenario.mtbf_s,
        "restart_s": {
            name: seconds
            for name, seconds, on in zip(TIERS, scenario.restart_s, scenario.tiers, strict=True)
            if on
        },
        "slots": scenario.slots,
        "drain_bytes_per_s": scenario.drain_bytes_per_s,
        "interference": scenario.interference,
    }
