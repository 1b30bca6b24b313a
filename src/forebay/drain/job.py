"""States of one snapshot on one node, and the only moves between them. Pure.

A part is one rank's image: STAGED in its slot, LOCAL on this node's disk, UPLOADED to the durable
tier. A snapshot is all parts of one step and attempt; its phases are those the trainer hears of.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from forebay.format.messages import FINAL_PHASES, Phase
from forebay.format.paths import component
from forebay.format.slot import Layout, Stamp


class PartState(enum.Enum):
    """Where one rank's image is."""

    STAGED = "staged"
    LOCAL = "local"
    UPLOADED = "uploaded"


PART_MOVES: dict[PartState, frozenset[PartState]] = {
    PartState.STAGED: frozenset({PartState.LOCAL, PartState.UPLOADED}),
    PartState.LOCAL: frozenset({PartState.UPLOADED}),
    PartState.UPLOADED: frozenset(),
}

_LOST = frozenset({Phase.SKIPPED, Phase.FAILED, Phase.ABANDONED})

PHASE_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.STAGED: frozenset({Phase.LOCAL, Phase.UPLOADING, Phase.SEALED, Phase.KEPT_NEAR}) | _LOST,
    Phase.LOCAL: frozenset({Phase.UPLOADING, Phase.SEALED, Phase.KEPT_NEAR}) | _LOST,
    Phase.UPLOADING: frozenset({Phase.SEALED, Phase.KEPT_NEAR}) | _LOST,
    Phase.SEALED: frozenset({Phase.COMMITTED}) | _LOST,
    **{phase: frozenset() for phase in FINAL_PHASES},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """What hashing an image gave: header, each slice with its blocks, each witness."""

    header: bytes
    slices: tuple[bytes, ...]
    blocks: tuple[tuple[bytes, ...], ...]
    witnesses: tuple[bytes, ...]


@dataclass(slots=True, kw_only=True)
class Part:
    """One rank's part of a snapshot: its ticket, where its slot is, how far it came.

    ``hold`` is what the slots gave for its slot, None when it has none (any more); ``reading`` is
    True while a thread reads it.
    ``direct`` says that the image goes past the local tier; ``uploading`` that it began to leave;
    ``upload`` is id and part size of the store's upload, once it has one that may be gone on with.
    """

    layout: Layout
    stamp: Stamp
    arena: str
    slot: int
    state: PartState = PartState.STAGED
    digests: Digests | None = None
    hold: int | None = None
    reading: bool = False
    direct: bool = False
    uploading: bool = False
    upload: tuple[str, int] | None = None
    done_bytes: int = 0

    def move(self, state: PartState) -> None:
        """Go on to ``state``; an illegal move is a bug and raises AssertionError."""
        if state not in PART_MOVES[self.state]:
            raise AssertionError(f"part of rank {self.layout.rank}: {self.state} -> {state}")
        self.state = state

    def slim(self) -> None:
        """Drop what only an unfinished part needs: many ended ones are remembered."""
        self.digests = None
        self.layout = msgspec.structs.replace(
            self.layout, slices=[], witnesses=[], start_digests=[]
        )
        self.stamp = msgspec.structs.replace(self.stamp, tree=b"", own=b"")

    @property
    def components(self) -> str:
        """The top-level entries whose bytes are in the image."""
        return ", ".join(sorted({component(row.fqn) for row in self.layout.slices})) or "nothing"


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """All parts of one step and attempt on this node; ``sealing`` once its end is under way.

    ``replaced`` says by what, when a newer one took its place before it began to upload;
    ``kept_near`` that its turn for the durable tier had not come, ``judged`` that this is known.
    ``trouble`` is what the durable tier said last, while it is tried again.
    """

    step: int
    attempt: str
    node_ranks: tuple[int, ...]
    parts: dict[int, Part] = field(default_factory=dict)
    phase: Phase = Phase.STAGED
    reached_s: dict[Phase, float] = field(default_factory=dict)
    sealing: bool = False
    replaced: str = ""
    judged: bool = False
    kept_near: bool = False
    trouble: str = ""
    detail: str = ""
    kind: str = ""

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from all others."""
        return self.step, self.attempt

    @property
    def base_attempt(self) -> str:
        """The start of the job it belongs to, without the count of a repeated step."""
        return self.attempt.partition(".")[0]

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the node that have not staged."""
        return tuple(rank for rank in self.node_ranks if rank not in self.parts)

    @property
    def final(self) -> bool:
        """True when nothing more will happen to it."""
        return self.phase in FINAL_PHASES

    @property
    def near(self) -> bool:
        """True when it stays on the local tier: by its turn, or because it was replaced."""
        return (
            bool(self.replaced)
            or self.kept_near
            or any(not part.stamp.durable for part in self.parts.values())
        )

    @property
    def uploading(self) -> bool:
        """True when a part of it has begun to leave for the durable tier."""
        return any(part.uploading for part in self.parts.values())

    @property
    def waiting(self) -> bool:
        """True while all of it is on the local tier and nothing has begun to leave."""
        return self.spilled and not (self.final or self.near or self.uploading or self.sealing)

    @property
    def spilled(self) -> bool:
        """True when every rank has staged and no image is only in a slot."""
        return not self.missing_ranks and all(
            part.state is not PartState.STAGED for part in self.parts.values()
        )

    @property
    def drained(self) -> bool:
        """True when every rank's image is in its last tier."""
        return self.spilled and (
            self.near or all(p.state is PartState.UPLOADED for p in self.parts.values())
        )

    @property
    def nbytes(self) -> int:
        """Image bytes of the parts known so far."""
        return sum(part.layout.image_bytes for part in self.parts.values())

    @property
    def done_bytes(self) -> int:
        """Image bytes that have left for the durable tier."""
        return sum(part.done_bytes for part in self.parts.values())

    def move(self, phase: Phase, at_s: float, *, kind: str = "", detail: str = "") -> None:
        """Go on to ``phase``; an illegal move is a bug and raises AssertionError."""
        if phase not in PHASE_MOVES[self.phase]:
            raise AssertionError(f"step {self.step}: {self.phase} -> {phase}")
        self.phase, self.kind, self.detail = phase, kind, detail
        self.reached_s[phase] = at_s


def to_replace(snapshots: Iterable[Snapshot], queue: int) -> list[tuple[Snapshot, Snapshot]]:
    """Waiting snapshots that give way, each with the newer one for whose sake.

    ``queue`` may wait behind the one that uploads; where none does, the first in line is about to.
    """
    known = [snapshot for snapshot in snapshots if not snapshot.final]
    waiting = [snapshot for snapshot in known if snapshot.waiting]
    busy = any(snapshot.uploading for snapshot in known)
    keep = queue if busy else queue + 1
    first = 0 if busy else 1
    surplus = len(waiting) - keep
    return [(old, waiting[-1]) for old in waiting[first : first + surplus]] if surplus > 0 else []


def overtaken(snapshot: Snapshot, others: Iterable[Snapshot]) -> set[int]:
    """Missing ranks that have gone past the snapshot: they staged one that came after it.

    Ranks save in one order, which any rank that staged both tells.
    """
    missing = set(snapshot.missing_ranks)
    passed: set[int] = set()
    for other in others:
        if other.key == snapshot.key or other.base_attempt != snapshot.base_attempt:
            continue
        if any(
            rank in other.parts and part.stamp.before(other.parts[rank].stamp)
            for rank, part in snapshot.parts.items()
        ):
            passed |= missing & set(other.parts)
    return passed
