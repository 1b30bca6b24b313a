"""An arena laid out by a plan, with its copies ready to run. Kept from save to save."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from forebay.capture.arena import Arena, claim_arena, drop_drained
from forebay.capture.copy import Copier
from forebay.capture.layout import Plan
from forebay.capture.state import Walked
from forebay.config import Settings
from forebay.format.slot import WORD_BYTES, SlotState

if TYPE_CHECKING:
    import torch

STAMP_ROOM_BYTES = 64 * 2**10


class Stage:
    """An arena laid out by a plan, with the copies ready to run."""

    def __init__(self, held: Arena, plan: Plan, device: torch.device | None) -> None:
        self.arena = held
        self.plan = plan
        self.layout = msgspec.msgpack.encode(plan.layout)
        self.copier = Copier(held, plan, device)
        self._device = device
        self._ready: set[int] = set()

    @classmethod
    def make(
        cls,
        directory: Path,
        rank: int,
        settings: Settings,
        plan: Plan,
        walked: Walked,
        tree_bytes: int,
    ) -> Stage:
        """Claim or create an arena for the plan, with room for the tree to double."""
        ticket = len(msgspec.msgpack.encode(plan.layout)) + 2 * tree_bytes + STAMP_ROOM_BYTES
        held, others = claim_arena(
            directory,
            rank,
            slots=settings.slots,
            ticket_bytes=ticket,
            image_bytes=plan.slot_bytes,
        )
        drop_drained(others)
        stage = cls(held, plan, walked.accelerator)
        for free in range(held.head.slots):
            if held.state(free) is SlotState.FREE:
                stage.ready(free)
        return stage

    def holds(self, plan: Plan, tree_bytes: int) -> bool:
        """True when the arena has room for the plan and for a tree of this size."""
        needed = len(msgspec.msgpack.encode(plan.layout)) + tree_bytes + 4096
        head = self.arena.head
        return plan.slot_bytes <= head.image_bytes and needed <= head.control_bytes - WORD_BYTES

    def relaid(self, plan: Plan, walked: Walked) -> Stage:
        """The same arena under another plan; slots that drain keep theirs until they are free."""
        self.copier.close()
        stage = Stage(self.arena, plan, walked.accelerator)
        for free in range(self.arena.head.slots):
            if self.arena.state(free) is SlotState.FREE:
                stage.ready(free)
        return stage

    def fits(self, tree_bytes: int) -> bool:
        """True when a stamp with a tree of this size fits beside the layout."""
        return tree_bytes + 1024 <= self.arena.room_for_stamp(len(self.layout))

    def ready(self, free: int) -> float:
        """Write layout and header into a FREE slot unless they stand there; seconds it took."""
        if free in self._ready:
            return 0.0
        began = time.perf_counter()
        self.arena.write_layout(free, self.layout, self.plan.image.header)
        self._ready.add(free)
        return time.perf_counter() - began
