"""Many runs against the exact forms, and what must hold whatever is given."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.plan.arithmetic import Plan, work
from forebay.plan.losses import exact_goodput
from forebay.plan.resolve import read_flags, resolve
from forebay.plan.scenario import NoProgressError, Strategy, scenario_of
from forebay.plan.sim_document import simulation_document
from forebay.plan.simulate import Simulation, simulate
from forebay.plan.tally import PARTS

ONE_TIER = {
    "failures.share_memory": "1",
    "failures.mtbf": "3.09h",
    "checkpoint.interference": "0",
    "checkpoint.mirror": "no",
}
TINY = {"cluster.gpus": "16", "model.params": "8e9"}


def plan(flags: dict[str, str]) -> Plan:
    return work(resolve(flags=read_flags(flags)), best=False)


def poisson(cadence_s: float, pause_s: float, restart_s: float, runs: int) -> tuple[float, float]:
    """Goodput played, and exact."""
    flags = ONE_TIER | {
        "checkpoint.cadence": f"{cadence_s}s",
        "checkpoint.pause": f"{pause_s}s",
        "failures.restart": f"{restart_s}s",
    }
    found = simulate(scenario_of(plan(flags)), runs=runs, seed=1)
    exact = exact_goodput(
        useful_s=cadence_s, pause_s=pause_s, mtbf_s=3.09 * 3600, restart_s=restart_s
    )
    return found.goodput, exact


@pytest.mark.parametrize(
    ("cadence_s", "pause_s", "restart_s", "runs"),
    [(1800, 60, 300, 24), (900, 20, 300, 12), (3600, 10, 1200, 30)],
)
def test_poisson_goodput(cadence_s: float, pause_s: float, restart_s: float, runs: int) -> None:
    found, exact = poisson(cadence_s, pause_s, restart_s, runs)
    assert abs(found - exact) < 0.005


@pytest.mark.soak
@pytest.mark.parametrize("pause_s", [1, 60])
def test_poisson_goodput_of_200_runs(pause_s: float) -> None:
    found, exact = poisson(1800, pause_s, 300, 200)
    print(f"pause {pause_s} s: played {found:.5f}, exact {exact:.5f}")
    assert abs(found - exact) < 0.001


def test_several_tiers_are_near_the_plan() -> None:
    flags = {"checkpoint.cadence": "5min", "checkpoint.durable_cadence": "30min"}
    worked = plan(flags | {"checkpoint.tail": "none"})
    found = simulate(scenario_of(worked), runs=5, seed=3)
    assert abs(found.goodput - worked.goodput) < 0.005


def test_the_same_seed_is_the_same_result_and_another_is_not() -> None:
    scenario = scenario_of(plan({}))
    first, again, other = (simulate(scenario, runs=2, days=9, seed=seed) for seed in (7, 7, 8))
    assert simulation_document(first) == simulation_document(again)
    assert first.goodputs != other.goodputs


def test_a_run_is_the_same_however_many_there_are() -> None:
    scenario = scenario_of(plan({}))
    few, many = (simulate(scenario, runs=runs, days=9).goodputs for runs in (2, 5))
    assert many[:2] == few


def durable(found: Simulation) -> tuple[float, float]:
    return found.tally.reached[3].quantile(0.5) / 1e9, found.tally.peak_bytes_per_ns * 1e9


def test_pacing_takes_longer_and_asks_for_less() -> None:
    worked = plan({"checkpoint.tail": "none", "failures.mtbf": "1e12s"})
    paced, whole = (
        simulate(scenario_of(worked, paced=each), runs=1, days=2) for each in (True, False)
    )
    paced_s, paced_rate = durable(paced)
    whole_s, whole_rate = durable(whole)
    assert paced_rate == pytest.approx(25e9)
    assert whole_rate == pytest.approx(100e9)
    assert paced_s == pytest.approx(259.3, rel=0.01)
    assert whole_s == pytest.approx(64.9, rel=0.01)
    # the node's bytes disturb as long at the node's own rates, paced or not
    assert paced.part("interference") == pytest.approx(whole.part("interference"), rel=0.01)


def test_the_tail_is_the_plan_s() -> None:
    worked = plan({"checkpoint.cadence": "1min", "checkpoint.spread": "0.5"})
    found = simulate(scenario_of(worked), runs=1, days=10).tally.pauses
    assert found.quantile(0.99) / 1e9 == pytest.approx(worked.pause.total_s, rel=0.05)
    assert found.most > found.quantile(0.99) > found.quantile(0.5)


def test_a_synchronous_pause_is_the_write() -> None:
    worked = plan({})
    found = simulate(scenario_of(worked, Strategy.SYNCHRONOUS), runs=1, days=5)
    assert found.tally.pauses.quantile(0.5) / 1e9 == pytest.approx(worked.sync.write_s, rel=0.01)
    assert found.tally.peak_bytes_per_ns * 1e9 == pytest.approx(100e9, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "runs", "days", "seed", "told"),
    [
        ({}, 0, 1.0, 0, "--runs"),
        ({}, 10**9, 1.0, 0, "--runs"),
        ({}, 1, 0.0, 0, "--days"),
        ({}, 1, -1.0, 0, "--days"),
        ({}, 1, float("nan"), 0, "--days"),
        ({}, 1, 1.0, -1, "--seed"),
        ({"checkpoint.cadence": "1us"}, 1, 54.0, 0, "checkpoints and failures"),
        ({"checkpoint.mirror": "no", "checkpoint.peer_cadence": "1h"}, 1, 1.0, 0, "peer-cadence"),
    ],
)
def test_what_cannot_be_played_is_refused(
    flags: dict[str, str], runs: int, days: float, seed: int, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        simulate(scenario_of(plan(flags)), runs=runs, days=days, seed=seed)


@pytest.mark.parametrize("mtbf", ["1s", "30s", "1min"])
def test_a_run_that_gets_nowhere_says_so(mtbf: str) -> None:
    with pytest.raises(NoProgressError, match="progress"):
        simulate(scenario_of(plan({"failures.mtbf": mtbf})), runs=1, days=10)


@settings(max_examples=50, deadline=None)
@given(
    cadence_s=st.floats(60, 7200),
    outer=st.integers(1, 9),
    mtbf_s=st.floats(600, 1e7),
    restart_s=st.floats(1, 3600),
    params=st.floats(1e8, 1e13),
    spread=st.sampled_from([0.0, 0.1, 0.8]),
    slots=st.integers(1, 4),
    local=st.booleans(),
    mirror=st.booleans(),
    paced=st.booleans(),
    interference=st.sampled_from([0.0, 0.03, 1.0]),
    strategy=st.sampled_from(Strategy),
    seed=st.integers(0, 2**32),
)
def test_whatever_is_given_the_parts_make_the_whole(
    cadence_s: float,
    outer: int,
    mtbf_s: float,
    restart_s: float,
    params: float,
    spread: float,
    slots: int,
    local: bool,
    mirror: bool,
    paced: bool,
    interference: float,
    strategy: Strategy,
    seed: int,
) -> None:
    worked = plan(
        TINY
        | {
            "checkpoint.cadence": f"{cadence_s}s",
            "checkpoint.durable_cadence": f"{cadence_s * outer}s",
            "failures.mtbf": f"{mtbf_s}s",
            "failures.restart": f"{restart_s}s",
            "model.params": f"{params}",
            "checkpoint.spread": f"{spread}",
            "checkpoint.slots": f"{slots}",
            "checkpoint.local": "yes" if local else "no",
            "checkpoint.mirror": "yes" if mirror else "no",
            "checkpoint.interference": f"{interference}",
        }
    )
    try:
        found = simulate(scenario_of(worked, strategy, paced=paced), runs=1, days=1, seed=seed)
    except NoProgressError:
        return
    tally = found.tally
    parts = [getattr(tally, f"{name}_ns") for name in PARTS]
    assert min(parts) >= 0
    assert sum(parts) == tally.total_ns
    assert 0 < found.goodput <= 1
    assert tally.due >= tally.taken + tally.skipped + tally.torn >= tally.due - 1
    assert tally.reached[3].count + tally.superseded <= tally.taken
    assert sum(tally.recovered) + tally.failed_restarts <= sum(tally.failures)
    assert sum(tally.failures) <= sum(tally.recovered) + tally.failed_restarts + 1
    assert tally.drain_ns <= tally.total_ns
    assert sum(found.load.nbytes) == pytest.approx(tally.drained_bytes, rel=1e-6, abs=1)
    rate = scenario_of(worked, strategy, paced=paced).drain_bytes_per_s
    assert tally.peak_bytes_per_ns * 1e9 <= rate * (1 + 1e-6)
