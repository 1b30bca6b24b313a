"""``forebay doctor [URL]``: what each hop really does here, beside what the plan assumes."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from forebay.cli.output import ASIDE, SCREEN, AsJson, say_json
from forebay.cli.plan import read_yaml
from forebay.doctor.finding import Finding, Verdict
from forebay.errors import UsageError
from forebay.plan.arithmetic import work
from forebay.plan.figure import Figure
from forebay.plan.inputs import FIELDS, value_of
from forebay.plan.resolve import resolve
from forebay.units import parse_bytes

_FAILED = 6
_STYLES = {
    Verdict.GOOD: "green",
    Verdict.SLOW: "bold red",
    Verdict.OFF: "bold red",
    Verdict.FAILED: "bold red",
    Verdict.NONE: "dim",
    Verdict.MEASURED: "",
}


def doctor(
    url: Annotated[str | None, typer.Argument(help="The durable tier: a directory or URL.")] = None,
    local: Annotated[Path | None, typer.Option(help="Directory on the node's own disk.")] = None,
    peer: Annotated[str | None, typer.Option(help="HOST:PORT of a node that listens.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="Answer another node's --peer: [HOST:]PORT.")
    ] = None,
    token: Annotated[
        str, typer.Option(envvar="FOREBAY_TOKEN", help="The same at --peer and --listen.")
    ] = "",
    cluster: Annotated[str | None, typer.Option(help="Preset to compare with.")] = None,
    storage: Annotated[str | None, typer.Option(help="Preset to compare with.")] = None,
    file: Annotated[Path | None, typer.Option(help="YAML of a plan to compare with.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each line.")] = 1.0,
    size: Annotated[str, typer.Option(help="Most bytes to hold and to write.")] = "256MiB",
    write: Annotated[Path | None, typer.Option(help="Write a file for plan --file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure memory, disks, store and devices here; say what is slow or silently off."""
    from forebay.doctor import device, disk, fastpath, limits, memory, report, store
    from forebay.doctor import peer as peers

    if listen is not None:
        peers.listen(listen, token=token, told=_told)
        return
    if not 0 < seconds <= 600:
        raise UsageError(f"--seconds: expected more than 0, up to 600, found {seconds:g}")
    size_bytes = parse_bytes(size)
    if size_bytes < 2**24:
        raise UsageError(f"--size: expected 16MiB or more, found {size}")
    gpus = fastpath.has_gpu()
    expected, arena_bytes = _assumed(cluster, storage, file, gpus)
    found: list[Finding] = []
    found += device.measure(expected, seconds=seconds, size_bytes=size_bytes, told=_told)
    found += memory.measure(expected, seconds=seconds, size_bytes=size_bytes, told=_told)
    if local is not None:
        found += disk.measure(local, expected, seconds=seconds, size_bytes=size_bytes, told=_told)
    if url is not None:
        found += store.measure(url, expected, seconds=seconds, size_bytes=size_bytes, told=_told)
    found += peers.measure(peer, expected, token=token, seconds=seconds, told=_told)
    found += limits.measure(expected, arena_bytes=arena_bytes, pins=gpus, told=_told)
    found += fastpath.measure(told=_told)
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    text = report.file_of(found, where=platform.node(), when=when)
    if write is not None:
        try:
            write.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--write {write}: {error.strerror}: name another file") from None
    holds = all(each.verdict.holds for each in found)
    if as_json:
        say_json({"holds": holds, "findings": report.document_of(found), "file": text})
    else:
        _show(found, local, url)
    if not holds:
        raise typer.Exit(_FAILED)


def _assumed(
    cluster: str | None, storage: str | None, file: Path | None, gpus: bool
) -> tuple[dict[str, Figure], float | None]:
    """What the plan assumes of this machine; nothing where nobody said what it is.

    A preset says what a cluster of its kind should do. Without one and without a file there is
    nothing to hold a machine that has no GPU against.
    """
    if cluster is None and storage is None and file is None and not gpus:
        return {}, None
    chosen, figures = ({}, {}) if file is None else read_yaml(file)
    inputs = resolve(
        model=chosen.get("model"),
        cluster=cluster or chosen.get("cluster"),
        storage=storage or chosen.get("storage"),
        file=figures,
    )
    sections = [
        section
        for section, named in (
            ("cluster", cluster is not None or "cluster" in chosen or gpus),
            ("storage", storage is not None or "storage" in chosen),
        )
        if named
    ]
    expected = {
        name: Figure(value=value, source=inputs.sources.get(name, ""))
        for name in FIELDS
        if (name in figures or name.partition(".")[0] in sections)
        and (value := value_of(inputs, name)) is not None
    }
    return expected, work(inputs, best=False).memory.arena_bytes_per_node


def _show(found: list[Finding], local: Path | None, url: str | None) -> None:
    table = Table()
    for name in ("hop", "what", "measured", "expected", "", "how, and what to do"):
        table.add_column(name, overflow="fold")
    for each in found:
        words = each.note if not each.advice else f"{each.note}. Do: {each.advice}"
        wanted = each.kind.show(each.expected)
        if each.source:
            wanted += f" ({each.source})"
        table.add_row(
            each.hop,
            each.name,
            each.kind.show(each.measured),
            Text(wanted),
            Text(each.verdict.value, style=_STYLES[each.verdict]),
            Text(words),  # an error's text may hold brackets
        )
    SCREEN.print(table)
    if local is None:
        SCREEN.print("local disk: not measured; --local DIR measures the one that DIR is on")
    if url is None:
        SCREEN.print("store: not measured; give its URL")


def _told(line: str) -> None:
    ASIDE.print(line, markup=False, highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(doctor)
