"""``forebay status``: what the agents of this node are doing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from forebay.cli.output import AsJson, say_json, when
from forebay.cli.screen import SCREEN
from forebay.config import runtime_directory
from forebay.drain.agent import ask, read_config
from forebay.errors import AgentError, ForebayError
from forebay.format.messages import AGENT_SOCKET, AskStatus, Phase, StatusReply
from forebay.storage.address import resolve_url
from forebay.units import show_bytes, show_rate, show_seconds

_BAD = (Phase.FAILED, Phase.ABANDONED)


def _one(directory: Path) -> dict[str, Any]:
    try:
        run = read_config(directory).run
    except ForebayError as error:
        return {"directory": str(directory), "run": None, "healthy": False, "why": str(error)}
    try:
        reply = ask(directory / AGENT_SOCKET, AskStatus(), timeout_s=5)
    except AgentError as error:
        return {"directory": str(directory), "run": run, "healthy": False, "why": str(error)}
    assert isinstance(reply, StatusReply)
    last = max(reply.snapshots, key=lambda s: s.staged_s, default=None)
    healthy = last is None or last.phase not in _BAD
    why = "" if last is None or healthy else f"step {last.step}: {last.detail}"
    found: dict[str, Any] = msgspec.to_builtins(reply)
    for of_the_wire in ("type", "question"):
        found.pop(of_the_wire, None)
    return {"directory": str(directory), "healthy": healthy, "why": why, **found}


def status(
    url: Annotated[str | None, typer.Argument(help="Only this run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Ask every agent of this node; exit status 5 when one is gone or its last snapshot failed."""
    wanted = None if url is None else resolve_url(url)
    directories = sorted(p for p in runtime_directory().glob("*-node-*") if p.is_dir())
    agents = [a for a in map(_one, directories) if wanted in (None, a["run"])]
    if as_json:
        say_json({"agents": agents})
    elif not agents:
        SCREEN.print("no agent serves a run here")
    for one in agents if not as_json else ():
        SCREEN.print(
            f"{one['run']} node {one.get('node', '?')}: "
            + (f"agent {one['pid']}, trainers {one['trainers']}" if "pid" in one else "no agent"),
            markup=False,
            soft_wrap=True,
        )
        if one["why"]:
            SCREEN.print(f"  {one['why']}", markup=False, soft_wrap=True)
        table = Table()
        if one.get("share", 1.0) < 1.0:
            SCREEN.print(f"  the store asked for less: {one['share']:.0%} of the budget is used")
        for name in ("step", "phase", "bytes", "done", "rate", "staged", "durable", "why"):
            table.add_column(name)
        for row in one.get("snapshots", ()):
            table.add_row(
                str(row["step"]),
                row["phase"],
                show_bytes(row["nbytes"]),
                show_bytes(row["done_bytes"]),
                show_rate(row["bytes_per_s"]),
                when(row["staged_s"]),
                _due(row),
                row["detail"] or row["trouble"],
            )
        SCREEN.print(table)
    if not all(one["healthy"] for one in agents):
        raise typer.Exit(AgentError.exit_code)


def _due(row: dict[str, Any]) -> str:
    """When a snapshot became durable, or will."""
    if row["durable_s"] or row["durable_in_s"] is None:
        return when(row["durable_s"])
    return f"in {show_seconds(row['durable_in_s'])}"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("status")(status)
