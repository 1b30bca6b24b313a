"""``forebay commit URL STEP``: finish a checkpoint whose records are all there."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.output import AsJson, say_json
from forebay.cli.screen import SCREEN
from forebay.commit.publish import finish
from forebay.format.names import check_step
from forebay.reader import Run


def commit(
    url: Annotated[str, typer.Argument(help="The run: a directory or URL.")],
    step: Annotated[int, typer.Argument(help="The step to commit.")],
    attempt: Annotated[
        str | None, typer.Option(help="Which attempt, if several are whole.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Commit a step whose records are all there; exit status 3 names what is missing."""
    verdict, manifest = finish(Run(url).store, check_step(step), attempt)
    if as_json:
        say_json({"step": step, "attempt": manifest.attempt, "verdict": verdict.value})
    else:
        SCREEN.print(f"step {step}, attempt {manifest.attempt}: {verdict.value}")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("commit")(commit)
