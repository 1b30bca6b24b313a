"""Which committed checkpoints stay: pure, with a reason for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.config import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of a step, and why."""

    step: int
    keep: bool
    why: str


def decide(steps: Iterable[int], keep: Keep) -> list[Decision]:
    """A decision for each committed step, oldest first. The newest always stays."""
    ordered = sorted(set(steps))
    recent = set(ordered[-keep.last :])
    decisions = []
    for step in ordered:
        if step in recent:
            why = f"one of the last {keep.last}"
        elif keep.every is not None and step % keep.every == 0:
            why = f"a multiple of {keep.every}"
        else:
            decisions.append(Decision(step=step, keep=False, why="not named by any rule"))
            continue
        decisions.append(Decision(step=step, keep=True, why=why))
    return decisions
