"""How verbs speak: documents on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import datetime
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from forebay.errors import UsageError

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]

NOT_MET = 6
"""Exit status of `plan` and `doctor` when something is not as it has to be."""


def say_json(document: object) -> None:
    """Print one JSON document."""
    data = msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=1)
    sys.stdout.write(data.decode() + "\n")


def write_text(path: Path, text: str, flag: str) -> None:
    """Write a file that a flag named. Raises UsageError naming the flag."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{flag} {path}: {error.strerror}: name a file that can be written"
        ) from None


def say_aside(text: str) -> None:
    """One line on stderr that is no error."""
    with contextlib.suppress(BrokenPipeError):  # whoever reads no more misses nothing
        sys.stderr.write(text + "\n")


def say_error(text: str) -> None:
    """One line on stderr, whatever the text holds."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write("forebay: " + " ".join(text.split()) + "\n")


def when(seconds: float) -> str:
    """Unix time as local date and time."""
    if not seconds:
        return "-"
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _plain(item: Any) -> Any:
    if isinstance(item, complex | set | frozenset):
        return str(item)
    return repr(item)
