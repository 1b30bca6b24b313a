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
        """Where the snapshot is on its way, as the node agent last told.

        ``phase`` and ``reached_s`` (Unix seconds by phase); of this node's part ``nbytes``,
        ``done_bytes`` (on the durable tier), ``bytes_per_s``, and ``durable_in_s``, when it will be
        there, None while that cannot be told; ``trouble``, what the durable tier said while it is
        tried again; ``kind`` and ``detail``, why it failed.
        """
        line = self.ledger.copy_of(self.line)
        news = line.news
        return {
            "step": self.step,
            "attempt": self.attempt,
            "phase": line.phase.value,
            "committed": line.phase is Phase.COMMITTED,
            "reached_s": {phase.value: at for phase, at in line.reached_s.items()},
            "nbytes": 0 if news is None else news.nbytes,
            "done_bytes": 0 if news is None else news.done_bytes,
            "bytes_per_s": 0.0 if news is None else news.bytes_per_s,
            "durable_in_s": None if news is None else news.durable_in_s,
            "trouble": "" if news is None else news.trouble,
            "kind": line.kind,
            "detail": line.detail,
        }

    def wait(self, tier: Tier = "durable", timeout_s: float = 600.0) -> None:
        """Return once this checkpoint is safe in ``tier``: ``memory``, ``local`` or ``durable``.

        ``durable`` means committed: the manifest exists. Raises DeadlineError after ``timeout_s``,
        or the error with which the snapshot ended.
        """
        self.ledger.wait(self.line, tier, timeout_s)
