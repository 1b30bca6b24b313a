"""The end of a snapshot: the node's record, the manifest, and what older ones leave behind."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from forebay.commit.catalog import Catalog
from forebay.commit.gather import gather, read_one
from forebay.commit.publish import Verdict, commit_step, publish
from forebay.commit.reclaim import Reclaimer
from forebay.config import Keep
from forebay.drain.job import Snapshot
from forebay.drain.seal import build_record, put_record
from forebay.drain.snapshots import Snapshots
from forebay.drain.work import Stopped, Work
from forebay.errors import ConflictError, DeadlineError, ForebayError, IncompleteError, StoreError
from forebay.format import names
from forebay.format.messages import AgentConfig, Phase
from forebay.storage.store import Store
from forebay.watch.events import emit

ORPHAN_GATHER_S = 60.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_LOCAL_KEPT = 2
LITTER_AGE_S = 86400.0
SWEEP_EVERY_S = 6 * 3600.0
OTHERS_S = 300.0

_T = TypeVar("_T")


class Finisher:
    """Seals drained snapshots and sees to their manifests.

    ``orphaned_s`` says since when (monotonic) an attempt has no trainer left, or None: nobody waits
    long for other nodes on behalf of a job that is gone; a restart commits what comes later.
    """

    def __init__(
        self,
        *,
        config: AgentConfig,
        snapshots: Snapshots,
        work: Work,
        durable: Store,
        local: Store | None,
        orphaned_s: Callable[[str], float | None],
    ) -> None:
        self._config = config
        self._snapshots = snapshots
        self._work = work
        self._durable = durable
        self._local = local
        self._orphaned_s = orphaned_s
        self._reclaimer = Reclaimer(durable)
        self._reclaiming = threading.Lock()

    async def finish(self, snapshot: Snapshot) -> None:
        """Write the record of a drained snapshot, last of all its objects; then commit."""
        snapshot.sealing = True
        try:
            record = await self._work.move(build_record, snapshot, time.time())
            if self._local is not None and not any(p.direct for p in snapshot.parts.values()):
                try:
                    await self._work.move(put_record, self._local, record)
                except (ForebayError, OSError) as error:
                    emit("tier.failed", level=40, tier="local", step=snapshot.step, why=error)
                    if snapshot.near:
                        raise
            if snapshot.near:
                kind = IncompleteError.kind if snapshot.replaced else ""
                self._snapshots.end(snapshot, Phase.KEPT_NEAR, kind=kind, detail=snapshot.replaced)
                return
            await self._work.again(
                lambda: put_record(self._durable, record),
                trouble=self._snapshots.trouble(snapshot),
            )
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001 - even a bug ends its snapshot and nothing else
            self._snapshots.fail(snapshot, None, error)
            return
        self._snapshots.advance(snapshot, Phase.SEALED)
        await self.commit(snapshot)

    async def commit(self, snapshot: Snapshot) -> None:
        """Make the manifest, on node 0, or await it; the snapshot then has its end."""
        # A journal that lost a line for a while may know that it was sealed, and nothing more.
        nodes = next((part.layout.nodes for part in snapshot.parts.values()), None)
        work = self._gather if self._config.node == 0 else self._await_manifest
        try:
            await self._work.again(
                lambda: self._finish(work, snapshot.step, snapshot.attempt, nodes),
                trouble=self._snapshots.trouble(snapshot),
                commits=True,
            )
        except Stopped:
            return
        except DeadlineError as error:
            self._snapshots.end(snapshot, Phase.ABANDONED, kind=error.kind, detail=str(error))
        except Exception as error:  # noqa: BLE001 - even a bug ends its snapshot and nothing else
            self._snapshots.fail(snapshot, None, error)
        else:
            self._snapshots.end(snapshot, Phase.COMMITTED)
            await self._retain()

    def _finish(
        self, work: Callable[[int, str, int], None], step: int, attempt: str, nodes: int | None
    ) -> None:
        self._require_own_record(step, attempt)
        if nodes is None:
            nodes = self._nodes_of(step, attempt)
        work(step, attempt, nodes)

    def _nodes_of(self, step: int, attempt: str) -> int:
        """How many nodes a sealed snapshot has, by this node's record."""
        own = read_one(self._durable, step, attempt, self._config.node)
        if own is None:
            raise StoreError(f"step {step}: the record of node {self._config.node} cannot be seen")
        return own.record.nodes

    def _require_own_record(self, step: int, attempt: str) -> None:
        """Raise IncompleteError when what this node sealed is gone again: nobody need wait for it.

        A journal may be older than what retention deleted since.
        """
        key = names.record_key(step, attempt, self._config.node)
        if self._durable.head(key) is None:
            raise IncompleteError(f"step {step}: {key} was sealed and is gone: deleted since")

    def _gather(self, step: int, attempt: str, nodes: int) -> None:
        timeout_s, clock = self._config.gather_timeout_s, self._clock(attempt)
        try:
            checked = gather(
                self._durable,
                step,
                attempt,
                nodes=nodes,
                timeout_s=timeout_s,
                clock=clock,
                sleep=self._work.nap,
            )
        except DeadlineError as error:
            if clock() < time.monotonic() + timeout_s:
                raise
            text = f"{error} (cut short: no trainer of the attempt is left)"
            raise DeadlineError(text) from None
        verdict, manifest = publish(self._durable, checked)
        if verdict is Verdict.LOST:
            raise ConflictError(_lost(step, attempt, manifest.attempt))

    def _clock(self, attempt: str) -> Callable[[], float]:
        """A clock that jumps past the deadline once the attempt has been without trainers long."""
        began, base = time.monotonic(), attempt.partition(".")[0]

        def clock() -> float:
            now, since = time.monotonic(), self._orphaned_s(base)
            if since is not None and now > max(since, began) + ORPHAN_GATHER_S:
                return now + self._config.gather_timeout_s
            return now

        return clock

    def _await_manifest(self, step: int, attempt: str, nodes: int) -> None:
        key, clock = names.manifest_key(step), self._clock(attempt)
        deadline = clock() + self._config.gather_timeout_s
        wait_s = _FIRST_WAIT_S
        while self._durable.head(key) is None:
            if clock() >= deadline:
                raise DeadlineError(
                    f"step {step}: node 0 of {nodes} has made no manifest within "
                    f"{self._config.gather_timeout_s:g} s"
                )
            self._work.nap(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        self._durable.settle(key)  # node 0 may not have come to that yet
        there = Catalog(self._durable).manifest(step)
        if there.attempt != attempt:
            raise ConflictError(_lost(step, attempt, there.attempt))

    async def _retain(self) -> None:
        """Apply retention behind everything else; its failure is told and harms nothing."""
        if self._local is not None:
            local = self._local
            await self._tidy(lambda: self._trim_local(local))
        keep_last, keep_every = self._config.keep_last, self._config.keep_every
        if self._config.node == 0 and (keep_last is not None or keep_every is not None):
            keep = Keep(last=keep_last or 1, every=keep_every)
            # A job that went back to an older step commits below the newest: it keeps its own, too.
            spared = {*self._steps(busy=True), *self._steps(busy=False)[-keep.last :]}
            await self._tidy(lambda: self._reclaim(keep, spared))

    async def _tidy(self, work: Callable[[], object]) -> None:
        try:
            await self._work.commit(work)
        except (ForebayError, OSError) as error:
            emit("retention.failed", level=40, why=error)

    def _reclaim(self, keep: Keep, spared: set[int]) -> None:
        with self._reclaiming:  # two commits may end at once
            self._reclaimer.apply(keep, spared)

    def _steps(self, *, busy: bool) -> list[int]:
        """Steps that this agent is at work on, or those that it saw committed, the latest last."""
        known = list(self._snapshots.all.values())  # at once: the loop's thread adds to it
        return [s.step for s in known if (not s.final if busy else s.phase is Phase.COMMITTED)]

    def _trim_local(self, local: Store) -> None:
        """Drop local images older than the last two committed steps, the record of each first.

        Of the last two, node 0 may have deleted one: those of this agent's are known without.
        """
        committed = self._steps(busy=False)
        kept = sorted({*Catalog(self._durable).steps(), *committed})[-_LOCAL_KEPT:]
        if len(kept) < _LOCAL_KEPT:
            return
        found = [
            (name.step, info.key)
            for info in local.list(names.DATA_PREFIX)
            if (name := names.parse_data_key(info.key)) is not None and name.step < kept[0]
        ]
        # Asked only now: what came meanwhile is known, and a job that went back saves older steps.
        spared = {*self._steps(busy=True), *committed[-_LOCAL_KEPT:]}
        old = [key for step, key in found if step not in spared]
        for key in sorted(old, key=lambda k: not k.endswith("record.json.zst")):
            local.delete(key)

    async def finish_others(self) -> None:
        """Commit what an earlier start left complete, newer than the newest manifest."""
        catalog = Catalog(self._durable)
        try:
            newest = await self._again(catalog.latest)
            found = await self._again(catalog.unfinished)
        except Stopped:
            return
        except (ForebayError, OSError) as error:
            emit("commit.not_finished", level=30, why=error)
            return
        for left in found:
            if (
                not left.complete
                or left.nodes is None
                or left.step <= (-1 if newest is None else newest)
            ):
                continue
            if (left.step, left.attempt) in self._snapshots.all:
                continue  # its own commit is under way, or has ended as it has
            step, attempt, nodes = left.step, left.attempt, left.nodes
            try:
                await self._again(functools.partial(self._commit_now, step, attempt, nodes))
            except Stopped:
                return
            except (ForebayError, OSError) as error:
                emit("commit.not_finished", level=30, step=step, attempt=attempt, why=error)
            else:
                emit("commit.finished", step=step, attempt=attempt)

    async def _again(self, work: Callable[[], _T]) -> _T:
        """Work for an earlier start: nobody waits for it, so that an idle agent does not long."""
        return await self._work.again(work, commits=True, limit_s=OTHERS_S)

    async def sweep(self) -> None:
        """Remove, every few hours, what writers that died left unfinished on the durable tier."""
        while True:
            try:
                count = await self._again(
                    lambda: self._durable.sweep("", older_than_s=LITTER_AGE_S)
                )
                if count:
                    emit("sweep.done", unfinished_writes=count)
            except (ForebayError, OSError) as error:
                emit("sweep.failed", level=30, why=error)
            except Stopped:
                return
            try:
                await self._work.sleep(SWEEP_EVERY_S)
            except Stopped:
                return

    def _commit_now(self, step: int, attempt: str, nodes: int) -> None:
        commit_step(self._durable, step, attempt, nodes=nodes, timeout_s=0.0)


def _lost(step: int, attempt: str, other: str) -> str:
    return (
        f"step {step} is already committed by attempt {other}; attempt {attempt} was not "
        "published: save under a newer step"
    )
