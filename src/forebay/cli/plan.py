"""``forebay plan``: what a checkpoint takes and costs, and what has to be true for that."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table
from rich.text import Text

from forebay.cli.output import ASIDE, NOT_MET, SCREEN, say_json, write_text
from forebay.errors import UsageError
from forebay.plan import presets
from forebay.plan.arithmetic import Plan, best_cadence_of, work, work_fleet
from forebay.plan.chain import chain_of
from forebay.plan.document import document_of, inputs_of
from forebay.plan.figure import Figure, Kind
from forebay.plan.fleet import Fleet
from forebay.plan.inputs import FIELDS
from forebay.plan.resolve import RESTART, read_file, read_flags, resolve
from forebay.plan.solve import Solution, bound_text, solve
from forebay.plan.vary import POINTS, Sweep, sweep
from forebay.plan.verdict import conditions_of, goals_of, holds, needs
from forebay.units import show_count, show_flops, show_fraction, show_seconds

_OWN_FLAGS = {f"failures.{RESTART.key}": RESTART}


class _Once(yaml.SafeLoader):
    """Refuses a key that stands twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, each key once."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.YAMLError(f"{key.value!r} stands twice{key.start_mark}")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> tuple[dict[str, str], dict[str, Figure]]:
    """Presets and figures of a file. Raises UsageError."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Once)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise UsageError(
            f"--file {path}: {error.strerror}: name a YAML file that can be read"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--file {path}: expected YAML: {error}") from None
    return read_file(document, str(path))


def plan(**given: Any) -> None:
    """Work out what a checkpoint costs and what has to be true for a short pause."""
    chosen: dict[str, str] = {}
    figures: dict[str, Figure] = {}
    if given["file"] is not None:
        chosen, figures = read_yaml(given["file"])
    flags = {name: given[_parameter(name)] for name in (*_OWN_FLAGS, *FIELDS)}
    inputs = resolve(
        model=given["preset"] or chosen.get("model"),
        cluster=given["cluster"] or chosen.get("cluster"),
        storage=given["storage"] or chosen.get("storage"),
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
        _show(worked, fleet, solutions, sweeps, given["inputs"])
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
    ASIDE.print(f"report: {path}", markup=False, highlight=False, soft_wrap=True)


def _show(
    worked: Plan,
    fleet: Fleet,
    solutions: tuple[Solution, ...],
    sweeps: tuple[Sweep, ...],
    inputs: bool,
) -> None:
    SCREEN.print(Text(worked.inputs.title, style="bold"))
    if inputs:
        table = _table("inputs", "input", "value", "from")
        for name, figure in inputs_of(worked.inputs).items():
            table.add_row(name, figure["text"], figure["source"])
        SCREEN.print(table)
    table = _table("worked", "what", "how", "is")
    for line in chain_of(worked):
        table.add_row(line.name, line.working, Text(line.result, style="bold"))
    SCREEN.print(table)
    limit = show_seconds(worked.inputs.checkpoint.pause_limit_s)
    table = _table(
        f"what has to be true for a pause under {limit}", "condition", "need", "have", "", "why"
    )
    for each in conditions_of(worked):
        mark = Text("holds", style="green") if each.holds else Text("FAILS", style="bold red")
        table.add_row(each.name, each.need_text, each.have_text, mark, each.words)
    SCREEN.print(table)
    table = _table("tiers", "tier", "survives", "every", "best", "there after", "failures", "loss")
    for tier in worked.tiers:
        table.add_row(
            tier.name,
            tier.survives,
            show_seconds(tier.cadence_s),
            Kind.SECONDS.show(best_cadence_of(worked, tier)),
            show_seconds(tier.lag_s),
            show_fraction(tier.share),
            show_fraction(tier.loss),
        )
    SCREEN.print(table)
    _show_goals(worked)
    _show_fleet(worked, fleet)
    for solution in solutions:
        SCREEN.print(_solved(solution))
    for each_sweep in sweeps:
        SCREEN.print(_swept(each_sweep))


def _show_goals(worked: Plan) -> None:
    goal = show_fraction(worked.inputs.checkpoint.goal)
    SCREEN.print(Text(f"\nunder {goal} of the run?", style="bold"))
    for each in goals_of(worked):
        mark = ("  yes  ", "green") if each.holds else ("  no   ", "red")
        SCREEN.print(Text.assemble(mark, each.text), soft_wrap=True)
    if (text := needs(worked)) is not None:
        words = Text.assemble(("  needs  ", "yellow"), f"the total under {goal}: {text}")
        SCREEN.print(words, soft_wrap=True)


def _show_fleet(worked: Plan, fleet: Fleet) -> None:
    training, cluster = worked.inputs.training, worked.inputs.cluster
    table = _table("the whole training", "what", "how", "is")
    table.add_row(
        "ideal",
        f"{training.flops_per_param_token:g} x {show_count(worked.inputs.model.params)} parameters "
        f"x {show_count(training.tokens)} tokens / ({cluster.gpus:,} GPUs x "
        f"{show_flops(cluster.peak_flops)} x {show_fraction(training.mfu)})",
        show_seconds(fleet.ideal_s),
    )
    table.add_row(
        "with losses",
        f"/ goodput {show_fraction(worked.goodput)}",
        fleet.train_text,
    )
    table.add_row(
        "added by them",
        "",
        fleet.added_text,
    )
    for mfu, train_s in fleet.mfu_sensitivity:
        table.add_row(f"... at MFU {show_fraction(mfu)}", "", show_seconds(train_s))
    if fleet.deadline_s is not None:
        count = fleet.gpus_for_deadline
        found = "no number of them" if count is None else f"{count:,} GPUs"
        table.add_row(
            f"within {show_seconds(fleet.deadline_s)}", "failures grow with the nodes", found
        )
    SCREEN.print(table)


def _solved(solution: Solution) -> Table:
    show = solution.variable.given.kind.show
    now = "" if solution.now is None else f", now {show(solution.now)}"
    table = _table(f"{solution.variable.key}{now}", "for", "it may be")
    for bound in solution.bounds:
        table.add_row(bound.text, bound_text(solution, bound))
    return table


def _swept(found: Sweep) -> Table:
    key, show = found.variable.key, found.variable.given.kind.show
    table = _table(
        f"sweep of {key}", key, "pause", "rework", "restart", "total", "drain", "conditions"
    )
    for value, each in zip(found.values, found.plans, strict=True):
        lost = each.losses
        table.add_row(
            show(value),
            show_fraction(lost.pause),
            show_fraction(lost.rework),
            show_fraction(lost.restart),
            show_fraction(lost.total),
            show_seconds(each.drain.seconds),
            "hold" if holds(each) else "fail",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


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
