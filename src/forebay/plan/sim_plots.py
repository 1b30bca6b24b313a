"""What the page of a simulation draws: parts of the run, times, and the filesystem's load."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from forebay.plan.histogram import Histogram
from forebay.plan.inputs import TIERS
from forebay.plan.plots import COLOURS, LOOK, TICKS_S
from forebay.plan.resolve import DAY_S
from forebay.plan.scenario import NS
from forebay.plan.sim_document import KINDS, SOURCES
from forebay.plan.simulate import Simulation
from forebay.plan.tally import LOSSES
from forebay.units import show_fraction, show_seconds


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
    figure.update_layout(legend={"traceorder": "normal"})
    figure.update_yaxes(autorange="reversed")
    return _styled(figure, height=170 + 44 * len(named))


def filesystem(found: Simulation) -> Any:
    """The first run's load on the durable tier: average in each bin, and the fastest write."""
    load = found.load
    width_s = load.bin_ns / NS
    days = [index * width_s / DAY_S for index in range(len(load.nbytes))]
    figure = go.Figure()
    for name, values, colour in (
        ("fastest write", [peak * NS / 1e9 for peak in load.peaks], "#e45756"),
        ("average", [nbytes / width_s / 1e9 for nbytes in load.nbytes], "#54a24b"),
    ):
        figure.add_trace(
            go.Scatter(x=days, y=values, name=name, line={"shape": "hv", "color": colour})
        )
    figure.update_xaxes(title="day of the run")
    figure.update_yaxes(title="GB/s", rangemode="tozero")
    return _styled(figure)


def timeline(found: Simulation) -> Any:
    """What the first run had lost as it went on, by what took it; each failure by its kind."""
    failures, figure = found.story.failures, go.Figure()
    days = [each.at_ns / NS / DAY_S for each in failures]
    lost = {part: [getattr(each, f"{part}_ns") / NS / 3600 for each in failures] for part in LOSSES}
    for part, hours in lost.items():
        figure.add_trace(
            go.Scatter(
                x=[0, *days],
                y=[0, *hours],
                name=part,
                stackgroup="lost",
                line={"width": 0.5, "color": COLOURS[part]},
            )
        )
    total = [sum(hours) for hours in zip(*lost.values(), strict=True)]
    for kind, name in enumerate(KINDS):
        which = [index for index, each in enumerate(failures) if each.kind == kind]
        figure.add_trace(
            go.Scatter(
                x=[days[index] for index in which],
                y=[total[index] for index in which],
                mode="markers",
                name=f"{name} failed",
                marker={"size": 5, "symbol": kind, "color": COLOURS[TIERS[kind]]},
                text=[
                    f"{show_seconds(failures[index].lost_ns / NS)} lost, back to "
                    f"{SOURCES[failures[index].source]}"
                    for index in which
                ],
            )
        )
    figure.update_xaxes(title="day of the run")
    figure.update_yaxes(title="lost so far, hours", rangemode="tozero")
    return _styled(figure)


def pauses(found: Simulation) -> Any:
    """How many pauses were how long."""
    return _histogram(found.tally.pauses, "pause", COLOURS["pause"])


def lost(found: Simulation) -> Any:
    """Training taken back a failure."""
    return _histogram(found.tally.lost, "training lost a failure", COLOURS["rework"])


def reached(found: Simulation) -> Any:
    """Which part of all was complete in each tier how long after the call of save."""
    figure = go.Figure()
    least_s = most_s = 0.0
    for name, each in zip(TIERS, found.tally.reached, strict=True):
        if not each.count:
            continue
        bars = each.coarse(NS, bins=400)
        begin_s = bars[0][0] if bars else 0.0
        seconds, parts, so_far = [begin_s], [0.0], each.zeros
        for _, high_s, count in bars:
            so_far += count
            seconds.append(high_s)
            parts.append(so_far / each.count)
        least_s, most_s = min(least_s or begin_s, begin_s), max(most_s, seconds[-1])
        line = {"shape": "hv", "color": COLOURS[name], "width": 2}
        figure.add_trace(go.Scatter(x=seconds, y=parts, name=name, line=line))
    _time_axis(figure, "from save to complete in the tier", least_s, most_s)
    figure.update_yaxes(title="part of all", range=[0, 1.02])
    return _styled(figure)


def _histogram(histogram: Histogram, title: str, colour: str) -> Any:
    bars = histogram.coarse(NS)
    figure = go.Figure(
        go.Bar(
            x=[(low * high) ** 0.5 for low, high, _ in bars],
            y=[count / histogram.count for _, _, count in bars],
            width=[high - low for low, high, _ in bars],
            marker={"color": colour},
        )
    )
    if bars:
        _time_axis(figure, title, bars[0][0], bars[-1][1])
    figure.update_yaxes(title="part of all", rangemode="tozero")
    return _styled(figure)


def _time_axis(figure: Any, title: str, least_s: float, most_s: float) -> None:
    """Logarithmic where times differ by much, with ticks that people read."""
    ticks = [tick for tick in TICKS_S if least_s <= tick <= most_s]
    if len(ticks) < 3:
        width_s = max(most_s - least_s, most_s * 0.02)
        ticks = [least_s + width_s * step / 5 for step in range(6)]
    figure.update_xaxes(
        type="log" if least_s > 0 and most_s > 3 * least_s else "linear",
        title=title,
        tickvals=ticks,
        ticktext=[show_seconds(tick) for tick in ticks],
    )


def _styled(figure: Any, height: int = 360) -> Any:
    legend = {"orientation": "h", "y": 1, "yanchor": "bottom"}
    figure.update_layout(**LOOK, height=height, legend=legend)
    return figure
