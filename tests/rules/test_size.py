"""A module has one job, a size that can be read at once, and a name that says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rules.source import MODULES, name_of, where

MOST_LINES = 500
SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{where(path)}: {lines} lines: it has two jobs"


def test_names_say_what_a_module_is() -> None:
    bad = [
        where(path) for path in MODULES if SAY_NOTHING & {*Path(where(path)).parts[:-1], path.stem}
    ]
    assert not bad
