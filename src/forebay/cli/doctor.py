"""``forebay doctor [URL]``: measures each hop here, and compares it with what the plan assumes."""

from __future__ import annotations

import datetime
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from forebay.cli.output import NOT_MET, AsJson, say_aside, say_json, write_text
from forebay.cli.screen import SCREEN
from forebay.doctor import device, disk, fastpath, limits, links, memory, peer, report, store
from forebay.doctor.finding import SLOW_BELOW, Expected, Finding, Verdict, judged
from forebay.doctor.frames import MOST_STREAMS, parse_address
from forebay.doctor.listener import listen as serve
from forebay.doctor.starved import starved
from forebay.errors import UsageError
from forebay.plan.figure import Figure, Kind
from forebay.storage.address import check_url
from forebay.units import parse_bytes, parse_fraction, parse_seconds

_STYLES = {
    Verdict.GOOD: "green",
    Verdict.SLOW: "bold red",
    Verdict.OFF: "bold red",
    Verdict.FAILED: "bold red",
    Verdict.NONE: "dim",
    Verdict.MEASURED: "",
}
_NO_EXPECTATION = "nothing is expected: name --cluster, --storage or --file to compare"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What the plan assumes of the hops, and the bytes of a node's arenas; None if not planned."""

    expected: Expected
    arena_bytes: float | None


def _expectations(
    preset: str | None, cluster: str | None, storage: str | None, file: Path | None, here: bool
) -> _Plan:
    """From the plan's presets and file; nothing where neither was named and no GPU is here.

    A machine without a GPU is none of those that the default preset speaks of, and no store is the
    default one: of a section that nobody named, the fields that the file has are expected.
    """
    if not here and preset is None and cluster is None and storage is None and file is None:
        return _Plan(expected={}, arena_bytes=None)
    from forebay.cli.plan_file import read_yaml
    from forebay.plan.arithmetic import work
    from forebay.plan.inputs import FIELDS, value_of
    from forebay.plan.resolve import resolve

    chosen, figures = ({}, {}) if file is None else read_yaml(file)
    inputs = resolve(
        model=chosen.get("model") if preset is None else preset,
        cluster=chosen.get("cluster") if cluster is None else cluster,
        storage=chosen.get("storage") if storage is None else storage,
        file=figures,
    )
    named = {
        "cluster": here or cluster is not None or "cluster" in chosen,
        "storage": storage is not None or "storage" in chosen,
    }
    expected: dict[str, Figure] = {}
    for name in FIELDS:
        section, value = name.partition(".")[0], value_of(inputs, name)
        wanted = section in named and (named[section] or name in figures)
        if wanted and isinstance(value, int | float):
            expected[name] = Figure(value=value, source=inputs.sources.get(name, ""))
    arena_bytes = work(inputs, best=False).memory.arena_bytes_per_node
    return _Plan(expected=expected, arena_bytes=arena_bytes)


