"""What a rank remembers of its snapshots: a run saves for months."""

from __future__ import annotations

from forebay.capture.ledger import Ledger
from forebay.format.messages import Phase, Progress


def test_ended_lines_are_forgotten_and_open_ones_never() -> None:
    ledger = Ledger(has_local=False)
    first = ledger.open(0, "a", Phase.STAGED)
    for step in range(1, 2000):
        ledger.open(step, "a", Phase.STAGED)
        ledger.hear(Progress(step=step, attempt="a", phase=Phase.COMMITTED, at_s=1.0))
    assert len(ledger._lines) <= 260
    assert ledger._lines[0, "a"] is first
    assert ledger._lines[1999, "a"].phase is Phase.COMMITTED
