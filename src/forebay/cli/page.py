"""A report as one page in a file: what ``--html`` writes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from forebay.cli.output import say_aside, write_text
from forebay.errors import UsageError


def need_plots() -> None:
    """Raise UsageError where what draws is not installed: before the work, not after it."""
    try:
        import_module("forebay.plan.plots")
    except ModuleNotFoundError as error:
        name = (error.name or "plotly").partition(".")[0]
        raise UsageError(
            f"--html: expected {name}, found it not installed: pip install 'forebay[report]'"
        ) from None


def write_page(path: Path, text: str) -> None:
    """Write the page and say where it is. Raises UsageError."""
    write_text(path, text, "--html")
    say_aside(f"report: {path}")
