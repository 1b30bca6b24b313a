"""What the agent says of its snapshots: to the ranks, and to who asks. Pure."""

from __future__ import annotations

from forebay.drain.job import Snapshot
from forebay.format.messages import Phase, Progress, SnapshotStatus


def progress_of(snapshot: Snapshot) -> Progress:
    """The phase that a snapshot is in, as the ranks hear it."""
    return Progress(
        step=snapshot.step,
        attempt=snapshot.attempt,
        phase=snapshot.phase,
        at_s=snapshot.reached_s.get(snapshot.phase, 0.0),
        detail=snapshot.detail,
        kind=snapshot.kind,
    )


def status_of(snapshot: Snapshot, now_s: float) -> SnapshotStatus:
    """All that is known of a snapshot; the rate is that of its upload, until it ended."""
    reached = snapshot.reached_s
    ends = (Phase.SEALED, Phase.COMMITTED, Phase.FAILED, Phase.SKIPPED, Phase.ABANDONED)
    end_s = min((reached[phase] for phase in ends if phase in reached), default=now_s)
    busy_s = end_s - reached.get(Phase.UPLOADING, end_s)
    return SnapshotStatus(
        step=snapshot.step,
        attempt=snapshot.attempt,
        phase=snapshot.phase,
        ranks=tuple(sorted(snapshot.parts)),
        missing_ranks=snapshot.missing_ranks,
        nbytes=snapshot.nbytes,
        done_bytes=snapshot.done_bytes,
        bytes_per_s=snapshot.done_bytes / busy_s if busy_s > 0 else 0.0,
        staged_s=reached.get(Phase.STAGED, 0.0),
        local_s=reached.get(Phase.LOCAL, 0.0),
        durable_s=reached.get(Phase.COMMITTED, 0.0),
        detail=snapshot.detail,
        kind=snapshot.kind,
    )
