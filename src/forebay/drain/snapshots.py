"""All snapshots that the agent knows: entered, moved on, ended; noted, told. Loop thread only."""

from __future__ import annotations

import time
from collections.abc import Callable

from forebay.drain.job import Part, Snapshot
from forebay.drain.journal import REMEMBERED, Ended, Journal, Line
from forebay.drain.slots import Slots
from forebay.errors import ForebayError, IncompleteError, StoreError
from forebay.format.messages import Phase
from forebay.watch.events import emit

_LONGEST_DETAIL = 2000  # characters: all that are remembered go into one frame
_ORDER = (Phase.STAGED, Phase.LOCAL, Phase.UPLOADING, Phase.SEALED)


class Snapshots:
    """Snapshots by step and attempt. ``tell`` is called at each change of phase."""

    def __init__(
        self,
        *,
        node: int,
        slots: Slots,
        journal: Journal,
        tell: Callable[[Snapshot], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.node = node
        self.tell = tell
        self.all: dict[tuple[int, str], Snapshot] = {}
        self.committed = self.failed = self.skipped = self.replaced = 0
        self.last_committed: int | None = None
        self._slots = slots
        self._journal = journal
        self._journal_lost = False
        self._clock = clock

    @property
    def unfinished(self) -> list[Snapshot]:
        """Those whose end has not come, oldest first."""
        return [snapshot for snapshot in self.all.values() if not snapshot.final]

    def enter(self, part: Part) -> Snapshot:
        """Add a part to its snapshot, which is made if need be."""
        stamp = part.stamp
        snapshot = self.all.get((stamp.step, stamp.attempt))
        if snapshot is None:
            snapshot = Snapshot(
                step=stamp.step, attempt=stamp.attempt, node_ranks=part.layout.node_ranks
            )
            snapshot.reached_s[Phase.STAGED] = stamp.staged_s
            self.add(snapshot)
        snapshot.parts[part.layout.rank] = part
        return snapshot

    def add(self, snapshot: Snapshot) -> None:
        """Know a snapshot from now on; the oldest of those that ended are forgotten."""
        self.all[snapshot.key] = snapshot
        final = [key for key, known in self.all.items() if known.final]
        for key in final[: max(0, len(self.all) - REMEMBERED)]:
            del self.all[key]

    def note(self, line: Line) -> None:
        """Write to the journal; without it the agent works on, and only its restart is poorer."""
        try:
            self._journal.write(line)
        except OSError as error:
            if not self._journal_lost:
                emit("journal.lost", level=40, why=error)
            self._journal_lost = True

    def free(self, part: Part) -> None:
        """Give the part's slot back, unless a thread still reads it: then that ends with this."""
        if not part.reading:
            self._slots.release(part.arena, part.slot, part.hold)
            part.hold = None

    def advance(self, snapshot: Snapshot, phase: Phase) -> None:
        """Go on to ``phase`` if the snapshot is not there or beyond."""
        if snapshot.final or _ORDER.index(phase) <= _ORDER.index(snapshot.phase):
            return
        snapshot.move(phase, self._clock())
        if phase is Phase.SEALED:
            self._note_end(snapshot)
        self.tell(snapshot)

    def end(self, snapshot: Snapshot, phase: Phase, *, kind: str = "", detail: str = "") -> None:
        """Go on to a final phase: count, note, free all slots, tell. Nothing if it ended before."""
        if snapshot.final:
            return
        snapshot.move(phase, self._clock(), kind=kind, detail=detail[:_LONGEST_DETAIL])
        if phase is Phase.COMMITTED:
            self.committed += 1
            self.last_committed = max(snapshot.step, self.last_committed or 0)
        elif phase is Phase.SKIPPED:
            self.skipped += 1
        elif phase is not Phase.KEPT_NEAR:
            self.failed += 1
        elif snapshot.replaced:
            self.replaced += 1
        snapshot.trouble = ""
        self._note_end(snapshot)
        for part in snapshot.parts.values():
            self.free(part)
            part.slim()
        self.tell(snapshot)

    def _note_end(self, snapshot: Snapshot) -> None:
        self.note(ended_line(snapshot))

    def fail(self, snapshot: Snapshot, part: Part | None, error: BaseException) -> None:
        """End a snapshot that a part's failure, or one of its whole, made impossible."""
        kind, cause = StoreError.kind, str(error)
        if isinstance(error, ForebayError):
            kind = error.kind
        elif not isinstance(error, OSError):
            kind, cause = ForebayError.kind, f"a bug, please report it: {error!r}"
        where = f"node {self.node}"
        if part is not None:
            where = f"rank {part.layout.rank} on {where} ({part.components})"
        self.end(snapshot, Phase.FAILED, kind=kind, detail=f"{where}: {cause}")

    def trouble(self, snapshot: Snapshot) -> Callable[[str], None]:
        """What hears why a tier has to be tried again, and "" once it went well."""

        def hear(why: str) -> None:
            snapshot.trouble = why

        return hear

    def abandon(self, snapshot: Snapshot, why: str) -> None:
        """Give a snapshot up whose missing parts will never come."""
        self.end(snapshot, Phase.ABANDONED, kind=IncompleteError.kind, detail=why)

    def skip(
        self, step: int, attempt: str, node_ranks: tuple[int, ...], rank: int, why: str
    ) -> None:
        """A rank took no snapshot: the step cannot become complete, whoever staged it."""
        snapshot = self.all.get((step, attempt))
        if snapshot is None:
            snapshot = Snapshot(step=step, attempt=attempt, node_ranks=node_ranks)
            self.add(snapshot)
        self.end(snapshot, Phase.SKIPPED, kind=IncompleteError.kind, detail=f"rank {rank}: {why}")


def ended_line(snapshot: Snapshot) -> Ended:
    """What the journal keeps of a snapshot that was sealed or ended."""
    return Ended(
        step=snapshot.step,
        attempt=snapshot.attempt,
        phase=snapshot.phase,
        at_s=snapshot.reached_s.get(snapshot.phase, 0.0),
        node_ranks=snapshot.node_ranks,
        kind=snapshot.kind,
        detail=snapshot.detail,
    )
