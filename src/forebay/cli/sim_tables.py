"""A simulation in the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

from forebay.cli.screen import SCREEN
from forebay.plan.compare import Comparison
from forebay.plan.sim_rows import (
    COMPARED,
    TIME_COLUMNS,
    cadences_text,
    compared_rows,
    count_rows,
    filesystem_rows,
    part_rows,
    time_rows,
)
from forebay.plan.simulate import Simulation


def show_simulation(found: Simulation) -> None:
    """Print the parts of the run, times, counts and the filesystem's load."""
    scenario = found.scenario
    _title(scenario.plan.inputs.title, found.runs, found.days, found.seed)
    SCREEN.print(_table(scenario.name, ("part", "of the run"), part_rows(found)))
    SCREEN.print(_table("times", TIME_COLUMNS, time_rows(found)))
    SCREEN.print(_table("counted, a run", ("what", "is"), count_rows(found)))
    SCREEN.print(_table("the durable tier", ("what", "is"), filesystem_rows(found)))


def show_comparison(found: Comparison, title: str, *, runs: int, days: float, seed: int) -> None:
    """Print the strategies side by side."""
    _title(title, runs, days, seed)
    variable = found.variable
    columns = COMPARED if variable is None else (variable.key, *COMPARED)
    SCREEN.print(Text(cadences_text(found)))
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True)
    for row in compared_rows(found):
        table.add_row(*row)
    SCREEN.print(table)
    for each in found.rows:
        if each.stuck is not None:
            SCREEN.print(Text(f"{each.strategy.value}: {each.stuck}"), soft_wrap=True)


def _title(title: str, runs: int, days: float, seed: int) -> None:
    count = "one run" if runs == 1 else f"{runs} runs"
    SCREEN.print(Text(title, style="bold"))
    SCREEN.print(Text(f"{count} of {days:g} days, seed {seed}"))


def _table(title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
