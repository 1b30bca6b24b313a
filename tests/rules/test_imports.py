"""Arrows between the parts go one way, and never in a circle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rules.source import MODULES, imports_of, name_of, ours

# What anyone may import.
COMMON = {"errors", "units", "config", "locks", "private", "watch.events", ""}

# Each unit may import what stands beside it (and itself). A unit is a package or a module.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "config": set(),
    "locks": set(),
    "private": set(),
    "watch": set(),
    "format": set(),
    "storage": set(),
    "plan": set(),
    "doctor": {"storage", "format", "plan"},
    "capture": {"format"},
    "commit": {"storage", "format"},
    "restore": {"commit.catalog", "storage", "format", "capture"},
    "drain": {"commit", "storage", "format"},
    "snapshot": {"capture", "format"},
    "membership": {"capture", "storage", "format"},
    "checkpointer": {
        *("capture", "restore", "commit.catalog", "storage", "format", "snapshot", "membership"),
    },
    "adapters": {"checkpointer", "capture", "restore", "commit.catalog", "reader", "snapshot"},
    "reader": {"restore", "commit.catalog", "storage", "format"},
    "testing": {"storage", "format", "commit", "restore", "capture", "drain"},
    "demo": {"format", "storage", "capture", "snapshot", "testing"},
    "cli": {
        *("reader", "commit", "drain", "storage", "format", "capture", "demo", "restore", "plan"),
        "doctor",
    },
    "": {"capture", "checkpointer", "reader", "snapshot"},
}

# The one way restore looks at a target is the way save does (see docs/decisions/0003).
RESTORE_FROM_CAPTURE = {
    "capture.state",
    "capture.copy",
    "capture.declare",
    "capture.optimizer",
    "capture.placement",
}


def unit_of(name: str) -> str:
    """The unit a module belongs to."""
    return name.partition(".")[0]


def allowed(source: str, target: str) -> bool:
    unit = unit_of(source)
    if target in COMMON or unit_of(target) == unit:
        return True
    if unit == "restore" and unit_of(target) == "capture":
        return target in RESTORE_FROM_CAPTURE
    return target in ARROWS[unit] or unit_of(target) in ARROWS[unit]


def test_every_unit_has_its_arrows() -> None:
    missing = {unit_of(name_of(path)) for path in MODULES} - set(ARROWS)
    assert not missing, f"no arrows are stated for {sorted(missing)}: add them to ARROWS"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_arrows(path: Path) -> None:
    source = name_of(path)
    wrong = [
        target
        for name, _ in imports_of(path)
        if (target := ours(name)) is not None and not allowed(source, target)
    ]
    assert not wrong, f"{source} imports {wrong}: no such arrow"


def test_no_cycle() -> None:
    graph = {
        name_of(path): {
            target
            for name, typing_only in imports_of(path)
            if not typing_only and (target := ours(name)) not in (None, "")
        }
        for path in MODULES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            pytest.fail("cycle: " + " -> ".join((*trail[trail.index(module) :], module)))
        if module in done or module not in graph:
            return
        for target in graph[module]:
            visit(target, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())