def doctor(
    url: Annotated[
        str | None, typer.Argument(help="The store to measure: a directory or URL.")
    ] = None,
    local: Annotated[
        Path | None, typer.Option("--local", help="A directory on the local disk to measure.")
    ] = None,
    peer_at: Annotated[
        str | None, typer.Option("--peer", help="HOST:PORT where another node runs --listen.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", help="[HOST:]PORT: let another node measure to here.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option("--token", envvar="FOREBAY_TOKEN", help="The same word on both nodes."),
    ] = None,
    listen_for: Annotated[
        str, typer.Option("--listen-for", help="How long --listen serves.")
    ] = "10min",
    streams: Annotated[
        int, typer.Option("--streams", help="TCP streams to the peer, side by side.")
    ] = peer.STREAMS,
    preset: Annotated[
        str | None, typer.Option("--preset", help="The plan's model, for the size of arenas.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="The plan's preset of nodes to compare with.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", help="The plan's preset of a store to compare with.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="The plan's YAML to compare with.")
    ] = None,
    seconds: Annotated[
        str, typer.Option("--seconds", help="About how long each measurement takes.")
    ] = "1s",
    size: Annotated[
        str, typer.Option("--size", help="Bytes that each measurement holds at most.")
    ] = "1GiB",
    timeout: Annotated[
        str, typer.Option("--timeout", help="How long store and peer are waited for.")
    ] = "30s",
    slow_below: Annotated[
        str, typer.Option("--slow-below", help="Part of what is expected below which it is slow.")
    ] = f"{SLOW_BELOW:g}",
    write: Annotated[
        Path | None, typer.Option("--write", help="Write a YAML that `forebay plan --file` takes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure each hop here; exit status 6 when one is not as the plan assumes."""
    signal.signal(signal.SIGTERM, _ended)
    if listen is not None:
        _listen(listen, token, _read(parse_seconds, listen_for, "--listen-for"), as_json)
        return
    duration_s = _read(parse_seconds, seconds, "--seconds")
    size_bytes = round(_read(parse_bytes, size, "--size"))
    timeout_s = _read(parse_seconds, timeout, "--timeout")
    part = _read(parse_fraction, slow_below, "--slow-below")
    if streams < 1 or streams > MOST_STREAMS:
        raise UsageError(f"--streams: expected 1 to {MOST_STREAMS}, found {streams}")
    if peer_at is not None:  # what is wrong is told before anything is measured
        parse_address(peer_at, "--peer")
    if local is not None:
        disk.check(local)
    if url is not None:
        check_url(url)
    paths = fastpath.read_paths()
    plan = _expectations(preset, cluster, storage, file, paths.gpu)
    expected = plan.expected
    if write is not None and not write.absolute().parent.is_dir():
        raise UsageError(f"--write {write}: {write.absolute().parent} is no directory: make it")
    bounds = {"seconds": duration_s, "size_bytes": size_bytes}
    found: list[Finding] = []
    found += device.measure(expected, **bounds, told=_told)  # type: ignore[arg-type]
    found += memory.measure(expected, **bounds, told=_told)  # type: ignore[arg-type]
    found += _local(local, expected, duration_s, size_bytes)
    found += _store(url, expected, duration_s, size_bytes, timeout_s)
    found += peer.measure(
        peer_at,
        expected,
        token=token,
        seconds=duration_s,
        told=_told,
        streams=streams,
        timeout_s=timeout_s,
    )
    found += limits.measure(expected, arena_bytes=plan.arena_bytes, rdma=paths.fabric, told=_told)
    _told("links and fast paths")
    found += [*links.measure(), *fastpath.measure()]
    found = [judged(each, part) for each in found]
    host, now = platform.node() or "this node", datetime.datetime.now().astimezone()
    text = report.plan_file(found, host=host, date=f"{now:%Y-%m-%d}")
    if write is not None:
        _write(write, text)
    holds = all(each.verdict.holds for each in found)
    if as_json:
        say_json(
            {
                "host": host,
                "at": now.isoformat(timespec="seconds"),
                "holds": holds,
                "slow_below": part,
                "findings": report.document(found),
                "file": text,
            }
        )
    else:
        _show(found, expected)
    if not holds:
        raise typer.Exit(NOT_MET)


def _ended(number: int, _: object) -> None:
    """A scheduler's SIGTERM ends it as ^C does: what was written for measuring is taken away."""
    raise SystemExit(128 + number)


def _local(
    directory: Path | None, expected: Expected, seconds: float, size_bytes: int
) -> list[Finding]:
    if directory is None:
        note, advice = "no directory was given", "--local DIR measures the disk it lies on"
        return [_not_given("local disk", note, advice)]
    try:
        return disk.measure(directory, expected, seconds=seconds, size_bytes=size_bytes, told=_told)
    except (RuntimeError, MemoryError) as error:  # its pool of threads
        return [starved("local disk", "write", error)]


def _store(
    url: str | None, expected: Expected, seconds: float, size_bytes: int, timeout_s: float
) -> list[Finding]:
    if url is None:
        return [_not_given("store", "no URL was given", "forebay doctor URL measures the store")]
    return store.measure(
        url,
        expected,
        seconds=seconds,
        size_bytes=size_bytes,
        told=_told,
        timeout_s=timeout_s,
    )


def _not_given(hop: str, note: str, advice: str) -> Finding:
    return Finding(
        name=hop, hop=hop, kind=Kind.TEXT, verdict=Verdict.NONE, note=note, advice=advice
    )


def _listen(address: str, token: str | None, seconds: float, as_json: bool) -> None:
    sessions = serve(address, token=token, timeout_s=seconds, told=_told)
    if as_json:
        say_json({"listened": address, "sessions": sessions})


def _read(parse: Callable[[str], float], text: str, flag: str) -> float:
    """A number that is more than nothing. Raises UsageError naming the flag."""
    try:
        value = parse(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None
    if value <= 0:
        raise UsageError(f"{flag}: expected more than 0, found {text!r}")
    return value


def _write(path: Path, text: str) -> None:
    write_text(path, text, "--write")
    _told(f"written: {path}; forebay plan --file {path} takes it")


def _told(line: str) -> None:
    say_aside(line)


def _show(found: list[Finding], expected: Expected) -> None:
    table = Table(
        title=platform.node(), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for name in ("what", "measured", "expected", "verdict"):
        table.add_column(name, max_width=18)
    table.add_column("how, and what to do", overflow="fold")
    last = ""
    for each in found:
        if each.hop != last:
            table.add_section()
            table.add_row(Text(each.hop, style="bold"))
            last = each.hop
        note = Text(each.note)
        if each.source and each.expected is not None:
            note.append(f"\nexpected: {each.source}", style="dim")
        if each.to_do:
            note.append(f"\n{each.to_do}", style="" if each.verdict.holds else "bold")
        verdict = Text(each.verdict.value, style=_STYLES[each.verdict])
        table.add_row(Text(each.name), each.seen, each.wanted, verdict, note)
    SCREEN.print(table)
    SCREEN.print(Text(report.counted(found)), soft_wrap=True)
    if not expected:
        SCREEN.print(Text(_NO_EXPECTATION), soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(doctor)
