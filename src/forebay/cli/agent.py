"""``forebay agent URL``: serve a run on this node in the foreground."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from forebay.capture.arena import make_job_directory
from forebay.config import RUNTIME_VARIABLE, linger_s, runtime_directory
from forebay.drain.agent import run_agent
from forebay.errors import UsageError
from forebay.format.messages import AGENT_CONFIG, AgentConfig, job_directory
from forebay.format.names import MANIFEST_PREFIX
from forebay.storage.address import open_store, resolve_url
from forebay.units import parse_rate, parse_seconds


def agent(
    url: Annotated[str, typer.Argument(help="The run: a directory or URL.")],
    local: Annotated[Path | None, typer.Option(help="Node-local tier (NVMe).")] = None,
    node: Annotated[int, typer.Option(help="Number of this node in the job.")] = 0,
    drain_rate: Annotated[str | None, typer.Option(help="Limit of the drain, as 500MB/s.")] = None,
    drain_requests: Annotated[
        float | None, typer.Option(help="Limit of requests to the store, a second.")
    ] = None,
    single_writer: Annotated[
        bool, typer.Option("--single-writer", help="The store lacks exclusive creates.")
    ] = False,
    durable_every: Annotated[
        str | None, typer.Option(help="One durable snapshot in so long a time, as 10min.")
    ] = None,
    queue: Annotated[int, typer.Option(help="Snapshots that may wait for the upload.")] = 1,
    store_timeout: Annotated[
        str, typer.Option(help="How long a store that fails is tried again.")
    ] = "6h",
    keep_last: Annotated[int | None, typer.Option(help="Committed checkpoints that stay.")] = None,
    keep_every: Annotated[int | None, typer.Option(help="Multiples of this step stay.")] = None,
    linger: Annotated[str | None, typer.Option(help="How long to outlive dead trainers.")] = None,
) -> None:
    """Run the node agent of a run in the foreground; trainers start one if there is none."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    run = resolve_url(url)
    store = open_store(run, single_writer=single_writer)
    next(iter(store.list(MANIFEST_PREFIX)), None)  # keys and bucket are right, or one line says not
    if local is not None:
        open_store(local.absolute())
    directory = job_directory(runtime_directory(), run, node)
    try:
        make_job_directory(directory)
    except FileNotFoundError as error:
        raise UsageError(
            f"{directory}: {error.strerror}: set {RUNTIME_VARIABLE} to another directory"
        ) from None
    config = AgentConfig(
        run=run,
        local=None if local is None else str(local.absolute()),
        node=node,
        keep_last=keep_last,
        keep_every=keep_every,
        drain_bytes_per_s=None if drain_rate is None else parse_rate(drain_rate),
        drain_requests_per_s=drain_requests,
        commit_mode="single-writer" if single_writer else "create",
        durable_every_s=None if durable_every is None else parse_seconds(durable_every),
        queue=queue,
        store_timeout_s=parse_seconds(store_timeout),
        linger_s=linger_s() if linger is None else parse_seconds(linger),
    )
    temporary = directory / f".{AGENT_CONFIG}.cli"
    temporary.write_bytes(msgspec.json.encode(config))
    temporary.chmod(0o600)
    temporary.rename(directory / AGENT_CONFIG)
    raise typer.Exit(run_agent(directory))


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("agent")(agent)
