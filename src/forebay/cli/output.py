"""How verbs speak: documents on stdout, everything else on stderr."""

from __future__ import annotations

import datetime
import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]

SCREEN = Console()
ASIDE = Console(stderr=True)


def say_json(document: object) -> None:
    """Print one JSON document."""
    data = msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=1)
    sys.stdout.write(data.decode() + "\n")


def say_error(text: str) -> None:
    """One line on stderr, whatever the text holds."""
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
