"""Takes staged slots over and brings their images to the local and the durable tier.

Only the loop's thread changes a snapshot; threads move bytes and return. A failure ends the
snapshot it happened to and nothing else. Slots and uploads have lanes of their own: an upload that
crawls keeps no slot, once there is a local tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from forebay.drain import spill
from forebay.drain.cadence import Cadence
from forebay.drain.finish import Finisher
from forebay.drain.job import Digests, Part, PartState, Snapshot, to_replace
from forebay.drain.journal import Accepted, Began, Spilled, Uploaded
from forebay.drain.slots import Slots, Ticket
from forebay.drain.snapshots import Snapshots
from forebay.drain.upload import upload_file
from forebay.drain.work import Stopped, Work
from forebay.errors import ForebayError, StoreError
from forebay.format import names
from forebay.format.messages import AgentConfig, Phase
from forebay.storage.pace import start_delay_s
from forebay.storage.store import Store
from forebay.watch.events import emit

_LANES = 2


class Drainer:
    """Drains the slots of one job on one node, oldest snapshot first, ranks side by side."""

    def __init__(
        self,
        *,
        slots: Slots,
        snapshots: Snapshots,
        finisher: Finisher,
        work: Work,
        durable: Store,
        local: Store | None,
        config: AgentConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._slots = slots
        self._snapshots = snapshots
        self._finisher = finisher
        self._work = work
        self._durable = durable
        self._local = local
        self._queue = config.queue
        self._delay_s = start_delay_s(f"{config.run} node {config.node}", config.stagger_s)
        self._clock = clock
        self._slot_lanes = asyncio.Semaphore(_LANES)
        self._upload_lanes = asyncio.Semaphore(_LANES)
        self._judging = asyncio.Lock()
        self._cadence = Cadence(
            durable,
            node=config.node,
            every_s=config.durable_every_s,
            limit_s=config.gather_timeout_s,
            nap=work.nap,
        )
        self._local_failed: set[tuple[int, str]] = set()

    def scan(self) -> None:
        """Take over every slot that is STAGED, or DRAINING by nobody. Raises OSError."""
        self._slots.refresh()
        for ticket in self._slots.occupied():
            self._accept(ticket)

    def _accept(self, ticket: Ticket) -> None:
        part = Part(layout=ticket.layout, stamp=ticket.stamp, arena=ticket.arena, slot=ticket.slot)
        known = self._snapshots.all.get((ticket.stamp.step, ticket.stamp.attempt))
        if known is not None and (known.final or ticket.layout.rank in known.parts):
            # It came too late, or twice: the rank hears how the snapshot ended.
            part.hold = self._slots.take(ticket)
            self._snapshots.free(part)
            self._snapshots.tell(known)
            return
        self._snapshots.note(
            Accepted(arena=ticket.arena, slot=ticket.slot, layout=ticket.layout, stamp=ticket.stamp)
        )
        part.hold = self._slots.take(ticket)
        self.start(self._snapshots.enter(part), part)

    def start(self, snapshot: Snapshot, part: Part) -> None:
        """Begin, or go on, to drain a part that a snapshot has."""
        self._work.start(self._drain(snapshot, part))

    async def _drain(self, snapshot: Snapshot, part: Part) -> None:
        """Bring one part to its last tier; seal and commit when it was the last one."""
        try:
            if part.state is PartState.STAGED:
                if self._local is None:
                    await self._turn(snapshot)
                async with self._slot_lanes:
                    self._go_on(snapshot)
                    await self._from_slot(snapshot, part)
            if part.state is PartState.LOCAL and not snapshot.near:
                await self._judge(snapshot, part)
            if part.state is PartState.LOCAL and not snapshot.near:
                self._replace()
                await self._turn(snapshot)
                async with self._upload_lanes:
                    self._go_on(snapshot)
                    if not snapshot.replaced:
                        await self._from_local(snapshot, part)
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - even a bug ends its snapshot and nothing else
            if not self._work.cut:
                self._snapshots.fail(snapshot, part, error)
        finally:
            part.reading = False
            if snapshot.final:
                self._snapshots.free(part)
        if snapshot.drained and not snapshot.final and not snapshot.sealing:
            await self._finisher.finish(snapshot)

    async def _judge(self, snapshot: Snapshot, part: Part) -> None:
        """Learn whether the snapshot goes to the durable tier at all."""
        staged_s = min(p.stamp.staged_s for p in snapshot.parts.values())
        nodes = part.layout.nodes
        async with self._judging:
            if snapshot.judged or snapshot.final:
                return
            durable = await self._work.again(
                lambda: self._cadence.durable(snapshot.step, snapshot.attempt, staged_s, nodes),
                trouble=self._snapshots.trouble(snapshot),
                commits=True,
            )
            snapshot.judged, snapshot.kept_near = True, not durable

    def _replace(self) -> None:
        """Let snapshots that have not begun to upload give way to newer ones, beyond the queue."""
        for old, new in to_replace(self._snapshots.all.values(), self._queue):
            old.replaced = (
                f"step {new.step} took its place before its upload began: the durable tier is "
                "slower than the saves come; it stays on the local tier"
            )
            emit("snapshot.replaced", level=30, step=old.step, by=new.step)
            if old.drained and not old.sealing:
                self._work.start(self._finisher.finish(old))

    async def _turn(self, snapshot: Snapshot) -> None:
        """Wait for this node's turn in the window over which nodes begin to upload."""
        begun_s = min(part.stamp.staged_s for part in snapshot.parts.values())
        await self._work.sleep(min(self._delay_s, begun_s + self._delay_s - self._clock()))

    def _go_on(self, snapshot: Snapshot) -> None:
        """Raise Stopped when the snapshot has ended or nothing new shall begin."""
        if snapshot.final or self._work.stopping:
            raise Stopped

    def _told(self, snapshot: Snapshot, part: Part) -> Callable[[int], None]:
        """What a writing thread calls after each block: counts, and cuts off what is vain."""

        def told(count: int) -> None:
            if snapshot.final or self._work.cut:
                raise Stopped
            if part.uploading:
                part.done_bytes += count

        return told

    async def _from_slot(self, snapshot: Snapshot, part: Part) -> None:
        layout = part.layout
        part.reading = True
        area = self._slots.image(part.arena, part.slot, part.hold)
        image = area[: layout.image_bytes]
        hashing = asyncio.ensure_future(self._work.move(spill.hash_slot, area, layout))
        try:
            near = await self._spill(snapshot, part, image)
            if not near:
                part.direct = True
                await self._upload(snapshot, part, lambda: self._write(snapshot, part, image))
        finally:
            await asyncio.wait([hashing])
            part.reading = False
            with contextlib.suppress(BufferError):  # a request that hangs still holds a part of it
                image.release()
                area.release()
        part.digests = hashing.result()
        self._moved(snapshot, part, PartState.LOCAL if near else PartState.UPLOADED)
        self._snapshots.free(part)

    async def _spill(self, snapshot: Snapshot, part: Part, image: memoryview) -> bool:
        """Write the image to the local tier; False when there is none or it may be passed over.

        A tier that failed for one rank is not tried for the others of the snapshot.
        """
        if self._local is None or snapshot.key in self._local_failed:
            return False
        if not image.nbytes:
            return True
        told, key, local = self._told(snapshot, part), _key(snapshot, part), self._local
        try:
            await self._work.move(lambda: spill.write_image(local, key, image, on_progress=told))
        except (ForebayError, OSError) as error:
            emit("tier.failed", level=40, tier="local", step=snapshot.step, why=error)
            if not part.stamp.durable:
                raise
            self._local_failed.add(snapshot.key)
            return False
        return True

    def _write(self, snapshot: Snapshot, part: Part, image: memoryview) -> None:
        if image.nbytes:
            told, key = self._told(snapshot, part), _key(snapshot, part)
            log = _Log(self._snapshots, snapshot, part)
            spill.write_image(self._durable, key, image, on_progress=told, log=log)

    async def _from_local(self, snapshot: Snapshot, part: Part) -> None:
        local, nbytes = self._local, part.layout.image_bytes
        if local is None:
            raise StoreError("its image is on a local tier that this agent was not given")
        told, key = self._told(snapshot, part), _key(snapshot, part)
        log = _Log(self._snapshots, snapshot, part)

        def copy() -> None:
            if nbytes:
                upload_file(local, self._durable, key, nbytes, on_progress=told, log=log)

        await self._upload(snapshot, part, copy)
        self._moved(snapshot, part, PartState.UPLOADED)

    async def _upload(self, snapshot: Snapshot, part: Part, write: Callable[[], None]) -> None:
        """Run one upload, again while it fails and patience lasts. Raises what the last try did."""
        part.uploading = True
        self._show(snapshot)
        most = 0

        def once() -> None:
            if snapshot.final:
                raise Stopped
            part.done_bytes = 0
            write()

        def moved() -> bool:
            nonlocal most
            before, most = most, max(most, part.done_bytes)
            return most > before

        await self._work.again(once, moved=moved, trouble=self._snapshots.trouble(snapshot))

    def _moved(self, snapshot: Snapshot, part: Part, state: PartState) -> None:
        """Note that a part is safe in its next tier."""
        assert part.digests is not None
        part.move(state)
        line = Spilled if state is PartState.LOCAL else Uploaded
        self._snapshots.note(_line(line, snapshot, part.layout.rank, part.digests))
        self._show(snapshot)

    def _show(self, snapshot: Snapshot) -> None:
        """Tell how far the whole is: local once every rank is, uploading where nothing is near."""
        parts = snapshot.parts.values()
        passed = self._local is None or any(part.direct for part in parts)
        if snapshot.spilled and not passed:
            self._snapshots.advance(snapshot, Phase.LOCAL)
        if any(part.uploading for part in parts) and (passed or snapshot.spilled):
            self._snapshots.advance(snapshot, Phase.UPLOADING)


