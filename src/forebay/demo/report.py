"""What the demo found out: comparison bit for bit, the summary's numbers, the table."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from safetensors import safe_open

from forebay.errors import ForebayError
from forebay.units import show_bytes, show_seconds

LOSSES = "losses.jsonl"
FINAL = "final.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """The reports of all ranks of one run, by rank."""

    ranks: list[dict[str, Any]]

    @property
    def resumed_step(self) -> int | None:
        """The step that was restored, the same on every rank; None for a run from the start."""
        steps = {report["resumed_step"] for report in self.ranks}
        if len(steps) != 1:
            listed = sorted(steps, key=str)
            raise ForebayError(f"demo: ranks resumed from different steps: {listed}")
        step: int | None = steps.pop()
        return step

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return int(self.ranks[0]["parameters"])

    def pauses_s(self) -> list[float]:
        """Pause of each save: that of the rank that paused longest."""
        return [max(s["pause_s"] for s in saves) for saves in self._saves()]

    def copy_limit_s(self) -> float:
        """Median of plain copies of the same bytes, each as long as on the slowest rank."""
        rounds = zip(*(report["copy_s"] for report in self.ranks), strict=True)
        return float(statistics.median(max(seconds) for seconds in rounds))

    def durables_s(self) -> list[float]:
        """From the call of each save to its commit. Raises ForebayError where one has none."""
        found = []
        for saves in self._saves():
            known = [s["durable_s"] for s in saves if s["durable_s"] is not None]
            if not known:
                raise ForebayError(f"demo: step {saves[0]['step']} was saved and never committed")
            found.append(max(known))
        return found

    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint, all ranks together: of the largest that was saved."""
        return int(max(sum(s["bytes"] for s in saves) for saves in self._saves()))

    def _saves(self) -> list[tuple[dict[str, Any], ...]]:
        return list(zip(*(report["saves"] for report in self.ranks), strict=True))


def read_reports(out: Path, ranks: int) -> Reports:
    """Reports of a run that ended well."""
    texts = [(out / f"report-{rank}.json").read_text() for rank in range(ranks)]
    return Reports(ranks=[json.loads(text) for text in texts])


def read_losses(out: Path) -> list[tuple[int, str]]:
    """``(step, exact loss)`` in the order of training, repeated steps included."""
    lines = (out / LOSSES).read_text().splitlines() if (out / LOSSES).exists() else []
    complete = (json.loads(line) for line in lines if line.endswith("}"))
    return [(int(line["step"]), str(line["bits"])) for line in complete]


def losses_differ(reference: Path, other: Path, steps: int) -> str:
    """The first step whose loss is not the reference's or is missing; empty when there is none."""
    expected = dict(read_losses(reference))
    seen: set[int] = set()
    for step, bits in read_losses(other):
        if bits != expected.get(step):
            return f"loss of step {step}: {expected.get(step)} in the reference, {bits} here"
        seen.add(step)
    missing = set(range(1, steps + 1)) - seen
    return f"steps {sorted(missing)} were never trained" if missing else ""


def tensors_differ(reference: Path, other: Path) -> str:
    """The first tensor that is not the same bit for bit in both files; empty when all are."""
    with safe_open(reference, framework="np") as left, safe_open(other, framework="np") as right:
        names = sorted(left.keys())
        if not names:
            return f"{reference} holds no tensors"
        if set(names) != set(right.keys()):
            return f"not in both: {sorted(set(names) ^ set(right.keys()))[:5]}"
        for name in names:
            one, two = left.get_tensor(name), right.get_tensor(name)
            if (one.dtype, one.shape) != (two.dtype, two.shape):
                return f"{name}: {one.dtype}{one.shape} in the reference, {two.dtype}{two.shape}"
            if one.tobytes() != two.tobytes():
                return f"{name}: {int((one != two).sum())} of {one.size} elements differ"
    return ""


def _verdict(difference: str) -> str:
    return f"[red]no: {difference}[/red]" if difference else "[green]yes[/green]"


def make_table(summary: dict[str, Any], differences: dict[str, str]) -> Table:
    """The end of the demo, for a person."""
    pause_s = statistics.median(summary["pause_s"])
    limit_s = summary["copy_limit_s"]
    ranks = summary["world_size"]
    table = Table(title="forebay demo", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = {
        "model": f"{summary['parameters']:,} parameters, FSDP2 on {ranks} ranks",
        "checkpoint": show_bytes(summary["bytes"]),
        "pause of a save, median": show_seconds(pause_s),
        "plain copy of the same bytes": show_seconds(limit_s),
        "pause to plain copy": f"{pause_s / limit_s:.2f} x",
        "time to durable, median": show_seconds(statistics.median(summary["durable_s"])),
        "killed": f"all ranks, while step {summary['kill_step']} was draining",
        "commit after the kill": show_seconds(summary["commit_after_kill_s"]),
        "resumed from step": f"{summary['resumed_step']} of {summary['steps']}",
        "identical to the run never killed": _verdict(differences["identical"]),
        "identical on 2 ranks": _verdict(differences["identical_on_2"]),
        "identical on 1 rank": _verdict(differences["identical_on_1"]),
    }
    for label, text in rows.items():
        table.add_row(label, text)
    return table
