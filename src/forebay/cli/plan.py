"""``forebay plan``: what a checkpoint takes and costs, and what has to be true for that."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.cli.output import NOT_MET, say_aside, say_json, write_text
from forebay.errors import UsageError
from forebay.plan import presets
from forebay.plan.arithmetic import Plan, work, work_fleet
from forebay.plan.document import document_of
from forebay.plan.figure import Figure
from forebay.plan.fleet import Fleet
from forebay.plan.inputs import FIELDS
from forebay.plan.resolve import RESTART, read_flags, resolve
from forebay.plan.solve import Solution, solve
from forebay.plan.vary import POINTS, Sweep, sweep
from forebay.plan.verdict import holds

_OWN_FLAGS = {f"failures.{RESTART.key}": RESTART}


def plan(**given: Any) -> None:
    """Work out what a checkpoint costs and what has to be true for a short pause."""
    chosen: dict[str, str] = {}
    figures: dict[str, Figure] = {}
    if given["file"] is not None:
        from forebay.cli.plan_file import read_yaml  # PyYAML takes 40 ms to load

        chosen, figures = read_yaml(given["file"])
    flags = {name: given[_parameter(name)] for name in (*_OWN_FLAGS, *FIELDS)}
    inputs = resolve(
        model=chosen.get("model") if given["preset"] is None else given["preset"],
        cluster=chosen.get("cluster") if given["cluster"] is None else given["cluster"],
        storage=chosen.get("storage") if given["storage"] is None else given["storage"],
        file=figures,
        flags=read_flags({name: text for name, text in flags.items() if text is not None}),
    )
    solutions = tuple(solve(inputs, key) for key in given["solve"] or ())
    sweeps = tuple(sweep(inputs, text, points=given["points"]) for text in given["sweep"] or ())
    worked = work(inputs)
    fleet = work_fleet(worked)
    if given["html"] is not None:
        _write_page(given["html"], worked, fleet, solutions, sweeps)
    if given["as_json"]:
        say_json(document_of(worked, fleet, solutions, sweeps))
    else:
        from forebay.cli.plan_tables import show_plan  # rich: a document needs none of it

        show_plan(worked, fleet, solutions, sweeps, given["inputs"])
    if not holds(worked):
        raise typer.Exit(NOT_MET)


def _write_page(
    path: Path,
    worked: Plan,
    fleet: Fleet,
    solutions: tuple[Solution, ...],
    sweeps: tuple[Sweep, ...],
) -> None:
    from forebay.plan.report import page_of

    try:
        text = page_of(worked, fleet, solutions, sweeps)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--html: {error.name} is not installed: pip install 'forebay[report]'"
        ) from None
    write_text(path, text, "--html")
    say_aside(f"report: {path}")


def _parameter(name: str) -> str:
    return name.replace(".", "_")


def _signature() -> inspect.Signature:
    """One option a field, after those of the verb itself: a field is described in one place."""

    def option(
        name: str, kind: Any, flag: str, text: str, panel: str | None = None, default: Any = None
    ) -> inspect.Parameter:
        about = typer.Option(flag, help=text, rich_help_panel=panel)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about]
        )

    optional = str | None
    several = list[str] | None
    own = [
        option("preset", optional, "--preset", f"Model: {', '.join(presets.MODELS)}."),
        option("cluster", optional, "--cluster", f"Nodes: {', '.join(presets.CLUSTERS)}."),
        option("storage", optional, "--storage", f"Store: {', '.join(presets.STORE_NAMES)}."),
        option("file", Path | None, "--file", "YAML with the same fields; flags go before it."),
        option("solve", several, "--solve", "For which values of this input does each goal hold?"),
        option("sweep", several, "--sweep", "VARIABLE=FROM:TO, as cadence=1min:60min."),
        option("points", int, "--points", "Values of a sweep.", default=POINTS),
        option("html", Path | None, "--html", "Write a report, one page with plots."),
        option("inputs", bool, "--inputs", "Show every input and its source.", default=False),
        option("as_json", bool, "--json", "One JSON document on stdout.", default=False),
    ]
    fields = [
        option(
            _parameter(name),
            optional,
            "--" + given.key.replace("_", "-"),
            given.help,
            name.partition(".")[0],
        )
        for name, given in [
            *((name, given) for name, (_, given) in FIELDS.items()),
            *_OWN_FLAGS.items(),
        ]
    ]
    return inspect.Signature([*own, *fields])


def register(app: typer.Typer) -> None:
    """Add the verb."""
    signature = _signature()
    plan.__signature__ = signature  # type: ignore[attr-defined]
    plan.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    app.command("plan")(plan)
