"""Findings for others: a document, and the file that the plan takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from forebay.doctor.finding import Finding
from forebay.plan.figure import Kind
from forebay.plan.inputs import FIELDS

_DIGITS = 4


def document_of(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Each finding as plain values, in SI units."""
    return [
        {
            "name": each.name,
            "hop": each.hop,
            "measured": each.measured,
            "expected": each.expected,
            "unit": each.kind.value,
            "verdict": each.verdict.value,
            "holds": each.verdict.holds,
            "field": each.field or None,
            "source": each.source,
            "note": each.note,
            "advice": each.advice or None,
        }
        for each in findings
    ]


def file_of(findings: Sequence[Finding], *, where: str, when: str) -> str:
    """YAML that ``forebay plan --file`` takes: every measured field with its source."""
    sections: dict[str, dict[str, dict[str, str]]] = {}
    for each in findings:
        if each.field in FIELDS and each.measured is not None:
            section, _, key = each.field.partition(".")
            sections.setdefault(section, {})[key] = {
                "value": _exact(each.kind, each.measured),
                "source": f"measured by forebay doctor on {where}, {when}: {each.note}",
            }
    text: str = yaml.safe_dump(sections, sort_keys=True, allow_unicode=True, width=100)
    return text if sections else "{}\n"


def _exact(kind: Kind, value: float) -> str:
    """``value`` with a unit that is read back to four figures."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")):
        if value >= scale or unit == "B":
            number = f"{float(f'{value / scale:.{_DIGITS}g}'):g}"
            return f"{number} {unit}/s" if kind is Kind.RATE else f"{number} {unit}"
    raise AssertionError("unreachable")
