"""A simulation, or a comparison of several, as one self-contained page."""

from __future__ import annotations

from html import escape

from forebay.plan import sim_plots
from forebay.plan.compare import Comparison
from forebay.plan.report import document_html, inputs_html, plot_html, table_html
from forebay.plan.sim_rows import (
    COMPARED,
    MORE_COMPARED,
    TIME_COLUMNS,
    cadences_text,
    compared_rows,
    count_rows,
    filesystem_rows,
    part_rows,
    time_rows,
)
from forebay.plan.simulate import Simulation


def simulation_page(found: Simulation) -> str:
    """The page's HTML; it needs no network. Raises ModuleNotFoundError without plotly."""
    inputs = found.scenario.plan.inputs
    runs = "one run" if found.runs == 1 else f"{found.runs} runs"
    what = f"{found.scenario.name}: {runs} of {found.days:g} days, seed {found.seed}"
    parts = [
        f"<h1>{escape(inputs.title)}</h1>",
        f'<p class="sub">{escape(what)}, event by event.</p>',
        "<h2>Where the time goes</h2>",
        plot_html(sim_plots.losses([(found.scenario.name, found)]), first=True),
        table_html(("part", "of the run"), part_rows(found)),
        "<h2>The first run as it goes on</h2>",
        plot_html(sim_plots.timeline(found)),
        "<h2>Its filesystem</h2>",
        plot_html(sim_plots.filesystem(found)),
        table_html(("filesystem", "is"), filesystem_rows(found)),
        "<h2>Pauses</h2>",
        plot_html(sim_plots.pauses(found)),
        "<h2>Complete in each tier</h2>",
        plot_html(sim_plots.reached(found)),
        "<h2>Work lost</h2>",
        plot_html(sim_plots.lost(found)),
        "<h2>Times</h2>",
        table_html(TIME_COLUMNS, time_rows(found)),
        "<h2>Counted, a run</h2>",
        table_html(("what", "is"), count_rows(found)),
        *inputs_html(inputs),
    ]
    return document_html(inputs.title, parts)


def comparison_page(found: Comparison, title: str) -> str:
    """The page's HTML; it needs no network. Raises ModuleNotFoundError without plotly."""
    variable = found.variable
    named = []
    for row in found.rows:
        if row.simulation is not None:
            value = "" if variable is None else f"{variable.given.kind.show(row.value)}, "
            named.append((f"{value}{row.strategy.value}", row.simulation))
    columns: tuple[str, ...] = (*COMPARED, *MORE_COMPARED)
    columns = columns if variable is None else (variable.key, *columns)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(cadences_text(found))}; the same failures for each.</p>',
        "<h2>What each loses</h2>",
        plot_html(sim_plots.losses(named), first=True),
        "<h2>Side by side</h2>",
        table_html(columns, compared_rows(found, more=True)),
    ]
    return document_html(title, parts)
