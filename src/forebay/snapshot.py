"""What ``save`` returns: one snapshot of one rank, and how it fares behind the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.capture.ledger import Ledger, Line, Tier
from forebay.format.messages import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One rank's part of a checkpoint, in host memory when ``save`` returned it.

    Attributes:
        step: the step it was saved as.
        bytes: how many were copied into the slot.
        pause_s: how long ``save`` kept the training waiting, set-up apart.
        setup_s: set-up that this save had to pay for: 0.0 after ``prepare`` or ``restore``.
        skipped: why no snapshot was taken (no free slot), or "".
    """

    step: int
    attempt: str
    bytes: int
    pause_s: float
    setup_s: float
    skipped: str
    line: Line
    ledger: Ledger

    def status(self) -> dict[str, Any]:
        """Where the snapshot is: ``phase``, ``reached_s`` (Unix seconds by phase), ``detail``."""
        line = self.ledger.copy_of(self.line)
        return {
            "step": self.step,
            "attempt": self.attempt,
            "phase": line.phase.value,
            "committed": line.phase is Phase.COMMITTED,
            "reached_s": {phase.value: at for phase, at in line.reached_s.items()},
            "kind": line.kind,
            "detail": line.detail,
        }

    def wait(self, tier: Tier = "durable", timeout_s: float = 600.0) -> None:
        """Return once this checkpoint is safe in ``tier``: ``memory``, ``local`` or ``durable``.

        ``durable`` means committed: the manifest exists. Raises DeadlineError after ``timeout_s``,
        or the error with which the snapshot ended.
        """
        self.ledger.wait(self.line, tier, timeout_s)
