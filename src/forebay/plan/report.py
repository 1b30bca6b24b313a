"""The plan as one self-contained page: plots, tables, every input with its source."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from forebay.plan import plots
from forebay.plan.arithmetic import Plan, best_cadence_of
from forebay.plan.chain import chain_of
from forebay.plan.document import inputs_of
from forebay.plan.figure import Kind
from forebay.plan.fleet import Fleet
from forebay.plan.inputs import Inputs
from forebay.plan.solve import Solution, bound_text
from forebay.plan.vary import Sweep
from forebay.plan.verdict import conditions_of, goals_of, needs
from forebay.units import show_fraction, show_seconds

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1080px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin: 0 }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
p.sub { color: #59636e; margin: .2rem 0 1.2rem }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem }
.card { border: 1px solid #d1d9e0; border-radius: 8px; padding: .7rem .9rem }
.card b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums }
.card span { color: #59636e }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { text-align: left; color: #59636e; font-weight: 600 }
th, td { padding: .3rem .7rem .3rem 0; vertical-align: top; border-bottom: 1px solid #e8ebef }
td:last-child { overflow-wrap: anywhere }
.yes, .no, .needs { font-weight: 600 }
.yes { color: #1a7f37 } .no { color: #cf222e } .needs { color: #9a6700 }
ul.goals { list-style: none; padding: 0 }
.wide { overflow-x: auto }
.wide table { min-width: 640px }
details summary { cursor: pointer; font-weight: 600; margin-top: 2rem }
"""
_CONFIG = {"displaylogo": False, "responsive": True}


def page_of(
    plan: Plan, fleet: Fleet, solutions: tuple[Solution, ...] = (), sweeps: tuple[Sweep, ...] = ()
) -> str:
    """The page's HTML, with the plotting library inside: it needs no network.

    Raises ModuleNotFoundError without plotly.
    """
    conditions = conditions_of(plan)
    parts = [
        f"<h1>{escape(plan.inputs.title)}</h1>",
        '<p class="sub">What a checkpoint takes and costs, and what has to be true for that.</p>',
        _cards(plan, sum(not each.holds for each in conditions)),
        "<h2>Under the goal?</h2>",
        _goals(plan),
        "<h2>Losses against cadence</h2>",
        plot_html(plots.losses_against_cadence(plan), first=True),
        "<h2>One checkpoint through the tiers</h2>",
        plot_html(plots.timeline(plan)),
        "<h2>Where the bytes are</h2>",
        plot_html(plots.where_bytes_are(plan)),
        "<h2>What has to be true</h2>",
        table_html(
            ("condition", "need", "have", "", "why"),
            (
                (
                    each.name,
                    each.need_text,
                    each.have_text,
                    _mark(each.holds),
                    each.words,
                )
                for each in conditions
            ),
        ),
        "<h2>Worked line by line</h2>",
        table_html(
            ("what", "how", "is"),
            ((each.name, each.working, each.result) for each in chain_of(plan)),
        ),
        "<h2>Tiers</h2>",
        table_html(
            ("tier", "survives", "every", "best", "there after", "failures", "loss"),
            (
                (
                    tier.name,
                    tier.survives,
                    show_seconds(tier.cadence_s),
                    Kind.SECONDS.show(best_cadence_of(plan, tier)),
                    show_seconds(tier.lag_s),
                    show_fraction(tier.share),
                    show_fraction(tier.loss),
                )
                for tier in plan.tiers
            ),
        ),
        "<h2>The whole training</h2>",
        table_html(("what", "is"), _fleet(plan, fleet)),
    ]
    for solution in solutions:
        parts.append(f"<h2>{escape(solution.variable.key)}: what it may be</h2>")
        parts.append(
            table_html(
                ("for", "it may be"),
                ((bound.text, bound_text(solution, bound)) for bound in solution.bounds),
            )
        )
    for sweep in sweeps:
        parts.append(f"<h2>Sweep of {escape(sweep.variable.key)}</h2>")
        parts.append(plot_html(plots.swept(sweep)))
    parts += inputs_html(plan.inputs)
    return document_html(plan.inputs.title, parts)


def document_html(title: str, parts: Iterable[str]) -> str:
    """A whole page of these parts, which are markup."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _cards(plan: Plan, failed: int) -> str:
    rows = (
        ("pause", show_seconds(plan.pause.total_s)),
        ("synchronous write", show_seconds(plan.sync.write_s)),
        ("drain", show_seconds(plan.drain.seconds)),
        ("lost in total", show_fraction(plan.losses.total)),
        ("best cadence", show_seconds(plan.cadence.best_s)),
        ("conditions that fail", str(failed)),
    )
    inner = "".join(
        f'<div class="card"><b>{escape(is_)}</b><span>{escape(what)}</span></div>'
        for what, is_ in rows
    )
    return f'<div class="cards">{inner}</div>'


def _goals(plan: Plan) -> str:
    goal = show_fraction(plan.inputs.checkpoint.goal)
    lines = [("yes" if each.holds else "no", each.text) for each in goals_of(plan)]
    if (text := needs(plan)) is not None:
        lines.append(("needs", f"the total under {goal}: {text}"))
    items = (f'<li><span class="{word}">{word}</span> {escape(text)}</li>' for word, text in lines)
    return f'<ul class="goals">{"".join(items)}</ul>'


def _fleet(plan: Plan, fleet: Fleet) -> list[tuple[str, str]]:
    rows = [
        ("without losses", show_seconds(fleet.ideal_s)),
        (
            f"at goodput {show_fraction(plan.goodput)}",
            fleet.train_text,
        ),
        (
            "added by checkpoints and failures",
            fleet.added_text,
        ),
    ]
    rows += [
        (f"at MFU {show_fraction(mfu)}", show_seconds(train_s))
        for mfu, train_s in fleet.mfu_sensitivity
    ]
    if fleet.deadline_s is not None:
        count = fleet.gpus_for_deadline
        rows.append(
            (
                f"GPUs to end within {show_seconds(fleet.deadline_s)}",
                "no number is enough" if count is None else f"{count:,}",
            )
        )
    return rows


def inputs_html(inputs: Inputs) -> list[str]:
    """Every input with its source, folded, as markup."""
    rows = ((name, each["text"], each["source"]) for name, each in inputs_of(inputs).items())
    return [
        "<details><summary>Every input and where it comes from</summary>",
        table_html(("input", "value", "from"), rows) + "</details>",
    ]


def plot_html(figure: Any, *, first: bool = False) -> str:
    """A plot as markup; the first of a page brings the library."""
    text: str = figure.to_html(full_html=False, include_plotlyjs=first, config=_CONFIG)
    return text


class _Html(str):
    """Text that is markup already."""

    __slots__ = ()


def _mark(holds: bool) -> _Html:
    return _Html(f'<span class="{"yes" if holds else "no"}">{"holds" if holds else "fails"}</span>')


def table_html(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table as markup."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{cell if isinstance(cell, _Html) else escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'
