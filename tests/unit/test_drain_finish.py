"""What is left behind a commit, in this process: the local tier is trimmed beside new saves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from forebay.drain.finish import Finisher
from forebay.drain.journal import Journal
from forebay.drain.slots import Slots
from forebay.drain.snapshots import Snapshots
from forebay.drain.work import Work
from forebay.format import names
from forebay.format.messages import AgentConfig, Phase
from forebay.storage.memory import MemoryStore
from forebay.storage.store import ObjectInfo
from tests.unit.test_drain_job import part, snapshot


class Slow(MemoryStore):
    """A durable tier that lists its steps while a rank saves one more."""

    def __init__(self, snapshots: Snapshots, local: MemoryStore) -> None:
        super().__init__()
        self._snapshots, self._local = snapshots, local

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._snapshots.add(snapshot(part(0), step=61))
        self._local.put(names.shard_key(61, "a", 0, 0), b"image")
        return super().list(prefix)


def test_an_image_that_came_while_the_local_tier_was_trimmed_stays(tmp_path: Path) -> None:
    """A job that went back to an older step saves below the newest."""
    snapshots = Snapshots(
        node=0, slots=Slots(tmp_path), journal=Journal(tmp_path / "journal"), tell=lambda _: None
    )
    local = MemoryStore()
    durable = Slow(snapshots, local)
    for step in (90, 100, 60):
        ended = snapshot(part(0), part(1), step=step)
        ended.phase = Phase.COMMITTED
        snapshots.add(ended)
    for step in (50, 60, 90, 100):
        local.put(names.shard_key(step, "a", 0, 0), b"image")
    finisher = Finisher(
        config=AgentConfig(run="/run", local=None, node=0),
        snapshots=snapshots,
        work=Work(1.0),
        durable=durable,
        local=local,
        orphaned_s=lambda _: None,
    )
    asyncio.run(finisher._retain())
    found = {names.parse_data_key(info.key) for info in local.list("")}
    assert {name.step for name in found if name} == {60, 61, 90, 100}
