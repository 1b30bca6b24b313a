"""What is known of each snapshot of this rank, told by the agent, awaited by the trainer."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Literal

from forebay import errors
from forebay.format.messages import FINAL_PHASES, Phase, Progress
from forebay.watch.events import emit

Tier = Literal["memory", "local", "durable"]
_AFTER_LOCAL = (Phase.LOCAL, Phase.UPLOADING, Phase.SEALED, Phase.COMMITTED, Phase.KEPT_NEAR)
_EARLY = 64
_REMEMBERED = 256
_LONGEST_S = 365 * 86400.0
_QUIET = (Phase.STAGED, Phase.LOCAL, Phase.UPLOADING, Phase.SEALED)


@dataclass(slots=True)
class Line:
    """One snapshot: its phase, when each was reached (Unix seconds), and why it failed.

    ``news`` is the last that the agent told of how far it is: bytes, rate, when it will be durable.
    """

    step: int
    attempt: str
    phase: Phase = Phase.STAGED
    reached_s: dict[Phase, float] = field(default_factory=dict)
    kind: str = ""
    detail: str = ""
    news: Progress | None = None


class Ledger:
    """Snapshots of one rank. Written by the link's thread, read by the trainer."""

    def __init__(self, *, has_local: bool) -> None:
        self._has_local = has_local
        self._lines: dict[tuple[int, str], Line] = {}
        self._early: dict[tuple[int, str], Progress] = {}
        self._changed = threading.Condition()
        self.agent = "not yet reached"

    def open(self, step: int, attempt: str, phase: Phase, detail: str = "") -> Line:
        """Enter a snapshot at the moment it was staged or skipped."""
        line = Line(step, attempt, phase, {phase: time.time()}, detail=detail)
        with self._changed:
            self._forget_old()
            self._lines[step, attempt] = line
            early = self._early.pop((step, attempt), None)
            self._changed.notify_all()
        if early is not None:
            self.hear(early)
        return line

    def _forget_old(self) -> None:
        """Drop the oldest ended lines; a snapshot keeps its own."""
        ended = [key for key, line in self._lines.items() if line.phase in FINAL_PHASES]
        for key in ended[: max(0, len(self._lines) - _REMEMBERED)]:
            del self._lines[key]

    def hear(self, progress: Progress) -> None:
        """Take in what the agent tells; a final phase never changes again."""
        with self._changed:
            line = self._lines.get((progress.step, progress.attempt))
            if line is None:
                # Another rank was faster: the snapshot may have failed before this one staged it.
                self._early[progress.step, progress.attempt] = progress
                while len(self._early) > _EARLY:
                    self._early.pop(next(iter(self._early)))
                return
            if line.phase in FINAL_PHASES:
                return
            moved = line.phase is not progress.phase
            trouble = "" if line.news is None else line.news.trouble
            line.news = progress
            if not moved:
                line.detail = progress.detail
                if progress.trouble and progress.trouble != trouble:
                    emit("snapshot.waits", level=30, step=line.step, why=progress.trouble)
                return
            line.phase = progress.phase
            line.reached_s.setdefault(progress.phase, progress.at_s)
            line.kind, line.detail = progress.kind, progress.detail
            self._changed.notify_all()
        level = 20 if progress.phase in (*_QUIET, Phase.COMMITTED, Phase.KEPT_NEAR) else 40
        extra = {"why": progress.detail} if progress.detail else {}
        emit(f"snapshot.{progress.phase.value}", level=level, step=progress.step, **extra)

    def copy_of(self, line: Line) -> Line:
        """What is known of a snapshot at one moment."""
        with self._changed:
            return replace(line, reached_s=dict(line.reached_s))

    def open_lines(self) -> list[Line]:
        """Snapshots whose end is not known yet."""
        with self._changed:
            return [line for line in self._lines.values() if line.phase not in FINAL_PHASES]

    def failures(self) -> list[Line]:
        """Snapshots that ended without being kept, skipped ones included."""
        bad = (Phase.FAILED, Phase.ABANDONED, Phase.SKIPPED)
        with self._changed:
            return [line for line in self._lines.values() if line.phase in bad]

    def wait(self, line: Line, tier: Tier, timeout_s: float) -> None:
        """Return once the snapshot is safe in ``tier``.

        Raises DeadlineError naming the phase it is in, or the error it ended with.
        """
        if tier == "local" and not self._has_local:
            raise errors.UsageError("wait: this run has no local tier: give local=")
        deadline = time.monotonic() + as_timeout("wait", timeout_s)
        with self._changed:
            while True:
                if _reached(line, tier):
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise errors.DeadlineError(
                        f"step {line.step}: not {tier} after {timeout_s:g} s: it is "
                        f"{line.phase.value}{_trouble(line)}; node agent: {self.agent}"
                    )
                self._changed.wait(min(left, 1.0))


def _trouble(line: Line) -> str:
    """What the durable tier said last, if it is in trouble."""
    return f" ({line.news.trouble})" if line.news is not None and line.news.trouble else ""


def _reached(line: Line, tier: Tier) -> bool:
    if line.phase is Phase.SKIPPED:
        raise errors.IncompleteError(f"step {line.step}: no snapshot was taken: {line.detail}")
    if line.phase is Phase.ABANDONED:
        raise errors.IncompleteError(f"step {line.step}: given up: {line.detail}")
    if line.phase is Phase.FAILED:
        raise error_of(line.kind, f"step {line.step}: {line.detail}")
    if tier == "memory":
        return True
    if tier == "local":
        return line.phase in _AFTER_LOCAL
    if line.phase is Phase.KEPT_NEAR and line.detail:
        raise errors.IncompleteError(f"step {line.step}: {line.detail}")
    if line.phase is Phase.KEPT_NEAR:
        raise errors.UsageError(f"step {line.step}: stays near by durable_every; wait for 'local'")
    return line.phase is Phase.COMMITTED


def as_timeout(call: str, timeout_s: object) -> float:
    """A number of seconds that can be waited for; infinite is a year. Raises UsageError."""
    if not isinstance(timeout_s, int | float) or not timeout_s >= 0:
        raise errors.UsageError(f"{call}: timeout_s: expected 0 s or more, found {timeout_s!r}")
    return min(float(timeout_s), _LONGEST_S)


def error_of(kind: str, text: str) -> errors.ForebayError:
    """An error of the class whose ``kind`` an agent reported."""
    classes: list[type[errors.ForebayError]] = [errors.ForebayError]
    for known in classes:
        classes.extend(known.__subclasses__())
    for known in classes:
        if known.kind == kind:
            return known(text)
    return errors.StoreError(text)
