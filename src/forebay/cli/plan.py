"""``forebay plan``: what a checkpoint takes and costs, and what has to be true for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from forebay.cli.output import NOT_MET, say_json
from forebay.cli.page import need_plots, write_page
from forebay.cli.plan_flags import inputs_given, option, with_flags
from forebay.plan.arithmetic import work, work_fleet
from forebay.plan.document import document_of
from forebay.plan.solve import solve
from forebay.plan.vary import POINTS, sweep
from forebay.plan.verdict import holds

_SEVERAL = list[str] | None


def plan(**given: Any) -> None:
    """Work out what a checkpoint costs and what has to be true for a short pause."""
    inputs = inputs_given(given)
    if given["html"] is not None:
        need_plots()
    solutions = tuple(solve(inputs, key) for key in given["solve"] or ())
    sweeps = tuple(sweep(inputs, text, points=given["points"]) for text in given["sweep"] or ())
    worked = work(inputs)
    fleet = work_fleet(worked)
    if given["html"] is not None:
        from forebay.plan.report import page_of

        write_page(given["html"], page_of(worked, fleet, solutions, sweeps))
    if given["as_json"]:
        say_json(document_of(worked, fleet, solutions, sweeps))
    else:
        from forebay.cli.plan_tables import show_plan  # rich: a document needs none of it

        show_plan(worked, fleet, solutions, sweeps, given["inputs"])
    if not holds(worked):
        raise typer.Exit(NOT_MET)


_OWN = (
    option("solve", _SEVERAL, "--solve", "For which values of this input does each goal hold?"),
    option("sweep", _SEVERAL, "--sweep", "VARIABLE=FROM:TO, as cadence=1min:60min."),
    option("points", int, "--points", "Values of a sweep.", default=POINTS),
    option("html", Path | None, "--html", "Write a report, one page with plots."),
    option("inputs", bool, "--inputs", "Show every input and its source.", default=False),
    option("as_json", bool, "--json", "One JSON document on stdout.", default=False),
)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan")(with_flags(plan, _OWN))
