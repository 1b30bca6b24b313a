"""``forebay show URL [STEP]``: manifest, tensors, values."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from forebay.cli.output import AsJson, say_json, when
from forebay.cli.screen import SCREEN
from forebay.reader import Run
from forebay.units import show_bytes


def show(
    url: Annotated[str, typer.Argument(help="The run: a directory or URL.")],
    step: Annotated[int | None, typer.Argument(help="The step; the newest by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds."""
    run = Run(url)
    manifest = run.manifest(step)
    tensors = run.tensors(manifest.step)
    values = run.values(manifest.step)
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "path": info.path,
                "fqn": info.fqn,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "sharded": info.sharded,
                "bytes": info.nbytes,
            }
            for info in tensors.values()
        ]
        say_json(
            {
                "run": run.store.url,
                "step": manifest.step,
                "attempt": manifest.attempt,
                "committed_s": manifest.committed_s,
                "world_size": manifest.world_size,
                "nodes": manifest.nodes,
                "bytes": manifest.data_bytes,
                "slices": manifest.slices,
                "forebay": manifest.forebay,
                "format": manifest.version,
                "tensors": rows,
                "values": values,
            }
        )
        return
    SCREEN.print(
        f"step {manifest.step} of {run.store.url}\n"
        f"committed {when(manifest.committed_s)} by attempt {manifest.attempt}, "
        f"{manifest.world_size} ranks on {manifest.nodes} nodes\n"
        f"{show_bytes(manifest.data_bytes)}, {manifest.tensors} tensors in "
        f"{manifest.slices} slices, format {manifest.version}, by forebay {manifest.forebay}",
        soft_wrap=True,
    )
    table = Table()
    for name in ("tensor", "dtype", "shape", "layout", "bytes"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for info in tensors.values():
        layout = "sharded" if info.sharded else "replicated"
        if info.fqn != info.path:
            layout = f"tied to {info.fqn}"
        shape = "x".join(map(str, info.shape)) or "scalar"
        table.add_row(info.path, info.dtype, shape, layout, show_bytes(info.nbytes))
    SCREEN.print(table)
    for path, item in values.items():
        text = repr(item)
        SCREEN.print(f"{path} = {text if len(text) <= 200 else text[:197] + '...'}", markup=False)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("show")(show)
