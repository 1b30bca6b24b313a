"""What is shown of a simulation: the histogram, the trace, the page, the comparison."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from bench.predict import predicted
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.plan.arithmetic import Plan, work
from forebay.plan.compare import compare
from forebay.plan.histogram import Histogram
from forebay.plan.load import BINS, Load
from forebay.plan.resolve import read_flags, resolve
from forebay.plan.scenario import NS, Scenario, Strategy, scenario_of
from forebay.plan.sim_document import comparison_document, simulation_document
from forebay.plan.sim_report import comparison_page, simulation_page
from forebay.plan.simulate import Simulation, simulate
from forebay.plan.trace import MOST_NODES, trace_of

SMALL = {"model.params": "8e9", "cluster.gpus": "64"}


def plan(flags: dict[str, str]) -> Plan:
    return work(resolve(flags=read_flags(flags)), best=False)


@pytest.fixture(scope="module")
def played() -> Simulation:
    return simulate(scenario_of(plan({})), runs=2, days=3, seed=5)


@given(st.lists(st.integers(0, 10**18), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_within_a_thousandth(values: list[int], part: float) -> None:
    histogram, other = Histogram(), Histogram()
    for index, value in enumerate(values):
        (histogram if index % 2 else other).add(value)
    histogram.take(other)
    assert histogram.count == len(values)
    assert histogram.total == sum(values)
    assert (histogram.least, histogram.most) == (min(values), max(values))
    exact = sorted(values)[max(0, -(-part * len(values) // 1).__int__() - 1)]
    assert histogram.quantile(part) == pytest.approx(exact, rel=0.0021, abs=2)
    bars = histogram.coarse(1.0)
    assert len(bars) <= 61
    assert sum(count for _, _, count in bars) == sum(value > 0 for value in values)


def test_of_nothing_there_are_no_figures() -> None:
    assert Histogram().document(1.0)["p99"] is None
    assert Histogram().quantile(0.5) == 0


def test_the_load_is_bounded_and_keeps_every_byte() -> None:
    load = Load(1000 * NS)
    load.add(0, 1000 * NS, 2.0)
    load.add(999 * NS, 1000 * NS, 5.0)
    assert len(load.nbytes) == BINS
    assert sum(load.nbytes) == pytest.approx(2005.0 * NS)
    assert max(load.peaks) == 5.0


def spans(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("strategy", Strategy)
def test_a_trace_is_what_the_viewers_read(strategy: Strategy) -> None:
    trace = trace_of(scenario_of(plan(SMALL), strategy), seed=0)
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMCi"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
    for span in spans(trace):
        assert span["dur"] >= 0
        lanes.setdefault((span["pid"], span["tid"]), []).append((span["ts"], span["dur"]))
    for each in lanes.values():  # on a lane they follow each other
        each.sort()
        assert all(a + d <= b for (a, d), (b, _) in pairwise(each))
    named = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {0, *(pid for pid, _ in lanes)}


def test_a_trace_has_each_hop_of_each_node_and_ends_with_the_slowest() -> None:
    scenario = scenario_of(plan(SMALL | {"checkpoint.spread": "0.5"}))
    trace = trace_of(scenario, seed=1)
    by_lane: dict[int, list[dict[str, Any]]] = {}
    for span in spans(trace):
        by_lane.setdefault(span["tid"], []).append(span)
    assert {lane: len(each) for lane, each in by_lane.items()} == dict.fromkeys(range(5), 8)
    ends = {
        event["name"].partition(" ")[0]: event["ts"]
        for event in trace["traceEvents"]
        if event["ph"] == "i"
    }
    for lane, tier in ((2, "local"), (3, "peer"), (4, "durable")):
        assert max(each["ts"] + each["dur"] for each in by_lane[lane]) == pytest.approx(ends[tier])
    assert ends["memory"] == pytest.approx(by_lane[0][0]["dur"])
    assert trace == trace_of(scenario, seed=1)
    assert trace != trace_of(scenario, seed=2)


def test_a_trace_of_very_many_nodes_shows_some_and_the_slowest() -> None:
    trace = trace_of(scenario_of(plan({"cluster.gpus": "131072"})), seed=0)
    shown = {span["pid"] for span in spans(trace)}
    assert MOST_NODES - 8 <= len(shown) <= MOST_NODES
    end = next(each["ts"] for each in trace["traceEvents"] if each["name"] == "peer complete")
    sent = [each["ts"] + each["dur"] for each in spans(trace) if each["tid"] == 3]
    assert max(sent) <= end * (1 + 1e-9)


def test_the_document_s_parts_make_one(played: Simulation) -> None:
    found = simulation_document(played)
    assert sum(found["parts"].values()) == pytest.approx(1, abs=1e-12)
    load = found["filesystem"]["load"]
    seconds = found["seconds"]["total"] / found["runs"]
    assert (len(load["mean_bytes_per_s"]) - 1) * load["bin_s"] < seconds
    assert len(load["mean_bytes_per_s"]) * load["bin_s"] >= seconds
    assert max(load["peak_bytes_per_s"]) <= found["filesystem"]["peak_bytes_per_s"] + 1
    assert "at" not in found
    assert all(each["source"] for each in found["inputs"].values())


def test_the_page_stands_alone(played: Simulation) -> None:
    page = simulation_page(played)
    assert page.count("js-plotly-plot") >= 5 or page.count("plotly-graph-div") >= 5
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', page)
    for words in ("Where the time goes", "Complete in each tier", "Work lost", "goodput"):
        assert words in page
    assert simulation_page(played).count("<h2>") == page.count("<h2>")


def test_three_strategies_meet_the_same_failures() -> None:
    found = compare(
        resolve(flags=read_flags({})), "filesystem=100GB/s,1TB/s", runs=1, days=4, seed=2
    )
    assert [row.strategy for row in found.rows] == list(reversed(Strategy)) * 2
    failures = {
        tuple(row.simulation.tally.failures) for row in found.rows if row.simulation is not None
    }
    assert len(failures) == 1
    first = {row.strategy: row.simulation for row in found.rows[:3]}
    sync, tiered = (first[each] for each in (Strategy.SYNCHRONOUS, Strategy.TIERED))
    assert sync is not None
    assert tiered is not None
    assert tiered.goodput > sync.goodput
    assert tiered.tally.peak_bytes_per_ns < sync.tally.peak_bytes_per_ns
    page = comparison_page(found, "a job")
    assert page.count("<tr>") == 7
    assert comparison_document(found)["variable"] == "storage.filesystem"


def test_a_strategy_that_gets_nowhere_is_a_row_and_not_the_end() -> None:
    found = compare(resolve(flags=read_flags({"failures.mtbf": "5min"})), runs=1, days=2, seed=0)
    stuck = {row.strategy: row.stuck for row in found.rows}
    assert "progress" in (stuck[Strategy.SYNCHRONOUS] or "")
    assert stuck[Strategy.TIERED] is None


@pytest.mark.parametrize("text", ["filesystem", "filesystem=", "happiness=1", "filesystem=fast"])
def test_what_cannot_be_varied_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        compare(resolve(), text, runs=1, days=1, seed=0)


def test_a_scenario_is_the_plan_s() -> None:
    worked = plan({"checkpoint.cadence": "10min", "checkpoint.durable_cadence": "25min"})
    found: Scenario = scenario_of(worked)
    assert found.durable_every == 3  # of whole near cadences
    assert found.drain_bytes_per_s == worked.drain.paced_bytes_per_s
    assert found.restart_s == tuple(max(t.restart_s, t.load_s) for t in worked.tiers)
    # what a drain disturbs in all is what the plan counts for it
    durable = worked.tiers[-1]
    assert found.disturbs[2] * found.interference * worked.drain.seconds == pytest.approx(
        durable.disturbs_s
    )


def test_no_restart_is_shorter_than_the_reading_in_it() -> None:
    found = scenario_of(plan({"storage.filesystem_read": "10GB/s"}))
    assert found.restart_s[:3] == (300.0, 300.0, 300.0)
    assert found.restart_s[3] == pytest.approx(648)


def test_what_is_predicted_of_a_small_job_is_its_hops_one_after_the_other() -> None:
    rates = {
        "cluster.d2h": 10e9,
        "cluster.host_bandwidth": 40e9,
        "cluster.nvme": 2e9,
        "cluster.nvme_read": 4e9,
        "storage.per_node": 1e9,
        "storage.per_node_read": 1e9,
    }
    found = predicted(rates, 1_000_000_000)
    assert found["pause"] == pytest.approx(0.02 + 0.1, rel=0.02)
    assert found["local"] == pytest.approx(0.12 + 0.5, rel=0.02)
    # one that may be slower and never faster than the whole store: the upper half of its spread
    assert 1.0 <= found["drain"] <= 1.1
    assert found["durable"] == pytest.approx(found["local"] + found["drain"])
