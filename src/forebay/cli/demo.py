"""``forebay demo``: train, kill, resume, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.output import AsJson, say_json


def demo(
    directory: Annotated[Path, typer.Option(help="Where the demo works.")] = Path("demo"),
    store: Annotated[
        str, typer.Option(help="Durable tier: file (a directory), s3, s3-faulty, s3-restart.")
    ] = "file",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps, a smaller model.")] = False,
    as_json: AsJson = False,
) -> None:
    """Kill a training run while a checkpoint drains, resume it, and compare it bit for bit."""
    from forebay.demo.run import run_demo

    summary = run_demo(directory, store=store, quick=quick, json_out=as_json)
    if as_json:
        say_json(summary)
    if not summary["ok"]:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("demo")(demo)
