"""Inverses and sweeps."""

from __future__ import annotations

import pytest

from forebay.errors import UsageError
from forebay.plan.arithmetic import work
from forebay.plan.inputs import Inputs
from forebay.plan.resolve import read_flags, resolve
from forebay.plan.solve import Bound, solve
from forebay.plan.vary import at, sweep, variable
from forebay.plan.verdict import conditions_of


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return resolve(flags=read_flags({"checkpoint.pause": "1s"}))


def bounds(inputs: Inputs, key: str) -> dict[str, Bound]:
    return {bound.goal: bound for bound in solve(inputs, key).bounds}


def test_the_filesystem_that_a_synchronous_write_needs(inputs: Inputs) -> None:
    found = bounds(inputs, "filesystem")
    assert found["sync_loss"].smallest == pytest.approx(360e9, rel=1e-6)
    assert found["drain"].smallest == pytest.approx(6.48e12 / 1800 / 0.25, rel=1e-6)
    assert not found["total_loss"].holds
    assert (found["pause"].smallest, found["pause"].largest) == (None, None)


def test_the_cadence(inputs: Inputs) -> None:
    found = bounds(inputs, "cadence")
    assert found["pause_loss"].smallest == pytest.approx(100, rel=1e-6)
    assert found["drain"].smallest == pytest.approx(259.2, rel=1e-6)


def test_total_loss_holds_between_two_cadences() -> None:
    good = resolve(
        flags=read_flags(
            {
                "failures.restart": "30s",
                "checkpoint.durable_cadence": "30min",
                "failures.mtbf": "20h",
            }
        )
    )
    found = bounds(good, "cadence")["total_loss"]
    assert found.smallest is not None
    assert found.largest is not None
    for cadence_s, holds in (
        (found.smallest * 1.001, True),
        (found.smallest * 0.999, False),
        (found.largest * 0.999, True),
        (found.largest * 1.001, False),
    ):
        changed = at(good, variable("cadence"), cadence_s)
        assert (work(changed, best=False).losses.total < 0.01) == holds


def test_gpus_come_in_replicas_and_bring_failures(inputs: Inputs) -> None:
    found = bounds(inputs, "gpus")
    assert found["total_loss"].largest is not None
    assert found["total_loss"].largest % 128 == 0
    half = at(inputs, variable("gpus"), 8192)
    assert half.cluster.gpus == 8192
    assert half.layout.dp == 64
    assert half.failures.mtbf_s == pytest.approx(2 * inputs.failures.mtbf_s)


@pytest.mark.parametrize(
    "key", ["nvme", "d2h", "restart", "mtbf", "budget", "slots", "params", "peer"]
)
def test_the_ends_of_what_holds_are_ends(inputs: Inputs, key: str) -> None:
    what = variable(key)
    found = bounds(inputs, key)["conditions"]
    assert found.holds
    for end, beyond in ((found.smallest, 0.99), (found.largest, 1.01)):
        if end is None or what.given.kind.value == "whole":
            continue

        def holds(value: float) -> bool:
            return all(
                each.holds for each in conditions_of(work(at(inputs, what, value), best=False))
            )

        assert holds(end)
        assert not holds(end * beyond)


def test_sweep(inputs: Inputs) -> None:
    found = sweep(inputs, "cadence=1min:60min", points=7)
    assert found.values[0] == pytest.approx(60)
    assert found.values[-1] == pytest.approx(3600)
    assert [plan.inputs.checkpoint.durable_cadence_s for plan in found.plans] == list(found.values)
    pauses = [plan.losses.pause for plan in found.plans]
    assert pauses == sorted(pauses, reverse=True)
    counts = sweep(inputs, "gpus=128:1024", points=50)
    assert list(counts.values) == [128 * n for n in range(1, 9)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cadence", r"expected VARIABLE=FROM:TO"),
        ("cadence=1min", r"expected VARIABLE=FROM:TO"),
        ("cadenza=1:2", r"unknown variable 'cadenza': did you mean cadence\?"),
        ("cadence=2min:1min", r"expected FROM below TO"),
        ("cadence=0:1min", r"expected more than 0"),
        ("fixed=0:1s", r"expected more than 0"),
        ("writers=1:2", r"unknown variable 'writers'"),
        ("layers=10:20", r"unknown variable 'layers'"),
        ("share-durable=1%:50%", r"unknown variable 'share-durable'"),
        ("quantile=10%:90%", r"unknown variable 'quantile'"),
        ("durable-cadence=1min:60min", r"expected the cadence 1800 s or more, found 60 s"),
    ],
)
def test_sweeps_that_are_none(inputs: Inputs, text: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        sweep(inputs, text)


def test_a_goal_is_not_solved_for(inputs: Inputs) -> None:
    with pytest.raises(UsageError, match="is a goal itself"):
        solve(inputs, "pause-limit")