class _Log:
    """Remembers the upload of one part, in the journal. Called from the thread that writes."""

    def __init__(self, snapshots: Snapshots, snapshot: Snapshot, part: Part) -> None:
        self._snapshots, self._snapshot, self._part = snapshots, snapshot, part

    def known(self) -> tuple[str, int] | None:
        """Id and part size of an upload that may be gone on with."""
        return self._part.upload

    def begun(self, upload_id: str, part_bytes: int) -> None:
        """Noted, and durable, before the first of its parts is sent."""
        self._part.upload = upload_id, part_bytes
        self._snapshots.note(
            Began(
                step=self._snapshot.step,
                attempt=self._snapshot.attempt,
                rank=self._part.layout.rank,
                upload_id=upload_id,
                part_bytes=part_bytes,
            )
        )

    def trouble(self, why: str) -> None:
        """Shown with the snapshot until parts arrive again."""
        self._snapshot.trouble = why


def _key(snapshot: Snapshot, part: Part) -> str:
    return names.shard_key(snapshot.step, snapshot.attempt, part.layout.node, part.layout.rank)


def _line(kind: type[Spilled], snapshot: Snapshot, rank: int, digests: Digests) -> Spilled:
    return kind(
        step=snapshot.step,
        attempt=snapshot.attempt,
        rank=rank,
        header=digests.header,
        slices=digests.slices,
        blocks=digests.blocks,
        witnesses=digests.witnesses,
    )
