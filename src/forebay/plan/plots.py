"""What the report draws: losses against cadence, one checkpoint in the tiers, where bytes are."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import Any

import plotly.graph_objects as go

from forebay.plan import losses
from forebay.plan.arithmetic import Plan, disturbance_s, goodput_of
from forebay.plan.figure import Kind
from forebay.plan.vary import Sweep
from forebay.units import show_bytes, show_fraction, show_seconds

_POINTS = 120
COLOURS = {
    "pause": "#4c78a8",
    "rework": "#e45756",
    "restart": "#f58518",
    "interference": "#72b7b2",
    "total": "#1f2328",
    "memory": "#4c78a8",
    "local": "#72b7b2",
    "peer": "#f58518",
    "durable": "#54a24b",
}
LOOK: dict[str, Any] = {
    "template": "plotly_white",
    "margin": {"l": 60, "r": 30, "t": 30, "b": 50},
    "font": {"family": "system-ui, sans-serif", "size": 13},
}
_PARTS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
_PER_CENT = {"tickvals": list(_PARTS), "ticktext": [show_fraction(part) for part in _PARTS]}
TICKS_S = (1e-3, 1e-2, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0)


def losses_against_cadence(plan: Plan) -> Any:
    """Each loss and the total over the near cadence; outer tiers keep theirs."""
    given, best = plan.cadence.given_s, plan.cadence.best_s
    low, high = min(given, best) / 10, max(given, best, 3600.0) * 4
    cadences = [low * (high / low) ** (step / _POINTS) for step in range(_POINTS + 1)]
    inputs, mtbf_s = plan.inputs, plan.inputs.failures.mtbf_s
    rows: dict[str, list[float]] = {
        name: [] for name in ("pause", "rework", "restart", "interference")
    }
    total: list[float] = []
    for cadence_s in cadences:
        levels = losses.at_cadence(plan.levels, cadence_s)
        rework, restart = losses.first_order(levels, mtbf_s=mtbf_s)
        disturbed = disturbance_s(inputs, plan.tiers, cadence_s) / cadence_s
        parts = (plan.pause.total_s / cadence_s, rework, restart, disturbed)
        for name, part in zip(rows, parts, strict=True):
            rows[name].append(min(part, 1.0))
        total.append(1 - goodput_of(inputs, plan.tiers, levels, plan.pause.total_s))
    figure = go.Figure()
    for name, values in rows.items():
        figure.add_trace(_line(cadences, values, name, COLOURS[name], dash="dot"))
    figure.add_trace(_line(cadences, total, "total, exact", COLOURS["total"], width=3))
    goal = inputs.checkpoint.goal
    _goal_line(figure, goal)
    for at_s, text, up in ((given, "given", 1.0), (best, "best", 0.92)):
        figure.add_vline(x=at_s, line={"color": "#999", "width": 1})
        figure.add_annotation(
            x=_log10(at_s),
            y=up,
            yref="paper",
            text=f"{text} {show_seconds(at_s)}",
            showarrow=False,
            xanchor="left",
        )
    _axes(figure, "cadence", Kind.SECONDS)
    figure.update_yaxes(type="log", title="part of the run", range=[-5, 0], **_PER_CENT)
    return figure


def timeline(plan: Plan) -> Any:
    """One checkpoint from the start of its save: which hop is at work when."""
    fixed = max(plan.pause.fixed_s, 1e-4)
    stages = _stages(plan)
    figure = go.Figure()
    for name, begin_s, end_s, nbytes in stages:
        figure.add_trace(
            go.Scatter(
                x=[max(begin_s, fixed / 10), end_s],
                y=[name, name],
                mode="lines",
                line={"color": COLOURS[name], "width": 22},
                name=name,
                hovertemplate=f"{name}: {show_bytes(nbytes)}, {show_seconds(begin_s)} to "
                f"{show_seconds(end_s)}<extra></extra>",
                showlegend=False,
            )
        )
        figure.add_annotation(
            x=_log10(end_s), y=name, text=f" {show_seconds(end_s)}", showarrow=False, xanchor="left"
        )
    limit_s, cadence_s = plan.inputs.checkpoint.pause_limit_s, plan.inputs.checkpoint.cadence_s
    for at_s, text in ((limit_s, "pause limit"), (cadence_s, "next save")):
        figure.add_vline(x=at_s, line={"color": "#999", "dash": "dash"})
        figure.add_annotation(
            x=_log10(at_s), y=1.02, yref="paper", text=text, showarrow=False, xanchor="right"
        )
    _axes(figure, "time since save() was called", Kind.SECONDS)
    figure.update_yaxes(autorange="reversed")
    return figure


def where_bytes_are(plan: Plan) -> Any:
    """How much of the checkpoint each tier holds as time goes on."""
    stages = _stages(plan)
    first = max(plan.pause.fixed_s, 1e-4) / 2
    last = max(end_s for _, _, end_s, _ in stages) * 4
    times = [first * (last / first) ** (step / (4 * _POINTS)) for step in range(4 * _POINTS + 1)]
    total = plan.sizes.checkpoint_bytes
    figure = go.Figure()
    for name, begin_s, end_s, _ in stages:
        span_s = max(end_s - begin_s, 1e-9)
        held = [total * min(1.0, max(0.0, (at_s - begin_s) / span_s)) / 1e12 for at_s in times]
        figure.add_trace(_line(times, held, f"in {name}", COLOURS[name], width=3))
    _axes(figure, "time since save() was called", Kind.SECONDS)
    figure.update_yaxes(title="TB", rangemode="tozero")
    return figure


def swept(sweep: Sweep) -> Any:
    """Losses over the variable of a sweep."""
    figure = go.Figure()
    for name in ("pause", "rework", "restart", "interference", "total"):
        values = [getattr(plan.losses, name) for plan in sweep.plans]
        wide = 3 if name == "total" else 2
        figure.add_trace(_line(list(sweep.values), values, name, COLOURS[name], width=wide))
    kind = sweep.variable.given.kind
    _axes(figure, sweep.variable.key, kind)
    if kind is not Kind.SECONDS:
        ticks = _ticks(sweep.values[0], sweep.values[-1], kind is Kind.WHOLE)
        figure.update_xaxes(tickvals=ticks, ticktext=[kind.show(tick) for tick in ticks])
    _goal_line(figure, sweep.plans[0].inputs.checkpoint.goal)
    figure.update_yaxes(type="log", title="part of the run", **_PER_CENT)
    return figure


def _stages(plan: Plan) -> list[tuple[str, float, float, float]]:
    """Tier, begin and end of the way to it, bytes of one of those that go it."""
    by_name = {hop.name: hop for hop in plan.hops}
    at_s = plan.pause.total_s
    begin_s = min(plan.pause.fixed_s, at_s / 2)
    found = [("memory", begin_s, at_s, by_name["d2h"].nbytes)]
    for hop, tier in (("nvme", "local"), ("peer", "peer")):
        if hop in by_name:
            end_s = at_s + by_name[hop].seconds
            found.append((tier, at_s, end_s, by_name[hop].nbytes))
            at_s = end_s
    found.append(("durable", at_s, at_s + plan.drain.seconds, by_name["durable"].nbytes))
    return found


def _goal_line(figure: Any, goal: float) -> None:
    figure.add_hline(y=goal, line={"color": "#999", "dash": "dash"})
    figure.add_annotation(
        x=0,
        xref="paper",
        y=_log10(goal),
        text=f"goal {show_fraction(goal)}",
        showarrow=False,
        xanchor="left",
        yanchor="bottom",
    )


def _ticks(low: float, high: float, whole: bool) -> list[float]:
    """1, 2 and 5 of each decade from ``low`` to ``high``; of more than two decades only the 1."""
    first, last = floor(log10(low)), ceil(log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    found = [step * 10.0**decade for decade in range(first, last + 1) for step in steps]
    return [tick for tick in found if low <= tick <= high and (not whole or tick >= 1)]


def _line(x: list[float], y: list[float], name: str, colour: str, **more: Any) -> Any:
    line = {"color": colour, "width": more.pop("width", 2)}
    if "dash" in more:
        line["dash"] = more.pop("dash")
    return go.Scatter(x=x, y=y, name=name, mode="lines", line=line, **more)


def _axes(figure: Any, title: str, kind: Kind) -> None:
    figure.update_layout(**LOOK, height=420, legend={"orientation": "h", "y": 1.12})
    figure.update_xaxes(type="log", title=title)
    if kind is Kind.SECONDS:
        figure.update_xaxes(
            tickvals=list(TICKS_S), ticktext=[show_seconds(tick) for tick in TICKS_S]
        )


def _log10(value: float) -> float:
    """Where an annotation stands on a logarithmic axis."""
    return log10(max(value, 1e-12))
