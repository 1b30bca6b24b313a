"""The public names are those that docs/api.md lists, and every error class is among them."""

from __future__ import annotations

import inspect
import re

import forebay
import forebay.errors
from tests.rules.source import ROOT


def documented() -> list[str]:
    """Names that stand in docs/api.md as bullets, in their order."""
    return re.findall(r"^- `(\w+)`", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


def test_exports_are_the_documented_ones() -> None:
    assert sorted(documented()) == sorted(forebay.__all__)


def test_every_error_is_exported() -> None:
    errors = {
        name
        for name, found in vars(forebay.errors).items()
        if inspect.isclass(found) and issubclass(found, forebay.ForebayError)
    }
    assert errors <= set(forebay.__all__)


def test_every_export_has_a_docstring() -> None:
    bare = [name for name in forebay.__all__ if not getattr(forebay, name).__doc__]
    assert not bare
