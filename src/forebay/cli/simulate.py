"""``forebay simulate``: the plan played out over a whole run with failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from forebay.cli.output import say_aside, say_json, write_text
from forebay.cli.page import need_plots, write_page
from forebay.cli.plan_flags import inputs_given, option, with_flags
from forebay.errors import UsageError
from forebay.plan.arithmetic import work
from forebay.plan.compare import FAR_S, NEAR_S, compare
from forebay.plan.inputs import FIELDS, Inputs
from forebay.plan.resolve import DAY_S
from forebay.plan.scenario import Strategy, scenario_of
from forebay.plan.sim_document import comparison_document, simulation_document
from forebay.plan.simulate import RUNS, SEED, simulate
from forebay.plan.trace import trace_of

_ONLY_COMPARED = ("vary", "near_cadence", "far_cadence")
_ONLY_SINGLE = ("strategy", "no_pacing", "trace")
_TEXT = str | None
_, _CADENCE = FIELDS["checkpoint.cadence"]


def play(**given: Any) -> None:
    """Play a run with failures: pauses, tiers, lost work, goodput, and the filesystem's load."""
    inputs = inputs_given(given)
    days = inputs.training.run_s / DAY_S if given["days"] is None else given["days"]
    bounds = {"runs": given["runs"], "days": days, "seed": given["seed"]}
    for name in _ONLY_SINGLE if given["compare"] else _ONLY_COMPARED:
        if given[name]:
            how = "without" if given["compare"] else "with"
            raise UsageError(f"{_flag(name)}: expected {how} --compare, found the opposite")
    if given["html"] is not None:
        need_plots()
    if given["compare"]:
        _compare(inputs, given, bounds)
    else:
        _single(inputs, given, bounds)


def _single(inputs: Inputs, given: dict[str, Any], bounds: dict[str, Any]) -> None:
    strategy = _strategy(given["strategy"])
    scenario = scenario_of(work(inputs, best=False), strategy, paced=not given["no_pacing"])
    found = simulate(scenario, **bounds)
    if given["trace"] is not None:
        import msgspec

        text = msgspec.json.encode(trace_of(scenario, seed=bounds["seed"])).decode()
        write_text(given["trace"], text + "\n", "--trace")
        say_aside(f"trace: {given['trace']}: open it in chrome://tracing or ui.perfetto.dev")
    if given["html"] is not None:
        from forebay.plan.sim_report import simulation_page

        write_page(given["html"], simulation_page(found))
    if given["as_json"]:
        say_json(simulation_document(found))
    else:
        from forebay.cli.sim_tables import show_simulation

        show_simulation(found)


def _compare(inputs: Inputs, given: dict[str, Any], bounds: dict[str, Any]) -> None:
    near_s, far_s = (
        usual_s if (text := given[name]) is None else float(_CADENCE.read(text, _flag(name)))
        for name, usual_s in (("near_cadence", NEAR_S), ("far_cadence", FAR_S))
    )
    found = compare(inputs, given["vary"], near_s=near_s, far_s=far_s, **bounds)
    if given["html"] is not None:
        from forebay.plan.sim_report import comparison_page

        write_page(given["html"], comparison_page(found, inputs.title))
    if given["as_json"]:
        say_json({"title": inputs.title, **bounds, **comparison_document(found)})
    else:
        from forebay.cli.sim_tables import show_comparison

        show_comparison(found, inputs.title, **bounds)


def _strategy(text: str | None) -> Strategy:
    if text is None:
        return Strategy.TIERED
    known = [each.value for each in Strategy]
    if text.strip().lower() not in known:
        raise UsageError(f"--strategy: expected {' or '.join(known)}, found {text!r}")
    return Strategy(text.strip().lower())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_OWN = (
    option("strategy", _TEXT, "--strategy", "tiered, asynchronous or synchronous."),
    option("no_pacing", bool, "--no-pacing", "Drain as fast as the store takes it.", default=False),
    option("runs", int, "--runs", "Runs, each with chance of its own.", default=RUNS),
    option("days", float | None, "--days", "Length of a run in days; else that of the inputs."),
    option("seed", int, "--seed", "The same seed gives the same result.", default=SEED),
    option("compare", bool, "--compare", "All three strategies side by side.", default=False),
    option("vary", _TEXT, "--vary", "With --compare: VARIABLE=VALUE,VALUE ..."),
    option("near_cadence", _TEXT, "--near-cadence", "With --compare: local and peer, else 1min."),
    option("far_cadence", _TEXT, "--far-cadence", "With --compare: durable, else 15min."),
    option("trace", Path | None, "--trace", "Write one checkpoint as a Chrome trace."),
    option("html", Path | None, "--html", "Write a report, one page with plots."),
    option("as_json", bool, "--json", "One JSON document on stdout.", default=False),
)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("simulate")(with_flags(play, _OWN))
