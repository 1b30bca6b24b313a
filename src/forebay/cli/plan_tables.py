"""A plan in the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from forebay.cli.screen import SCREEN
from forebay.plan.arithmetic import Plan, best_cadence_of
from forebay.plan.chain import chain_of
from forebay.plan.document import inputs_of
from forebay.plan.figure import Kind
from forebay.plan.fleet import Fleet
from forebay.plan.solve import Solution, bound_text
from forebay.plan.vary import Sweep
from forebay.plan.verdict import conditions_of, goals_of, holds, needs
from forebay.units import show_count, show_flops, show_fraction, show_seconds


def show_plan(
    worked: Plan,
    fleet: Fleet,
    solutions: tuple[Solution, ...],
    sweeps: tuple[Sweep, ...],
    inputs: bool,
) -> None:
    """Print the plan; with ``inputs``, every input and its source first."""
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
