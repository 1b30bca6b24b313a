"""An arena laid out by a plan, with its copies ready to run. Kept from save to save."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from forebay.capture.arena import Arena, claim_arena, drop_drained
from forebay.capture.copy import Copier, Pages
from forebay.capture.layout import Plan
from forebay.capture.state import Walked
from forebay.config import Settings
from forebay.format.slot import WORD_BYTES, SlotState

STAMP_ROOM_BYTES = 64 * 2**10
_GROWTH = 4  # parameters, two moments, a counter


class Stage:
    """An arena laid out by a plan, with the copies ready to run."""

    def __init__(self, held: Arena, pages: Pages, plan: Plan) -> None:
        self.arena = held
        self.pages = pages
        self.plan = plan
        self.layout = msgspec.msgpack.encode(plan.layout)
        self.copier = Copier(pages, plan)
        self._ready: set[int] = set()
        for slot in range(held.head.slots):
            if held.state(slot) is SlotState.FREE:
                self.ready(slot)

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
        """Claim or create an arena for the plan, with room for what is known to come.

        That is the optimizer's state before its first step, and a tree that doubles.
        """
        growth = _GROWTH if plan.reserve_bytes else 1
        layout_bytes = len(msgspec.msgpack.encode(plan.layout))
        ticket = growth * (layout_bytes + 2 * tree_bytes) + STAMP_ROOM_BYTES
        held, others = claim_arena(
            directory,
            rank,
            slots=settings.slots,
            ticket_bytes=ticket,
            image_bytes=plan.slot_bytes + plan.reserve_bytes,
        )
        drop_drained(others)
        return cls(held, Pages(held, walked.accelerator), plan)

    def holds(self, plan: Plan, tree_bytes: int) -> bool:
        """True when the arena has room for the plan and for a tree of this size."""
        needed = len(msgspec.msgpack.encode(plan.layout)) + tree_bytes + 4096
        head = self.arena.head
        return plan.slot_bytes <= head.image_bytes and needed <= head.control_bytes - WORD_BYTES

    def relaid(self, plan: Plan) -> Stage:
        """The same arena under another plan; slots that drain keep theirs until they are free."""
        self.copier.close()
        return Stage(self.arena, self.pages, plan)

    def close(self) -> None:
        """Let go of the arena; its file stays."""
        self.copier.close()
        self.pages.close()

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
