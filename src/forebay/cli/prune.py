"""``forebay prune URL``: print what would be deleted and why; ``--yes`` does it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from forebay.cli.output import AsJson, say_json
from forebay.cli.screen import SCREEN
from forebay.commit.reclaim import delete_step
from forebay.commit.retain import decide
from forebay.config import Keep
from forebay.reader import Run


def prune(
    url: Annotated[str, typer.Argument(help="The run: a directory or URL.")],
    keep_last: Annotated[int, typer.Option(help="How many of the newest stay.")],
    keep_every: Annotated[int | None, typer.Option(help="Multiples of this step stay.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Act on the plan.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan what to delete of the committed checkpoints, and with --yes delete it."""
    run = Run(url)
    plan = decide(run.steps(), Keep(last=keep_last, every=keep_every))
    if not as_json:
        table = Table()
        for name in ("step", "", "why"):
            table.add_column(name)
        for decision in plan:
            table.add_row(str(decision.step), "keep" if decision.keep else "delete", decision.why)
        SCREEN.print(table)
    if yes:
        for decision in plan:
            if not decision.keep:
                delete_step(run.store, decision.step)
    if as_json:
        rows = [{"step": d.step, "keep": d.keep, "why": d.why} for d in plan]
        say_json({"run": run.store.url, "plan": rows, "done": yes})
    elif not yes:
        SCREEN.print("nothing was deleted; --yes acts on this plan")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("prune")(prune)
