"""``forebay demo``: a training run killed while a save drains, resumed, compared bit for bit."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from forebay.config import runtime_directory
from forebay.demo import launch, report, text
from forebay.demo.home import RESTORES, RUNS, exit_on_terminate, take_home
from forebay.demo.stores import KINDS, DemoStore, open_demo_store
from forebay.errors import DeadlineError, ForebayError, UsageError
from forebay.format.messages import job_directory
from forebay.storage.address import resolve_url
from forebay.units import show_bytes, show_seconds

RANKS = 4
DRAIN_S = 2.5
COMMIT_TIMEOUT_S = 60.0
AGENT_TIMEOUT_S = 60.0
REFRESH_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How long the runs are: ``kill_step`` is one that is saved, and not the last."""

    steps: int
    every: int
    kill_step: int
    batch: int
    quick: bool
    run_timeout_s: float


FULL = Course(steps=24, every=4, kill_step=12, batch=4, quick=False, run_timeout_s=300.0)
QUICK = Course(steps=8, every=2, kill_step=4, batch=2, quick=True, run_timeout_s=120.0)


def run_demo(
    directory: Path, *, store: str = "file", quick: bool = False, json_out: bool = False
) -> dict[str, Any]:
    """Run the whole demo in ``directory``; returns what it also writes to ``summary.json`` there.

    Progress goes to stderr; the table to stdout, or to stderr with ``json_out``. ``ok`` in the
    summary is True when the run resumed where it was killed and every comparison was identical.
    What an earlier demo left in the directory is removed first, and nothing else. No process of
    the demo is left when this returns or raises.

    Raises:
        UsageError: an unknown store, or a directory with things in it that are not ours.
        ForebayError: a run failed; the end of its log was printed.
        DeadlineError: a run or a commit took too long.
    """
    if store not in KINDS:
        raise UsageError(f"demo: expected a store of {', '.join(KINDS)}, found {store!r}")
    console = Console(stderr=True)
    with take_home(directory.absolute()) as home, exit_on_terminate():
        with open_demo_store(store, home) as durable:
            demo = _Demo(home, QUICK if quick else FULL, console, durable)
            summary, differences = demo.run()
        summary["store"] = store
        (home / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    out = console if json_out else Console()
    out.print(report.make_table(summary, differences))
    console.print(f"summary: {home / 'summary.json'}", highlight=False)
    return summary


class _Demo:
    """One demo in one directory. Used once, by one thread."""

    def __init__(self, home: Path, course: Course, console: Console, store: DemoStore) -> None:
        self.home = home
        self.store = store
        self.course = course
        self.console = console
        self.text = home / "text.u8"
        for name in (*RUNS, *RESTORES.values()):
            (home / name).mkdir()
        (home / "logs").mkdir()

    def run(self) -> tuple[dict[str, Any], dict[str, str]]:
        """All parts in order; returns the summary and the first difference of each comparison."""
        began = time.monotonic()
        nbytes = text.write_text(self.text)
        self._say(f"text: {show_bytes(nbytes)} of the standard library's sources")
        self._say(f"reference: {self.course.steps} steps on {RANKS} ranks, never killed")
        reference = self._train("reference", "reference", None)
        shutil.copyfile(self._final("reference"), self.home / "reference.safetensors")
        rate = max(1.0, reference.checkpoint_bytes() / DRAIN_S)
        self._say(f"the same again, the drain held to {show_bytes(rate)}/s, to be killed")
        commit_after_kill_s = self._train_and_kill(rate)
        self._say("restart: the same command")
        resumed = self._train("restart", "killed", rate)
        differences = {"identical": self._differ("killed") or self._losses_differ()}
        for ranks, name in RESTORES.items():
            self._say(f"restore of step {self.course.steps} on {ranks} rank{'s'[: ranks - 1]}")
            differences[f"identical_on_{ranks}"] = self._restore(ranks, name, rate)
        same = {key: not difference for key, difference in differences.items()}
        summary: dict[str, Any] = {
            "ok": all(same.values()) and resumed.resumed_step == self.course.kill_step,
            "steps": self.course.steps,
            "kill_step": self.course.kill_step,
            "resumed_step": resumed.resumed_step,
            **same,
            "pause_s": reference.pauses_s(),
            "copy_limit_s": reference.copy_limit_s(),
            "durable_s": reference.durables_s(),
            "commit_after_kill_s": commit_after_kill_s,
            "bytes": reference.checkpoint_bytes(),
            "world_size": RANKS,
            "parameters": reference.parameters,
            "seconds": time.monotonic() - began,
        }
        return summary, differences

    def _train(self, what: str, name: str, rate: float | None) -> report.Reports:
        """One run to its end, its agent's end included."""
        with (
            self._job(name),
            self._started(what, name, RANKS, rate, "train") as run,
            self._bar(what, self.home / name) as tick,
        ):
            run.wait(tick)
        return report.read_reports(self.home / name, RANKS)

    def _train_and_kill(self, rate: float) -> float:
        """Kill all ranks while the save of ``kill_step`` drains; returns how long the commit took.

        Raises ForebayError when the step was committed too early to prove anything.
        """
        step, out = self.course.kill_step, self.home / "killed"
        marks = [out / f"saved-{step}.{rank}" for rank in range(RANKS)]
        with self._job("killed"):
            with (
                self._started("killed run", "killed", RANKS, rate, "train") as run,
                self._bar("killed run", out) as tick,
            ):
                run.wait_until(lambda: all(m.exists() for m in marks), f"save of step {step}", tick)
                pids = [int(mark.read_text()) for mark in marks]
                run.kill_ranks(pids)
                killed = time.monotonic()
                if self.store.committed("killed", step):
                    raise ForebayError(
                        f"demo: step {step} was committed before its ranks were dead: the kill "
                        "proves nothing; run it again on a quieter machine"
                    )
            self._say(f"killed ranks {pids} while step {step} drained; its agent goes on")
            happened = self.store.disturb()
            if happened:
                self._say(happened)
            while not self.store.committed("killed", step):
                if time.monotonic() > killed + COMMIT_TIMEOUT_S:
                    raise DeadlineError(
                        f"demo: step {step} not committed {COMMIT_TIMEOUT_S:g} s after the kill: "
                        f"see {self._job_directory('killed') / 'agent.log'}"
                    )
                time.sleep(launch.POLL_S)
            took_s = time.monotonic() - killed
            self._say(f"committed {show_seconds(took_s)} after the kill, no rank alive")
        return took_s

    def _restore(self, ranks: int, name: str, rate: float) -> str:
        """Restore the killed run's last checkpoint on ``ranks``; the first difference, or empty."""
        what = f"restore on {ranks}"
        with self._job("killed"), self._started(what, name, ranks, rate, "restore") as run:
            run.wait(lambda: None)
        found = report.read_reports(self.home / name, ranks).resumed_step
        if found != self.course.steps:
            return f"restored step {found}, expected {self.course.steps}"
        return self._differ(name)

    def _started(
        self, what: str, name: str, ranks: int, rate: float | None, mode: str
    ) -> contextlib.AbstractContextManager[launch.Run]:
        course = self.course
        store = self.store.url("reference" if name == "reference" else "killed")
        arguments = [
            *("--mode", mode, "--store", store, "--text", str(self.text)),
            *("--steps", str(course.steps), "--every", str(course.every)),
            *("--batch", str(course.batch)),
            *(("--drain-bytes-per-s", repr(rate)) if rate is not None else ()),
            *(("--quick",) if course.quick else ()),
        ]
        return launch.start(
            what,
            ranks=ranks,
            out=self.home / name,
            log=self.home / "logs" / f"{what.replace(' ', '-')}.log",
            timeout_s=course.run_timeout_s,
            arguments=arguments,
        )

    @contextlib.contextmanager
    def _job(self, run: str) -> Iterator[None]:
        """Around a job of ``run``: wait for its agent's end; on failure show logs and end it."""
        directory = self._job_directory(run)
        try:
            yield
            launch.wait_for_agent(directory, AGENT_TIMEOUT_S)
        except ForebayError:
            logs = sorted((self.home / "logs").glob("*.log"), key=lambda p: p.stat().st_mtime_ns)
            for path in [*logs[-1:], directory / "agent.log"]:
                self.console.rule(f"the end of {path}", align="left")
                for line in launch.last_lines(path):
                    self.console.print(line, markup=False, highlight=False)
            raise
        finally:
            launch.end_agent(directory)

    @contextlib.contextmanager
    def _bar(self, what: str, out: Path) -> Iterator[Any]:
        """A progress bar on a terminal; gives the function that moves it."""
        with Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            TextColumn("{task.fields[at]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        ) as progress:
            task = progress.add_task(what, total=self.course.steps, at="starting")
            looked = [0.0]

            def tick() -> None:
                if time.monotonic() - looked[0] < REFRESH_S:
                    return
                looked[0] = time.monotonic()
                losses = report.read_losses(out)
                if losses:
                    step, bits = losses[-1]
                    at = f"step {step}/{self.course.steps}  loss {float.fromhex(bits):.4f}"
                    progress.update(task, completed=step, at=at)

            yield tick

    def _job_directory(self, run: str) -> Path:
        return job_directory(runtime_directory(), resolve_url(self.store.url(run)), 0)

    def _final(self, name: str) -> Path:
        return self.home / name / report.FINAL

    def _differ(self, name: str) -> str:
        return report.tensors_differ(self.home / "reference.safetensors", self._final(name))

    def _losses_differ(self) -> str:
        steps = self.course.steps
        return report.losses_differ(self.home / "reference", self.home / "killed", steps)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)
