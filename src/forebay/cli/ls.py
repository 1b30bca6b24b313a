"""``forebay ls URL``: committed checkpoints; ``--all``: what is not committed, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from forebay.cli.output import AsJson, say_json, when
from forebay.cli.screen import SCREEN
from forebay.errors import DamagedError
from forebay.reader import Run
from forebay.units import show_bytes, show_seconds


def _committed(run: Run, step: int) -> dict[str, Any]:
    try:
        manifest = run.manifest(step)
    except DamagedError as error:
        return {"step": step, "state": "damaged", "why": str(error)}
    return {
        "step": step,
        "state": "committed",
        "committed_s": manifest.committed_s,
        "bytes": manifest.data_bytes,
        "world_size": manifest.world_size,
        "nodes": manifest.nodes,
        "attempt": manifest.attempt,
        "tensors": manifest.tensors,
        "tiers": ["durable"],
    }


def _loose(run: Run) -> list[dict[str, Any]]:
    rows = []
    for left in run.catalog.unfinished():
        if left.complete:
            why = "all records are there, the manifest is not: `forebay commit` finishes it"
        elif left.nodes is None:
            why = "no node's record is there"
        else:
            missing = sorted(set(range(left.nodes)) - set(left.present))
            why = f"no record of nodes {', '.join(map(str, missing))} of {left.nodes}"
        rows.append(
            {
                "step": left.step,
                "state": "not committed",
                "attempt": left.attempt,
                "age_s": left.age_s,
                "why": why,
            }
        )
    return rows


def ls(
    url: Annotated[str, typer.Argument(help="The run: a directory or URL.")],
    show_all: Annotated[bool, typer.Option("--all", help="Also attempts not committed.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the committed checkpoints of a run."""
    run = Run(url)
    rows = [_committed(run, step) for step in run.steps()]
    loose = _loose(run) if show_all else []
    if as_json:
        say_json({"run": run.store.url, "checkpoints": rows, "uncommitted": loose})
        return
    table = Table(title=run.store.url, title_justify="left")
    for name in ("step", "committed", "bytes", "ranks", "nodes", "tiers", "attempt"):
        table.add_column(name, justify="right" if name in ("step", "bytes", "ranks") else "left")
    for row in rows:
        if row["state"] == "damaged":
            table.add_row(str(row["step"]), f"[red]damaged[/]: {row['why']}", *[""] * 5)
            continue
        table.add_row(
            str(row["step"]),
            when(row["committed_s"]),
            show_bytes(row["bytes"]),
            str(row["world_size"]),
            str(row["nodes"]),
            ", ".join(row["tiers"]),
            row["attempt"],
        )
    for row in loose:
        age = show_seconds(row["age_s"])
        table.add_row(
            str(row["step"]),
            f"[yellow]not committed[/] ({age} old): {row['why']}",
            *[""] * 4,
            row["attempt"],
        )
    SCREEN.print(table)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("ls")(ls)
