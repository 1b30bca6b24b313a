"""What was found: rows for a table, a document, and the file that ``plan --file`` takes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from forebay.doctor.finding import Finding, Verdict
from forebay.plan.figure import Kind

_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNITS = {Kind.BYTES: "B", Kind.RATE: "B/s"}
_HEAD = "# Measured by forebay doctor; forebay plan --file takes it.\n"


def document(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Every line with values in SI units, and as people read them."""
    return [
        {
            "hop": each.hop,
            "name": each.name,
            "field": each.field or None,
            "unit": each.kind.value,
            "measured": each.measured,
            "measured_text": each.seen,
            "expected": each.expected,
            "expected_text": each.wanted,
            "expected_source": each.source or None,
            "verdict": each.verdict.value,
            "holds": each.verdict.holds,
            "note": each.note,
            "to_do": each.to_do or None,
        }
        for each in findings
    ]


def counted(findings: Sequence[Finding]) -> str:
    """How many lines there are of each verdict, in one line."""
    counts = {verdict: sum(each.verdict is verdict for each in findings) for verdict in Verdict}
    return ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)


def plan_file(findings: Iterable[Finding], *, host: str, date: str) -> str:
    """YAML of the measured fields, each with its source; of two with one field the later counts.

    Read back, a figure is within 0.01 % of what was measured.
    """
    sections: dict[str, dict[str, dict[str, str]]] = {}
    for each in findings:
        if each.field and each.measured and each.verdict is not Verdict.FAILED:
            section, _, key = each.field.partition(".")
            sections.setdefault(section, {})[key] = {
                "value": exact(each.measured, each.kind),
                "source": f"measured by forebay doctor on {host}, {date}: {each.note}",
            }
    if not sections:
        return _HEAD + "{}\n"
    return _HEAD + yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=10_000)


def exact(value: float, kind: Kind) -> str:
    """A figure with enough digits to be read back, as ``'55.123 GB/s'``."""
    unit = _UNITS.get(kind)
    if unit is None:
        return repr(float(value))
    for scale, prefix in _SCALES:
        if value >= scale:
            return f"{value / scale:.5g} {prefix}{unit}"
    return f"{value:.0f} {unit}"
