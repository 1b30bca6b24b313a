"""A node whose agent's parts run in this process: no socket, no other process, its own store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from forebay.commit.catalog import Catalog
from forebay.commit.verify import Finding, verify_step
from forebay.drain.drainer import Drainer
from forebay.drain.finish import Finisher
from forebay.drain.job import Snapshot
from forebay.drain.journal import Journal, journal_path
from forebay.drain.slots import Slots
from forebay.drain.snapshots import Snapshots
from forebay.drain.work import Work
from forebay.format.messages import AgentConfig
from forebay.storage.store import Store
from tests.player import ATTEMPT, Player

ENDS_S = 120.0


class Node:
    """One rank, its arena, and what drains it to ``store``; retention keeps ``keep`` steps.

    What fails for ``patience_s`` is given up. Use ``save`` from one thread.
    """

    def __init__(
        self, home: Path, store: Store, *, nbytes: int, keep: int = 1, patience_s: float = 60.0
    ) -> None:
        self.player = Player(home, store.url, nbytes=nbytes)
        self._loop = asyncio.new_event_loop()
        self._slots = Slots(home)
        self._journal = Journal(journal_path(home, None))
        self._snapshots = Snapshots(
            node=0, slots=self._slots, journal=self._journal, tell=lambda _: None
        )
        self._work = Work(patience_s)
        config = AgentConfig(run=store.url, local=None, node=0, keep_last=keep)
        common: dict[str, Any] = {
            "config": config,
            "snapshots": self._snapshots,
            "work": self._work,
            "durable": store,
            "local": None,
        }
        finisher = Finisher(orphaned_s=lambda _: None, **common)
        self._drainer = Drainer(slots=self._slots, finisher=finisher, **common)

    def save(self, step: int) -> Snapshot:
        """Stage a step and drain it to its end, retention included; how it ended."""
        self.player.fill(step)
        self._loop.run_until_complete(asyncio.wait_for(self._drain(), ENDS_S))
        return self._snapshots.all[step, ATTEMPT]

    async def _drain(self) -> None:
        self._drainer.scan()
        while self._work.busy:
            await self._work.changed(1.0)

    def close(self) -> None:
        """End what is under way, give back files and mappings."""
        self._loop.run_until_complete(self._work.stop(1.0))
        self._loop.close()
        self._journal.close()
        self._slots.close()
        self.player.die()


def wrong(store: Store) -> list[str]:
    """What a committed step of the run lacks, or has otherwise than it was written."""
    catalog = Catalog(store)
    return [
        f"step {step}: {one.object}: {one.what}"
        for step in catalog.steps()
        for one in verify_step(catalog, catalog.manifest(step))
        if isinstance(one, Finding)
    ]
