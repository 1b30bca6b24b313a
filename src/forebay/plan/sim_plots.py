"""What the page of a simulation draws: parts of the run, times, and the filesystem's load."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from forebay.plan.histogram import Histogram
from forebay.plan.inputs import TIERS
from forebay.plan.plots import COLOURS, TICKS_S
from forebay.plan.resolve import DAY_S
from forebay.plan.scenario import NS
from forebay.plan.simulate import Simulation
from forebay.units import show_fraction, show_seconds

LOSSES = ("pause", "rework", "restart", "interference")


def losses(named: list[tuple[str, Simulation]]) -> Any:
    """What each part takes of the run, stacked, a bar a simulation."""
    figure = go.Figure()
    for part in LOSSES:
        values = [found.part(part) for _, found in named]
        figure.add_trace(
            go.Bar(
                y=[name for name, _ in named],
                x=[100 * value for value in values],
                name=part,
                orientation="h",
                marker={"color": COLOURS[part]},
                text=[show_fraction(value) for value in values],
            )
        )
    figure.update_layout(barmode="stack", xaxis={"title": "part of the run, %"})
    figure.update_yaxes(autorange="reversed")
    return _styled(figure, height=140 + 44 * len(named))


def filesystem(found: Simulation) -> Any:
    """The first run's load on the durable tier: average in each bin, and the fastest write."""
    load, end_ns = found.load, found.days * DAY_S * NS
    width_s = load.bin_ns / NS
    used = max(1, min(len(load.nbytes), int(-(-end_ns // load.bin_ns))))
    days = [index * width_s / DAY_S for index in range(used)]
    figure = go.Figure()
    for name, values, colour in (
        ("fastest write", [peak * NS / 1e9 for peak in load.peaks[:used]], "#e45756"),
        ("average", [nbytes / width_s / 1e9 for nbytes in load.nbytes[:used]], "#54a24b"),
    ):
        figure.add_trace(
            go.Scatter(x=days, y=values, name=name, line={"shape": "hv", "color": colour})
        )
    figure.update_xaxes(title="day of the run")
    figure.update_yaxes(title="GB/s", rangemode="tozero")
    return _styled(figure)


def pauses(found: Simulation) -> Any:
    """How many pauses were how long."""
    return _histogram([("pause", found.tally.pauses, COLOURS["pause"])], "pause")


def reached(found: Simulation) -> Any:
    """From the call of save until the checkpoint is complete in each tier."""
    bars = [
        (name, each, COLOURS[name])
        for name, each in zip(TIERS, found.tally.reached, strict=True)
        if each.count
    ]
    return _histogram(bars, "from save to complete in the tier")


def lost(found: Simulation) -> Any:
    """Training taken back a failure."""
    return _histogram([("lost", found.tally.lost, COLOURS["rework"])], "training lost a failure")


def _histogram(bars: list[tuple[str, Histogram, str]], title: str) -> Any:
    figure = go.Figure()
    for name, histogram, colour in bars:
        found = histogram.coarse(NS)
        figure.add_trace(
            go.Bar(
                x=[(low * high) ** 0.5 for low, high, _ in found],
                y=[count / histogram.count for _, _, count in found],
                width=[high - low for low, high, _ in found],
                name=name,
                marker={"color": colour},
                opacity=0.75,
            )
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(
        type="log",
        title=title,
        tickvals=list(TICKS_S),
        ticktext=[show_seconds(tick) for tick in TICKS_S],
    )
    figure.update_yaxes(title="part of all", rangemode="tozero")
    return _styled(figure)


def _styled(figure: Any, height: int = 360) -> Any:
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 30, "t": 30, "b": 50},
        legend={"orientation": "h", "y": 1.15},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return figure
