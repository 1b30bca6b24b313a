"""What the report draws, trace by trace against the plan."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.plan import plots
from forebay.plan.arithmetic import Plan, work
from forebay.plan.resolve import read_flags, resolve
from forebay.plan.vary import sweep

FLAGS = {"checkpoint.pause": "3s", "checkpoint.cadence": "10min", "checkpoint.interference": "2%"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return work(resolve(flags=read_flags(FLAGS)))


def at(trace: Any, x: float) -> float:
    """A trace's value at the point nearest to ``x``."""
    return min(zip(trace.x, trace.y, strict=True), key=lambda one: abs(one[0] / x - 1))[1]


def by_name(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def test_losses_against_cadence(plan: Plan) -> None:
    found = by_name(plots.losses_against_cadence(plan))
    assert set(found) == {"pause", "rework", "restart", "interference", "total, exact"}
    for name in ("pause", "rework", "restart", "interference"):
        for cadence_s in (60.0, 300.0, 3600.0):
            x = min(found[name].x, key=lambda one: abs(one / cadence_s - 1))
            other = work(
                resolve(
                    flags=read_flags(
                        FLAGS
                        | {
                            "checkpoint.cadence": f"{x}s",
                            "checkpoint.durable_cadence": f"{max(x, 600)}s",
                        }
                    )
                )
            )
            assert at(found[name], x) == pytest.approx(getattr(other.losses, name), rel=0.1)
    assert at(found["total, exact"], 600) == pytest.approx(plan.losses.total, rel=0.03)


def test_the_goal_is_named_where_it_lies(plan: Plan) -> None:
    figure = plots.losses_against_cadence(plan)
    (label,) = [each for each in figure.layout.annotations if each.text.startswith("goal")]
    assert label.y == pytest.approx(-2)  # log10 of 1 %


def test_the_timeline_has_each_hop_as_long_as_it_takes(plan: Plan) -> None:
    ends = {trace.name: trace.x for trace in plots.timeline(plan).data}
    seconds = {hop.name: hop.seconds for hop in plan.hops}
    assert ends["memory"][1] == pytest.approx(3)
    assert ends["local"][1] - ends["local"][0] == pytest.approx(seconds["nvme"])
    assert ends["peer"][1] - ends["peer"][0] == pytest.approx(seconds["peer"])
    assert ends["durable"][1] - ends["durable"][0] == pytest.approx(plan.drain.seconds)


def test_every_tier_ends_with_all_bytes(plan: Plan) -> None:
    for trace in plots.where_bytes_are(plan).data:
        assert trace.y[0] == 0
        assert trace.y[-1] == pytest.approx(6.48)


def test_a_sweep_is_drawn_as_it_was_worked(plan: Plan) -> None:
    found = sweep(plan.inputs, "filesystem=50GB/s:5TB/s", points=5)
    figure = plots.swept(found)
    for name, trace in by_name(figure).items():
        assert list(trace.x) == list(found.values)
        assert list(trace.y) == [getattr(each.losses, name) for each in found.plans]
    assert list(figure.layout.xaxis.ticktext)[:2] == ["50 GB/s", "100 GB/s"]


def test_whole_numbers_have_whole_ticks(plan: Plan) -> None:
    figure = plots.swept(sweep(plan.inputs, "slots=1:8", points=8))
    assert list(figure.layout.xaxis.ticktext) == ["1", "2", "5"]
