"""What the agent says of its snapshots: to the ranks, and to who asks. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from forebay.drain.job import Snapshot
from forebay.format.messages import Phase, Progress, SnapshotStatus

_ENDS = (Phase.SEALED, Phase.COMMITTED, Phase.FAILED, Phase.SKIPPED, Phase.ABANDONED)


def rate_of(snapshot: Snapshot, now_s: float) -> float:
    """Bytes per second of a snapshot's upload, from its first byte to its last, or to now."""
    reached = snapshot.reached_s
    end_s = min((reached[phase] for phase in _ENDS if phase in reached), default=now_s)
    busy_s = end_s - reached.get(Phase.UPLOADING, end_s)
    return snapshot.done_bytes / busy_s if busy_s > 0 else 0.0


def forecast(
    snapshots: Iterable[Snapshot], now_s: float, limit_bytes_per_s: float | None = None
) -> dict[tuple[int, str], float]:
    """In how many seconds each snapshot that is on its way will be durable on this node.

    What lies before it in the queue and what is left of it, at the rate of the upload under way or
    else of the last one, within the budget of now. Snapshots for which no rate is known are absent.
    """
    known = list(snapshots)
    rates = [rate_of(snapshot, now_s) for snapshot in known]
    under_way = sum(
        rate for one, rate in zip(known, rates, strict=True) if one.uploading and not one.final
    )
    rate = under_way or next((r for r in reversed(rates) if r > 0), 0.0)
    if limit_bytes_per_s is not None:
        rate = min(rate or limit_bytes_per_s, limit_bytes_per_s)
    found: dict[tuple[int, str], float] = {}
    ahead = 0
    for snapshot in known:
        if snapshot.final or snapshot.near or not rate:
            continue
        ahead += max(0, snapshot.nbytes - snapshot.done_bytes)
        found[snapshot.key] = ahead / rate
    return found


def progress_of(
    snapshot: Snapshot, now_s: float = 0.0, durable_in_s: float | None = None
) -> Progress:
    """The phase that a snapshot is in, as the ranks hear it."""
    return Progress(
        step=snapshot.step,
        attempt=snapshot.attempt,
        phase=snapshot.phase,
        at_s=snapshot.reached_s.get(snapshot.phase, 0.0),
        nbytes=snapshot.nbytes,
        done_bytes=snapshot.done_bytes,
        bytes_per_s=rate_of(snapshot, now_s),
        durable_in_s=durable_in_s,
        trouble=snapshot.trouble,
        detail=snapshot.detail,
        kind=snapshot.kind,
    )


def status_of(
    snapshot: Snapshot, now_s: float, durable_in_s: float | None = None
) -> SnapshotStatus:
    """All that is known of a snapshot."""
    reached = snapshot.reached_s
    return SnapshotStatus(
        step=snapshot.step,
        attempt=snapshot.attempt,
        phase=snapshot.phase,
        ranks=tuple(sorted(snapshot.parts)),
        missing_ranks=snapshot.missing_ranks,
        nbytes=snapshot.nbytes,
        done_bytes=snapshot.done_bytes,
        bytes_per_s=rate_of(snapshot, now_s),
        staged_s=reached.get(Phase.STAGED, 0.0),
        local_s=reached.get(Phase.LOCAL, 0.0),
        durable_s=reached.get(Phase.COMMITTED, 0.0),
        durable_in_s=durable_in_s,
        trouble=snapshot.trouble,
        detail=snapshot.detail,
        kind=snapshot.kind,
    )
