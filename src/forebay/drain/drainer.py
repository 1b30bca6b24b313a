"""What the agent does with snapshots: take over, spill, upload, seal, commit. Lives in its loop.

Only the loop's thread changes a snapshot; threads move bytes and return. A failure ends the
snapshot it happened to and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forebay.commit.catalog import Catalog
from forebay.commit.publish import commit_step
from forebay.commit.reclaim import apply_keep
from forebay.config import Keep
from forebay.drain import spill
from forebay.drain.job import Digests, Part, PartState, Snapshot
from forebay.drain.journal import Accepted, Ended, Journal, Line, Spilled, Uploaded
from forebay.drain.seal import build_record
from forebay.drain.slots import Slots, Ticket
from forebay.errors import DeadlineError, ForebayError, FullError, IncompleteError, StoreError
from forebay.format import names
from forebay.format.messages import AgentConfig, Phase
from forebay.format.record import write_record
from forebay.storage.pace import Pace
from forebay.storage.store import Store
from forebay.watch.events import emit

_TRIES = 5
_FIRST_WAIT_S = 0.2
_GATHER_SLICE_S = 0.5
_ORPHAN_GATHER_S = 60.0
_LOCAL_KEPT = 2
_REMEMBERED = 64


class Drainer:
    """All snapshots of one job on one node. ``tell`` is called at each change of phase."""

    def __init__(
        self,
        config: AgentConfig,
        slots: Slots,
        journal: Journal,
        durable: Store,
        local: Store | None,
        tell: Callable[[Snapshot], None],
    ) -> None:
        self._config = config
        self._slots = slots
        self._journal = journal
        self._durable = durable
        self._local = local
        self._tell = tell
        self._pace = Pace(config.drain_bytes_per_s)
        self._bytes = ThreadPoolExecutor(4, thread_name_prefix="bytes")
        self._commits = ThreadPoolExecutor(2, thread_name_prefix="commit")
        self._lanes = asyncio.Semaphore(2)
        self._tasks: set[asyncio.Task[None]] = set()
        self._journal_lost = False
        self.stopping = False
        self.orphaned_s: dict[str, float] = {}
        self.snapshots: dict[tuple[int, str], Snapshot] = {}
        self.counts = {"committed": 0, "failed": 0, "skipped": 0}
        self.last_committed: int | None = None

    @property
    def busy(self) -> bool:
        """True while a snapshot is unfinished or work of one is under way."""
        return bool(self._tasks) or any(not s.final for s in self.snapshots.values())

    def scan(self) -> None:
        """Take over every slot that is STAGED."""
        self._slots.refresh()
        for ticket in self._slots.occupied():
            key = (ticket.stamp.step, ticket.stamp.attempt)
            known = self.snapshots.get(key)
            if known is not None and ticket.layout.rank in known.parts:
                continue
            self._accept(ticket)

    def _accept(self, ticket: Ticket) -> None:
        self._slots.take(ticket.arena, ticket.slot)
        self._note(
            Accepted(arena=ticket.arena, slot=ticket.slot, layout=ticket.layout, stamp=ticket.stamp)
        )
        part = Part(ticket.layout, ticket.stamp, ticket.arena, ticket.slot)
        snapshot = self._enter(part)
        if snapshot.final:
            self._free(part)
        else:
            self._start(self._drain(snapshot, part))

    def _enter(self, part: Part) -> Snapshot:
        stamp = part.stamp
        key = (stamp.step, stamp.attempt)
        snapshot = self.snapshots.get(key)
        if snapshot is None:
            snapshot = Snapshot(stamp.step, stamp.attempt, part.layout.node_ranks)
            snapshot.reached_s[Phase.STAGED] = stamp.staged_s
            self.snapshots[key] = snapshot
            self._forget_old()
        snapshot.parts[part.layout.rank] = part
        return snapshot

    def _forget_old(self) -> None:
        final = [key for key, snapshot in self.snapshots.items() if snapshot.final]
        for key in final[: max(0, len(self.snapshots) - _REMEMBERED)]:
            del self.snapshots[key]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            emit("agent.bug", level=50, why=repr(task.exception()))

    def _note(self, line: Line) -> None:
        """Write to the journal; without it the agent works on, and only its restart is poorer."""
        try:
            self._journal.write(line)
        except OSError as error:
            if not self._journal_lost:
                emit("journal.lost", level=40, why=error)
            self._journal_lost = True

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._bytes, work, *args)

    def _free(self, part: Part) -> None:
        if part.slot_held:
            part.slot_held = False
            self._slots.release(part.arena, part.slot)

    async def _drain(self, snapshot: Snapshot, part: Part) -> None:
        """Bring one part to its last tier; seal and commit when it was the last one."""
        try:
            async with self._lanes:
                if self.stopping or snapshot.final:
                    return
                if part.state is PartState.STAGED:
                    await self._from_slot(snapshot, part)
                if part.state is PartState.LOCAL and snapshot.last_state is PartState.UPLOADED:
                    await self._from_local(snapshot, part)
        except (ForebayError, OSError) as error:
            self._fail(snapshot, part, error)
        finally:
            if not self.stopping and (snapshot.final or part.state is not PartState.STAGED):
                self._free(part)
        if snapshot.drained and not snapshot.final and not self.stopping:
            await self._finish(snapshot)

    async def _from_slot(self, snapshot: Snapshot, part: Part) -> None:
        layout = part.layout
        key = names.shard_key(snapshot.step, snapshot.attempt, layout.node, layout.rank)
        area = self._slots.image(part.arena, part.slot)
        image = area[: layout.image_bytes]
        try:
            hashing = asyncio.ensure_future(self._in_thread(spill.hash_slot, area, layout))
            try:
                near = self._local is not None and await self._spill(snapshot, part, key, image)
                if not near:
                    self._advance(snapshot, Phase.UPLOADING)
                    await self._upload(part, lambda told: self._write_durable(key, image, told))
            finally:
                part.digests = await hashing
        finally:
            image.release()
            area.release()
        if near:
            part.move(PartState.LOCAL)
            self._note(_line(Spilled, snapshot, layout.rank, part.digests))
            self._free(part)
            if all(p.state is not PartState.STAGED for p in snapshot.parts.values()):
                self._advance(snapshot, Phase.LOCAL)
        else:
            part.move(PartState.UPLOADED)
            self._note(_line(Uploaded, snapshot, layout.rank, part.digests))

    async def _spill(self, snapshot: Snapshot, part: Part, key: str, image: memoryview) -> bool:
        """Write the image to the local tier; False when that tier fails and may be passed over."""
        assert self._local is not None
        if not image.nbytes:
            return True
        try:
            await self._in_thread(spill.write_image, self._local, key, image)
        except (StoreError, OSError) as error:
            emit("tier.failed", level=40, tier="local", step=snapshot.step, why=error)
            if not part.stamp.durable:
                raise
            return False
        return True

    def _write_durable(self, key: str, image: memoryview, told: Callable[[int], None]) -> None:
        if image.nbytes:
            spill.write_image(self._durable, key, image, on_progress=told, pace=self._pace)

    async def _from_local(self, snapshot: Snapshot, part: Part) -> None:
        assert self._local is not None
        local, layout = self._local, part.layout
        key = names.shard_key(snapshot.step, snapshot.attempt, layout.node, layout.rank)
        self._advance(snapshot, Phase.UPLOADING)

        def copy(told: Callable[[int], None]) -> None:
            if layout.image_bytes:
                spill.upload_file(
                    local, self._durable, key, layout.image_bytes, on_progress=told, pace=self._pace
                )

        await self._upload(part, copy)
        part.move(PartState.UPLOADED)
        self._note(_line(Uploaded, snapshot, layout.rank, part.digests))

    async def _upload(self, part: Part, write: Callable[[Callable[[int], None]], None]) -> None:
        """Run one upload, again after a passing failure. Raises what the last try raised."""

        def told(count: int) -> None:
            part.done_bytes += count

        def once() -> None:
            part.done_bytes = 0
            write(told)

        await self._again(once)

    async def _again(self, work: Callable[[], Any]) -> Any:
        wait_s = _FIRST_WAIT_S
        for left in range(_TRIES - 1, -1, -1):
            try:
                return await self._in_thread(work)
            except FullError:
                raise
            except StoreError as error:
                if left == 0 or self.stopping:
                    raise
                emit("store.retry", level=30, why=error, tries_left=left)
                await asyncio.sleep(wait_s)
                wait_s *= 2
        raise AssertionError("unreachable")

    async def _finish(self, snapshot: Snapshot) -> None:
        """Seal the record, then see to the manifest."""
        record = write_record(build_record(snapshot, time.time()))
        node = next(iter(snapshot.parts.values())).layout.node
        key = names.record_key(snapshot.step, snapshot.attempt, node)
        try:
            if self._local is not None:
                try:
                    await self._in_thread(self._local.put, key, record)
                except (StoreError, OSError) as error:
                    emit("tier.failed", level=40, tier="local", step=snapshot.step, why=error)
            if snapshot.last_state is PartState.LOCAL:
                self._end(snapshot, Phase.KEPT_NEAR)
                return
            await self._again(lambda: self._durable.put(key, record))
        except (ForebayError, OSError) as error:
            self._fail(snapshot, None, error)
            return
        self._advance(snapshot, Phase.SEALED)
        self._note(Ended(step=snapshot.step, attempt=snapshot.attempt, phase=Phase.SEALED))
        await self._commit(snapshot)

    async def _commit(self, snapshot: Snapshot) -> None:
        layout = next(iter(snapshot.parts.values())).layout
        try:
            await self._committed(snapshot.step, snapshot.attempt, layout.nodes)
        except DeadlineError as error:
            self._end(snapshot, Phase.ABANDONED, kind=error.kind, detail=str(error))
        except (ForebayError, OSError) as error:
            if not self.stopping:
                self._fail(snapshot, None, error)
        else:
            if not snapshot.final:
                self.counts["committed"] += 1
                self.last_committed = max(snapshot.step, self.last_committed or 0)
                self._end(snapshot, Phase.COMMITTED)
                await self._retain()

    async def _committed(self, step: int, attempt: str, nodes: int) -> None:
        """Return once the manifest stands: made by node 0, awaited by the others.

        Waits in slices, so that the wait for other nodes ends early when the job is gone.
        """
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        gathers = self._config.node == 0
        work = self._gather if gathers else self._await_manifest
        while True:
            try:
                await loop.run_in_executor(self._commits, work, step, attempt, nodes)
                return
            except DeadlineError:
                orphaned = self.orphaned_s.get(attempt.partition(".")[0])
                limit = began + self._config.gather_timeout_s
                if orphaned is not None:
                    limit = min(limit, max(orphaned, began) + _ORPHAN_GATHER_S)
                if self.stopping or time.monotonic() >= limit:
                    raise

    def _gather(self, step: int, attempt: str, nodes: int) -> None:
        commit_step(self._durable, step, attempt, nodes=nodes, timeout_s=_GATHER_SLICE_S)

    def _await_manifest(self, step: int, attempt: str, nodes: int) -> None:
        key = names.manifest_key(step)
        deadline = time.monotonic() + _GATHER_SLICE_S
        while self._durable.head(key) is None:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"step {step}: the manifest, which node 0 of {nodes} makes, is not there"
                )
            time.sleep(0.05)
        manifest = Catalog(self._durable).manifest(step)
        if manifest.attempt != attempt:
            raise IncompleteError(f"step {step} was committed by attempt {manifest.attempt}")

    async def _retain(self) -> None:
        """Apply retention behind everything else; its failure is told and harms nothing."""
        loop = asyncio.get_running_loop()
        try:
            if self._config.keep_last is not None and self._config.node == 0:
                keep = Keep(last=self._config.keep_last, every=self._config.keep_every)
                await loop.run_in_executor(self._commits, apply_keep, self._durable, keep)
            if self._local is not None:
                await loop.run_in_executor(self._commits, self._trim_local)
        except (ForebayError, OSError) as error:
            emit("retention.failed", level=40, why=error)

    def _trim_local(self) -> None:
        """Drop local images older than the last two snapshots that are whole there."""
        assert self._local is not None
        whole: set[int] = set()
        keys: list[tuple[int, str]] = []
        for info in self._local.list(names.DATA_PREFIX):
            name = names.parse_data_key(info.key)
            if name is None:
                continue
            keys.append((name.step, info.key))
            if name.leaf == "record.json.zst":
                whole.add(name.step)
        kept = sorted(whole)[-_LOCAL_KEPT:]
        busy = {step for (step, _), snapshot in list(self.snapshots.items()) if not snapshot.final}
        for step, key in sorted(keys, key=lambda k: not k[1].endswith("record.json.zst")):
            if kept and step < kept[0] and step not in busy:
                self._local.delete(key)

    def skip(
        self, step: int, attempt: str, node_ranks: tuple[int, ...], rank: int, why: str
    ) -> None:
        """A rank took no snapshot: the step cannot become complete."""
        key = (step, attempt)
        snapshot = self.snapshots.setdefault(key, Snapshot(step, attempt, node_ranks))
        if not snapshot.final:
            self.counts["skipped"] += 1
            self._end(snapshot, Phase.SKIPPED, kind="incomplete", detail=f"rank {rank}: {why}")

    def abandon(self, snapshot: Snapshot, why: str) -> None:
        """Give a snapshot up whose missing ranks will never come."""
        self._end(snapshot, Phase.ABANDONED, kind="incomplete", detail=why)

    def _fail(self, snapshot: Snapshot, part: Part | None, error: BaseException) -> None:
        if snapshot.final:
            return
        kind = error.kind if isinstance(error, ForebayError) else StoreError.kind
        where = f"node {self._config.node}"
        if part is not None:
            where = f"rank {part.layout.rank} on {where} ({part.components})"
        self.counts["failed"] += 1
        self._end(snapshot, Phase.FAILED, kind=kind, detail=f"{where}: {error}")

    def _advance(self, snapshot: Snapshot, phase: Phase) -> None:
        order = [Phase.STAGED, Phase.LOCAL, Phase.UPLOADING, Phase.SEALED]
        if snapshot.final or order.index(phase) <= order.index(snapshot.phase):
            return
        snapshot.move(phase, time.time())
        self._tell(snapshot)

    def _end(self, snapshot: Snapshot, phase: Phase, *, kind: str = "", detail: str = "") -> None:
        snapshot.move(phase, time.time(), kind=kind, detail=detail)
        self._note(Ended(step=snapshot.step, attempt=snapshot.attempt, phase=phase))
        for part in snapshot.parts.values():
            if part.digests is not None or part.state is not PartState.STAGED:
                self._free(part)
        self._tell(snapshot)

    def recover(self) -> None:
        """Go on where an earlier agent of this job ended."""
        lines = self._journal.replay()
        ended = {(x.step, x.attempt): x.phase for x in lines if isinstance(x, Ended)}
        kept: list[Line] = []
        for line in lines:
            key = _key(line)
            if ended.get(key) in (None, Phase.SEALED):
                kept.append(line)
                self._replay(line)
        self._journal.restart(kept)
        self._slots.refresh()
        for key, snapshot in self.snapshots.items():
            for part in snapshot.parts.values():
                if ended.get(key) is Phase.SEALED:
                    continue
                if part.state is PartState.STAGED and not self._still_there(part):
                    why = (
                        f"rank {part.layout.rank}: its image is in no slot and in no tier any more"
                    )
                    if not snapshot.final:
                        self._end(snapshot, Phase.FAILED, kind="incomplete", detail=why)
                elif not snapshot.final:
                    self._start(self._drain(snapshot, part))
            if ended.get(key) is Phase.SEALED:
                snapshot.phase = Phase.SEALED
                self._start(self._commit(snapshot))
        if self._config.node == 0:
            self._start(self._finish_others())

    def _replay(self, line: Line) -> None:
        if isinstance(line, Accepted):
            self._enter(Part(line.layout, line.stamp, line.arena, line.slot))
        elif isinstance(line, Spilled):
            snapshot = self.snapshots.get((line.step, line.attempt))
            part = snapshot.parts.get(line.rank) if snapshot is not None else None
            if part is not None:
                part.digests = Digests(
                    header=line.header,
                    slices=line.slices,
                    blocks=line.blocks,
                    witnesses=line.witnesses,
                )
                uploaded = isinstance(line, Uploaded)
                part.move(PartState.UPLOADED if uploaded else PartState.LOCAL)
                part.done_bytes = part.layout.image_bytes if uploaded else 0
                part.slot_held = False

    def _still_there(self, part: Part) -> bool:
        """True when the slot still holds this very snapshot."""
        return any(
            (t.arena, t.slot) == (part.arena, part.slot)
            and (t.stamp.step, t.stamp.attempt) == (part.stamp.step, part.stamp.attempt)
            for t in self._slots.occupied()
        )

    async def _finish_others(self) -> None:
        """Commit what an earlier start left with all its records but no manifest."""
        loop = asyncio.get_running_loop()
        catalog = Catalog(self._durable)
        try:
            newest = await loop.run_in_executor(self._commits, catalog.latest)
            found = await loop.run_in_executor(self._commits, catalog.unfinished)
            for left in found:
                mine = (left.step, left.attempt) in self.snapshots
                if left.complete and not mine and left.step > (-1 if newest is None else newest):
                    assert left.nodes is not None
                    await loop.run_in_executor(
                        self._commits, self._gather, left.step, left.attempt, left.nodes
                    )
                    emit("commit.finished", step=left.step, attempt=left.attempt)
        except (ForebayError, OSError) as error:
            emit("commit.not_finished", level=30, why=error)

    async def stop(self) -> None:
        """Let the work in hand end; what is left is for the next agent."""
        self.stopping = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=30)
        self._bytes.shutdown(wait=False)
        self._commits.shutdown(wait=False)
        self._journal.close()


def journal_path(job_directory: Path, local: Path | None) -> Path:
    """The journal lies on the local tier where there is one: it then survives a reboot."""
    return (job_directory if local is None else local) / "journal"


def _line(kind: type[Spilled], snapshot: Snapshot, rank: int, digests: Digests | None) -> Spilled:
    assert digests is not None
    return kind(
        step=snapshot.step,
        attempt=snapshot.attempt,
        rank=rank,
        header=digests.header,
        slices=digests.slices,
        blocks=digests.blocks,
        witnesses=digests.witnesses,
    )


def _key(line: Line) -> tuple[int, str]:
    if isinstance(line, Accepted):
        return line.stamp.step, line.stamp.attempt
    return line.step, line.attempt
