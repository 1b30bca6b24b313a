"""States of one snapshot on one node, and the only moves between them. Pure.

COLLECTING   some ranks of the node have staged, not all are drained
SEALING      every image is in its last tier; the record is being written
SEALED       the record is there; the manifest is awaited or made
and the ends: COMMITTED, KEPT_NEAR, SKIPPED, FAILED, ABANDONED
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from forebay.format.messages import FINAL_PHASES, Phase
from forebay.format.paths import component
from forebay.format.slot import Layout, Stamp


class PartState(enum.Enum):
    """Where one rank's image is."""

    STAGED = "staged"
    LOCAL = "local"
    UPLOADED = "uploaded"


PART_MOVES = {
    PartState.STAGED: {PartState.LOCAL, PartState.UPLOADED},
    PartState.LOCAL: {PartState.UPLOADED},
    PartState.UPLOADED: set[PartState](),
}

PHASE_MOVES = {
    Phase.STAGED: {Phase.LOCAL, Phase.UPLOADING, Phase.SEALED, *FINAL_PHASES},
    Phase.LOCAL: {Phase.UPLOADING, Phase.SEALED, *FINAL_PHASES},
    Phase.UPLOADING: {Phase.SEALED, *FINAL_PHASES},
    Phase.SEALED: FINAL_PHASES,
    **{phase: set[Phase]() for phase in FINAL_PHASES},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """What hashing an image gave: header, each slice with its blocks, each witness."""

    header: bytes
    slices: tuple[bytes, ...]
    blocks: tuple[tuple[bytes, ...], ...]
    witnesses: tuple[bytes, ...]


@dataclass(slots=True)
class Part:
    """One rank's part of a snapshot: its ticket, where its slot is, how far it came."""

    layout: Layout
    stamp: Stamp
    arena: str
    slot: int
    state: PartState = PartState.STAGED
    digests: Digests | None = None
    slot_held: bool = True
    done_bytes: int = 0

    def move(self, state: PartState) -> None:
        """Go on to ``state``; an illegal move is a bug and raises."""
        if state not in PART_MOVES[self.state]:
            raise AssertionError(f"part of rank {self.layout.rank}: {self.state} -> {state}")
        self.state = state

    @property
    def components(self) -> str:
        """The top-level entries whose bytes are in the image."""
        return ", ".join(sorted({component(row.fqn) for row in self.layout.slices})) or "nothing"


@dataclass(slots=True)
class Snapshot:
    """All parts of one step and attempt on this node."""

    step: int
    attempt: str
    node_ranks: tuple[int, ...]
    parts: dict[int, Part] = field(default_factory=dict)
    phase: Phase = Phase.STAGED
    reached_s: dict[Phase, float] = field(default_factory=dict)
    detail: str = ""
    kind: str = ""

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
    def drained(self) -> bool:
        """True when every rank's image is in its last tier."""
        if self.missing_ranks:
            return False
        return all(part.state is self.last_state for part in self.parts.values())

    @property
    def last_state(self) -> PartState:
        """Where images of this snapshot end: a near one stays local."""
        near = any(not part.stamp.durable for part in self.parts.values())
        return PartState.LOCAL if near else PartState.UPLOADED

    @property
    def nbytes(self) -> int:
        """Image bytes of the parts known so far."""
        return sum(part.layout.image_bytes for part in self.parts.values())

    @property
    def done_bytes(self) -> int:
        """Image bytes that have left for the last tier."""
        return sum(part.done_bytes for part in self.parts.values())

    def move(self, phase: Phase, at_s: float, *, kind: str = "", detail: str = "") -> None:
        """Go on to ``phase``; an illegal move is a bug and raises."""
        if phase not in PHASE_MOVES[self.phase]:
            raise AssertionError(f"step {self.step}: {self.phase} -> {phase}")
        self.phase, self.kind, self.detail = phase, kind, detail
        self.reached_s[phase] = at_s
