"""Goes on where an earlier agent of the job ended: journal, arenas, local images."""

from __future__ import annotations

import time

from forebay.drain.drainer import Drainer
from forebay.drain.finish import Finisher
from forebay.drain.job import PART_MOVES, Digests, Part, PartState, Snapshot
from forebay.drain.journal import (
    Accepted,
    Began,
    Ended,
    Journal,
    Line,
    Spilled,
    Uploaded,
    key_of,
    still_matter,
)
from forebay.drain.slots import Slots
from forebay.drain.snapshots import Snapshots
from forebay.drain.work import Work
from forebay.format.messages import Phase
from forebay.watch.events import emit

_READ_TRIES, _READ_WAIT_S = 4, 0.05


def recover(
    *,
    journal: Journal,
    slots: Slots,
    snapshots: Snapshots,
    drainer: Drainer,
    finisher: Finisher,
    work: Work,
) -> None:
    """Replay the journal, compact it, re-adopt slots, and start what is unfinished.

    What was noted as spilled or uploaded is not sent again. Raises OSError when arenas cannot be
    looked at.
    """
    kept = still_matter(_read(journal))
    for line in kept:
        _replay(snapshots, line)
    try:
        journal.restart(kept)
    except OSError as error:
        emit("journal.lost", level=40, why=error)
    slots.refresh()
    _adopt(slots, snapshots)
    for snapshot in snapshots.unfinished:
        if snapshot.phase is Phase.SEALED:
            work.start(finisher.commit(snapshot))
            continue
        for part in snapshot.parts.values():
            if part.state is PartState.STAGED and part.hold is None:
                why = f"rank {part.layout.rank}: its image is in no slot and in no tier any more"
                snapshots.abandon(snapshot, why)
        for part in snapshot.parts.values():
            if not snapshot.final:
                drainer.start(snapshot, part)
    if snapshots.unfinished or kept:
        emit("agent.recovered", unfinished=len(snapshots.unfinished))


def _read(journal: Journal) -> list[Line]:
    """Lines of an earlier agent; a disk that does not give them back gets a few tries."""
    for left in reversed(range(_READ_TRIES)):
        try:
            return journal.replay()
        except OSError as error:
            if not left:
                emit("journal.lost", level=40, why=error)
            time.sleep(_READ_WAIT_S)
    return []


def _replay(snapshots: Snapshots, line: Line) -> None:
    if isinstance(line, Accepted):
        snapshots.enter(
            Part(layout=line.layout, stamp=line.stamp, arena=line.arena, slot=line.slot)
        )
        return
    snapshot = snapshots.all.get(key_of(line))
    if isinstance(line, Ended):
        if snapshot is None:
            snapshot = Snapshot(step=line.step, attempt=line.attempt, node_ranks=line.node_ranks)
        snapshot.phase, snapshot.kind, snapshot.detail = line.phase, line.kind, line.detail
        snapshot.reached_s[line.phase] = line.at_s
        if line.phase is Phase.COMMITTED:
            snapshots.last_committed = max(line.step, snapshots.last_committed or 0)
        snapshots.add(snapshot)
    elif snapshot is not None and line.rank in snapshot.parts:
        part = snapshot.parts[line.rank]
        if isinstance(line, Began):
            part.upload = line.upload_id, line.part_bytes
        else:
            _reached(part, line)


def _reached(part: Part, line: Spilled) -> None:
    state = PartState.UPLOADED if isinstance(line, Uploaded) else PartState.LOCAL
    if state not in PART_MOVES[part.state]:
        return
    part.digests = Digests(
        header=line.header, slices=line.slices, blocks=line.blocks, witnesses=line.witnesses
    )
    part.direct = state is PartState.UPLOADED and part.state is PartState.STAGED
    part.uploading = state is PartState.UPLOADED
    part.done_bytes = part.layout.image_bytes if part.uploading else 0
    part.move(state)


def _adopt(slots: Slots, snapshots: Snapshots) -> None:
    """Match occupied slots with the replayed parts, which hold them from now on.

    A slot whose image went on before the earlier agent could free it is freed now. One that the
    journal does not know is left for the scan.
    """
    for ticket in slots.occupied():
        snapshot = snapshots.all.get((ticket.stamp.step, ticket.stamp.attempt))
        part = None if snapshot is None else snapshot.parts.get(ticket.layout.rank)
        if part is None or (part.arena, part.slot) != (ticket.arena, ticket.slot):
            continue
        part.hold = slots.take(ticket)
        if part.state is not PartState.STAGED:
            snapshots.free(part)
