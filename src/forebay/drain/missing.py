"""Which unfinished snapshots wait in vain: a missing rank is dead, or has gone past them. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from forebay.drain.job import Snapshot, overtaken

GRACE_S = 1.0


class Missing:
    """Remembers since when a snapshot has waited in vain, and an attempt has had no trainer.

    ``lives`` says whether a rank's process of an attempt may still stage something. A short grace
    lets a scan catch up with what a rank staged just before it died. ``clock`` is monotonic.
    """

    def __init__(
        self,
        lives: Callable[[int, str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lives = lives
        self._clock = clock
        self._vain_since: dict[tuple[int, str], float] = {}
        self._orphaned: dict[str, float] = {}

    def orphaned_s(self, attempt: str) -> float | None:
        """Since when no rank of the attempt lives, or None while one does."""
        return self._orphaned.get(attempt)

    def look(self, known: Sequence[Snapshot]) -> list[tuple[Snapshot, str]]:
        """Snapshots to be given up now, each with the reason, which names the missing ranks."""
        given_up = []
        now = self._clock()
        for snapshot in known:
            if snapshot.final:
                continue
            base = snapshot.base_attempt
            if any(self._lives(rank, base) for rank in snapshot.node_ranks):
                self._orphaned.pop(base, None)
            else:
                self._orphaned.setdefault(base, now)
            why = self._why_vain(snapshot, known)
            if why is None:
                self._vain_since.pop(snapshot.key, None)
            elif now - self._vain_since.setdefault(snapshot.key, now) > GRACE_S:
                del self._vain_since[snapshot.key]
                given_up.append((snapshot, why))
        return given_up

    def _why_vain(self, snapshot: Snapshot, others: Sequence[Snapshot]) -> str | None:
        missing = snapshot.missing_ranks
        if not missing:
            return None
        passed = overtaken(snapshot, others)
        if passed:
            return f"{_ranks(passed)} staged later steps and not this one"
        dead = {rank for rank in missing if not self._lives(rank, snapshot.base_attempt)}
        return f"{_ranks(dead)} ended before they had staged it" if dead else None


def _ranks(ranks: set[int]) -> str:
    return f"ranks {', '.join(map(str, sorted(ranks)))}"
