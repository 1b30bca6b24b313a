"""``forebay verify URL [STEP]``: re-read and re-check everything a manifest stands for."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import Progress

from forebay.cli.output import AsJson, say_json
from forebay.cli.screen import ASIDE, SCREEN
from forebay.commit.verify import Finding, verify_step
from forebay.errors import DamagedError, UsageError
from forebay.reader import Run


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    index, slash, count = text.partition("/")
    if not slash or not index.isdigit() or not count.isdigit() or not int(index) < int(count):
        raise UsageError(f"--part: expected I/N with I from 0 to N-1, found {text!r}")
    return int(index), int(count)


def verify(
    url: Annotated[str, typer.Argument(help="The run: a directory or URL.")],
    step: Annotated[int | None, typer.Argument(help="The step; the newest by default.")] = None,
    part: Annotated[str | None, typer.Option(help="Check share I of N, as 0/8.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every object of a checkpoint again and check it against its digests."""
    index, count = _part(part)
    run = Run(url)
    if step is None:
        step = run.catalog.latest()
        if step is None:
            run.manifest(None)
            raise AssertionError("unreachable")
    findings: list[Finding] = []
    checked = 0
    try:
        manifest = run.manifest(step)
    except DamagedError as error:
        findings.append(Finding(object=f"manifest of step {step}", what=str(error)))
    else:
        with Progress(console=ASIDE, disable=as_json, transient=True) as progress:
            task = progress.add_task(f"step {step}", total=manifest.data_bytes / count)
            for item in verify_step(run.catalog, manifest, index=index, count=count):
                if isinstance(item, Finding):
                    findings.append(item)
                else:
                    checked += item
                    progress.advance(task, item)
    if as_json:
        say_json(
            {
                "run": run.store.url,
                "step": step,
                "ok": not findings,
                "bytes_checked": checked,
                "bad": [{"object": f.object, "what": f.what} for f in findings],
            }
        )
    elif not findings:
        SCREEN.print(
            f"step {step} of {run.store.url}: intact, {checked} bytes checked", soft_wrap=True
        )
    else:
        for finding in findings:
            SCREEN.print(f"bad: {finding.what}", markup=False, soft_wrap=True)
    if findings:
        raise typer.Exit(DamagedError.exit_code)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("verify")(verify)
