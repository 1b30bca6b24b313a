"""Verdicts of the doctor, and the file that the plan takes. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from forebay.doctor.finding import Finding, Verdict, compare, failed, judged
from forebay.doctor.report import counted, document, exact, plan_file
from forebay.plan.figure import Figure, Kind
from forebay.plan.inputs import FIELDS
from forebay.plan.resolve import read_file, resolve

EXPECTED = {"cluster.d2h": Figure(value=50e9, source="a data sheet")}


def rate(measured: float, field: str = "cluster.d2h") -> Finding:
    return compare(
        name="one GPU to pinned",
        hop="device to host",
        kind=Kind.RATE,
        measured=measured,
        expected=EXPECTED,
        field=field,
        note="8 copies at once",
        advice="look at the link",
    )


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [(60e9, "good"), (50e9, "good"), (40e9, "good"), (39.9e9, "slow"), (1.0, "slow"), (0, "slow")],
)
def test_below_four_fifths_is_slow(measured: float, verdict: str) -> None:
    found = rate(measured)
    assert found.verdict.value == verdict
    assert found.verdict.holds == (verdict == "good")
    assert found.to_do == ("" if verdict == "good" else "look at the link")
    assert (found.expected, found.source) == (50e9, "a data sheet")


def test_what_nobody_expects_is_measured_and_holds() -> None:
    found = rate(1.0, field="cluster.nvme")
    assert found.verdict is Verdict.MEASURED
    assert found.verdict.holds
    assert found.expected is None
    assert found.to_do == ""


def test_the_threshold_is_an_option() -> None:
    found = rate(45e9)
    assert found.verdict is Verdict.GOOD
    strict = judged(found, 0.95)
    assert strict.verdict is Verdict.SLOW
    assert strict.to_do == "look at the link"
    assert judged(strict, 0.5).verdict is Verdict.GOOD


@pytest.mark.parametrize("verdict", [Verdict.OFF, Verdict.FAILED, Verdict.NONE])
def test_a_threshold_changes_no_other_verdict(verdict: Verdict) -> None:
    found = replace(rate(60e9), verdict=verdict)
    assert judged(found, 0.01) is found


def test_the_file_reads_back_as_what_was_measured() -> None:
    values = {
        "cluster.d2h": (Kind.RATE, 55.123456e9),
        "cluster.nvme": (Kind.RATE, 999.96e6),
        "cluster.nvme_capacity": (Kind.BYTES, 30.721e12),
        "cluster.host_memory": (Kind.BYTES, 2.0e12),
        "cluster.peer": (Kind.RATE, 123.0),
        "storage.per_node": (Kind.RATE, 1.00004e3),
    }
    found = [
        Finding(
            name=field,
            hop="any",
            kind=kind,
            verdict=Verdict.MEASURED,
            measured=value,
            field=field,
            note="a note: with a colon, 'quotes' and # marks",
        )
        for field, (kind, value) in values.items()
    ]
    text = plan_file(found, host="node 17", date="2026-12-02")
    chosen, figures = read_file(yaml.safe_load(text), "cluster.yaml")
    assert chosen == {}
    assert set(figures) == set(values)
    for field, (_, value) in values.items():
        assert figures[field].value == pytest.approx(value, rel=1e-4)
        assert "measured by forebay doctor on node 17, 2026-12-02: a note" in figures[field].source
    inputs = resolve(file=figures)
    assert inputs.cluster.d2h_bytes_per_s == pytest.approx(55.123456e9, rel=1e-4)
    assert inputs.sources["cluster.d2h"] == figures["cluster.d2h"].source


def test_only_measured_fields_are_written() -> None:
    found = [
        replace(rate(60e9), verdict=Verdict.FAILED),
        replace(rate(60e9), measured=None),
        replace(rate(60e9), field=""),
        failed("store", "put rate", Kind.RATE, "no answer", field="storage.per_node"),
    ]
    text = plan_file(found, host="node", date="2026-12-02")
    assert read_file(yaml.safe_load(text), "x") == ({}, {})


def test_of_two_lines_with_one_field_the_later_counts() -> None:
    text = plan_file([rate(1e9), rate(2e9)], host="node", date="2026-12-02")
    _, figures = read_file(yaml.safe_load(text), "x")
    assert figures["cluster.d2h"].value == 2e9


@pytest.mark.parametrize("value", [1.0, 999.0, 999_999.0, 1e6, 12_345_678.9, 4.2e15])
@pytest.mark.parametrize("kind", [Kind.RATE, Kind.BYTES])
def test_figures_keep_their_digits(value: float, kind: Kind) -> None:
    assert kind.parse(exact(value, kind)) == pytest.approx(value, rel=1e-4)


def test_the_document_has_every_line() -> None:
    bad, good = rate(1e9), rate(60e9)
    first, second = document([bad, good])
    assert first["verdict"] == "slow"
    assert first["holds"] is False
    assert first["to_do"] == "look at the link"
    assert first["measured_text"] == "1 GB/s"
    assert first["expected_source"] == "a data sheet"
    assert second["to_do"] is None
    assert counted([bad, good, good]) == "2 good, 1 slow"


def test_the_fields_it_fills_are_the_plans() -> None:
    names = {"d2h", "d2h_pageable", "host_bandwidth", "host_memory", "nvme", "nvme_read"}
    names |= {"nvme_capacity", "peer"}
    wanted = {f"cluster.{name}" for name in names}
    assert wanted | {"storage.per_node", "storage.per_node_read"} <= set(FIELDS)
