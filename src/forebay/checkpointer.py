"""The object a trainer holds: prepare, save, restore, status, close."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from forebay.capture import agree, layout
from forebay.capture.copy import digest_of
from forebay.capture.ledger import Ledger, Line, Tier, as_timeout
from forebay.capture.recall import Memory
from forebay.capture.stage import Stage
from forebay.capture.state import Walked
from forebay.capture.topology import Topology
from forebay.capture.walk import walk
from forebay.commit.catalog import Catalog
from forebay.config import Keep, Settings
from forebay.errors import (
    DamagedError,
    DeadlineError,
    ForebayError,
    IncompleteError,
    NotFoundError,
    UsageError,
)
from forebay.format import messages, names, slot, tree
from forebay.format.manifest import Manifest, read_manifest
from forebay.membership import Membership
from forebay.restore.report import RestoreReport
from forebay.restore.session import Session
from forebay.snapshot import Snapshot
from forebay.storage.address import resolve_url
from forebay.watch.events import emit

if TYPE_CHECKING:
    from typing_extensions import Self

_COUNTED_STEPS = 4096


class Checkpointer:
    """Checkpoints of one run. Every rank makes one, with the same arguments.

    Args:
        url: the durable tier: a directory, whose parent must exist, or ``s3://``, ``gs://``,
            ``az://`` and a run's name below a bucket.
        local: directory of the node-local tier (NVMe), or None.
        slots: images in memory at once; two (the default) let a save begin while one drains.
        on_full: what a save does that finds no free slot: ``skip`` it (the default), or ``wait``.
        durable_every: every n-th snapshot goes to the durable tier, or one every ``"10min"``.
        keep: retention of committed checkpoints; None keeps all.
        drain_bytes_per_s: limit of this node's drain to the durable tier.
        attempt: name of this start of the job, equal on all ranks; by default agreed upon.
        topology: place of this process; by default from torchrun, Slurm or torch.distributed.
        settings: anything else, see ``forebay.config.Settings``; what is stated above goes first.

    Belongs to the thread that trains. Nothing is started before the first of ``prepare``,
    ``restore`` and ``save``.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        local: str | os.PathLike[str] | None = None,
        slots: int | None = None,
        on_full: Literal["skip", "wait"] | None = None,
        durable_every: int | str | None = None,
        keep: Keep | None = None,
        drain_bytes_per_s: float | None = None,
        attempt: str | None = None,
        topology: Topology | None = None,
        settings: Settings | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "local": None if local is None else Path(local).absolute(),
            "slots": slots,
            "on_full": on_full,
            "durable_every": durable_every,
            "keep": keep,
            "drain_bytes_per_s": drain_bytes_per_s,
        }
        stated = {name: value for name, value in given.items() if value is not None}
        self.settings = replace(settings or Settings(), **stated)
        self.url = resolve_url(url)
        self.last_restore: RestoreReport | None = None
        self._given_attempt = attempt
        self._given_topology = topology
        self._exchange = agree.Exchange()
        self._ledger = Ledger(has_local=self.settings.local is not None)
        self._saves: dict[int, int] = {}
        self._taken = 0
        self._agreed = layout.Agreed()
        self._memory = Memory()
        self._job: Membership | None = None
        self._stage: Stage | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._leave(clean=False)

    def prepare(self, state_dict: dict[Any, Any]) -> None:
        """Do all set-up now: agent, arena, layout; so that the first save is as fast as the tenth.

        Collective when torch.distributed is up. Changes nothing in ``state_dict``.
        """
        job = self._open_job()
        walked = walk(state_dict, job.topology.rank, self._memory)
        marks = layout.agreement_marks(walked, job.topology, agree.BUCKETS)
        agreed = self._exchange.agreed_buckets(marks)
        self._agreed = layout.agree_on(walked, job.topology, agree.BUCKETS, agreed)
        self._lay_out(job, walked, len(tree.write_tree(walked.common)), compare=True)

    def save(self, step: int, state_dict: dict[Any, Any]) -> Snapshot:
        """Copy this rank's part of the state into host memory and hand it to the node agent.

        On return the state may change. Nothing is durable yet: the agent drains and commits it,
        also when this process dies. Takes no collective and waits for no other rank, except for
        the set-up of a first save without ``prepare`` or ``restore``.

        Raises StateError for what cannot be saved; a full arena is not an error (``on_full``).
        """
        began = time.perf_counter()
        names.check_step(step)
        if self._stage is None:
            self.prepare(state_dict)
        job, stage = self._open_job(), self._stage
        assert stage is not None
        setup_s = time.perf_counter() - began
        begin = time.perf_counter()
        attempt = self._attempt_for(job, step)
        walked = walk(state_dict, job.topology.rank, self._memory)
        common, own = tree.write_tree(walked.common), tree.write_tree(walked.own)
        if walked.sign != stage.plan.sign or not stage.fits(len(common) + len(own)):
            # The structure changed: this rank lays out anew by itself, asking nobody.
            stage = self._lay_out(job, walked, len(common) + len(own), compare=False)
            setup_s, begin = setup_s + time.perf_counter() - begin, time.perf_counter()
        free = self._free_slot(stage)
        if free is None:
            return self._skip(job, step, attempt, setup_s, time.perf_counter() - begin)
        setup_s += stage.ready(free)
        stage.arena.begin(free)
        try:
            stage.copier.copy(free, walked.leaves, step)
        except BaseException:
            stage.arena.give_up(free)
            raise
        pause_s = time.perf_counter() - begin
        self._taken += 1
        stamp = slot.Stamp(
            step=step,
            attempt=attempt,
            staged_s=time.time(),
            since_boot_s=time.clock_gettime(time.CLOCK_BOOTTIME),
            pause_s=pause_s,
            durable=(self._taken - 1) % self.settings.durable_every_count == 0,
            tree=common,
            own=own,
        )
        line = self._ledger.open(step, attempt, messages.Phase.STAGED)
        stage.arena.stage(free, len(stage.layout), msgspec.msgpack.encode(stamp))
        job.link.ring(stage.arena.path.name)
        return Snapshot(
            step=step,
            attempt=attempt,
            bytes=stage.plan.staged_bytes,
            pause_s=time.perf_counter() - begin,
            setup_s=setup_s,
            skipped="",
            line=line,
            ledger=self._ledger,
        )

    def restore(
        self,
        state_dict: dict[Any, Any],
        step: int | None = None,
        *,
        strict: bool = True,
        allow_cast: bool = False,
        per_rank: Literal["require", "skip"] = "require",
        fallback: bool = False,
        timeout_s: float = 1800.0,
    ) -> int | None:
        """Fill ``state_dict`` in place from the newest complete checkpoint, or from ``step``.

        Returns the step, or None when the run has no checkpoint yet. Every byte is checked before
        any target is touched, on all ranks; on an error no target has changed. ``last_restore``
        tells which bytes came from where. Ends with the set-up that ``prepare`` does. Collective
        when torch.distributed is up.

        Args:
            state_dict: the state to fill, as given to ``save``.
            step: a committed step; None for the newest.
            strict: refuse entries missing in the checkpoint or unused by the target; False reports
                them in ``last_restore`` instead.
            allow_cast: let floating point tensors load into another floating point dtype, rounded.
            per_rank: what was declared per rank comes back by rank and needs the same world size;
                ``skip`` leaves those entries of the target as they are.
            fallback: on damage, go on with the next older checkpoint, and say so.
            timeout_s: how long snapshots of an earlier start that still drain are waited for.

        Raises:
            NotFoundError: no such step. MismatchError: checkpoint and target differ.
            DamagedError: stored bytes are not what was written, on every tier.
        """
        timeout_s = as_timeout("restore", timeout_s)
        job = self._open_job()
        older_than: int | None = None
        while True:
            manifest = self._choose(job, step, older_than, timeout_s, fallback=fallback)
            if manifest is None:
                self.prepare(state_dict)
                return None
            session, failure = self._fetch(
                job, manifest, state_dict, strict=strict, allow_cast=allow_cast, per_rank=per_rank
            )
            if failure is None:
                break
            if not (fallback and step is None and isinstance(failure, DamagedError)):
                raise failure
            emit("restore.fallback", level=30, step=manifest.step, why=failure)
            older_than = manifest.step
        assert session is not None
        self.last_restore = session.apply()
        self.prepare(state_dict)
        return manifest.step

    def _fetch(
        self,
        job: Membership,
        manifest: Manifest,
        state_dict: dict[Any, Any],
        *,
        strict: bool,
        allow_cast: bool,
        per_rank: Literal["require", "skip"],
    ) -> tuple[Session | None, ForebayError | None]:
        """Bind, then fetch and verify; both end together on all ranks, well or with one error."""
        session: Session | None = None
        marks, failure = b"", None
        try:
            session = Session(
                store=job.store,
                manifest=manifest,
                rank=job.topology.rank,
                world_size=job.topology.world_size,
                node=job.topology.node,
                job_directory=job.directory,
                local=job.local_store,
                strict=strict,
                allow_cast=allow_cast,
                per_rank=per_rank,
                share=len(job.topology.node_ranks) > 1,
            )
            marks = session.bind(state_dict)
        except Exception as error:  # noqa: BLE001 - the others wait in the exchange below
            failure = agree.as_failure(error)
        failure = self._exchange.together(failure)
        if failure is None:
            assert session is not None
            failure = session.read(self._exchange, self._exchange.any_of(marks), agree.BUCKETS)
        if session is not None:
            session.end_sharing()
        return session, failure

    def status(self) -> dict[str, Any]:
        """Snapshots of this rank that are under way or failed, and the state of its agent."""
        return {
            "agent": self._ledger.agent,
            "open": [_shown(line) for line in self._ledger.open_lines()],
            "failed": [_shown(line) for line in self._ledger.failures()],
        }

    def wait(self, tier: Tier = "durable", timeout_s: float = 600.0) -> None:
        """Wait until every snapshot taken so far has ended. Raises as ``Snapshot.wait``."""
        deadline = time.monotonic() + as_timeout("wait", timeout_s)
        for line in self._ledger.open_lines():
            self._ledger.wait(line, tier, max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float = 600.0) -> None:
        """Wait for the drain, then take leave of the agent. Safe to call twice.

        Raises IncompleteError naming the steps that were saved and not committed, DeadlineError
        when some are still under way after ``timeout_s``; the agent goes on with those.
        """
        if self._closed:
            return
        if self._job is not None:
            self._job.require_own()
        deadline = time.monotonic() + as_timeout("close", timeout_s)
        late: list[int] = []
        for line in self._ledger.open_lines():
            try:
                left = max(0.0, deadline - time.monotonic())
                self._ledger.wait(line, "durable", left)
            except DeadlineError:
                late.append(line.step)
            except ForebayError:
                continue  # told below from the ledger, with its reason
        self._leave(clean=not late)
        if late:
            raise DeadlineError(
                f"close: steps {late} not committed after {timeout_s:g} s; "
                f"node agent: {self._ledger.agent}; it goes on with them"
            )
        failed = [
            f"{line.step} ({line.detail})"
            for line in self._ledger.failures()
            if line.phase is not messages.Phase.SKIPPED
        ]
        if failed:
            raise IncompleteError(f"close: not committed: {'; '.join(failed)}")

    def _leave(self, *, clean: bool) -> None:
        self._closed = True
        if self._job is not None:
            self._job.leave(clean=clean)
        if self._stage is not None:
            self._stage.close()

    def _open_job(self) -> Membership:
        if self._closed:
            raise UsageError("checkpointer: it is closed; make a new one")
        if self._job is None:
            topology = self._given_topology or agree.discover_topology()
            attempt = agree.choose_attempt(self._given_attempt, topology, self._exchange)
            failure: ForebayError | None = None
            try:
                self._job = Membership(self.url, self.settings, topology, attempt, self._ledger)
            except Exception as error:  # noqa: BLE001 - the others wait in the exchange below
                failure = agree.as_failure(error)
            failure = self._exchange.together(failure)
            if failure is not None:
                if self._job is not None:
                    self._job.leave(clean=False)
                self._job = None
                raise failure
        assert self._job is not None
        self._job.require_own()
        return self._job

    def _attempt_for(self, job: Membership, step: int) -> str:
        """The attempt, with a count when this start saves the same step again."""
        count = self._saves[step] = self._saves.pop(step, 0) + 1
        if len(self._saves) > _COUNTED_STEPS:
            del self._saves[next(iter(self._saves))]
        return job.attempt if count == 1 else f"{job.attempt}.{count}"

    def _lay_out(self, job: Membership, walked: Walked, tree_bytes: int, *, compare: bool) -> Stage:
        plan = layout.plan_layout(
            walked,
            job.topology,
            run=self.url,
            agreed=self._agreed,
            check_always=self.settings.check_replicas == "always",
            start_digest=digest_of if compare else None,
        )
        if self._stage is not None and self._stage.holds(plan, tree_bytes):
            self._stage = self._stage.relaid(plan)
        else:
            if self._stage is not None:
                self._stage.close()
            self._stage = Stage.make(
                job.directory, job.topology.rank, self.settings, plan, walked, tree_bytes
            )
        return self._stage

    def _free_slot(self, stage: Stage) -> int | None:
        free = stage.arena.free_slot()
        if free is not None or self.settings.on_full == "skip":
            return free
        deadline = time.monotonic() + self.settings.full_timeout_s
        while free is None and time.monotonic() < deadline:
            time.sleep(0.001)
            free = stage.arena.free_slot()
        return free

    def _skip(
        self, job: Membership, step: int, attempt: str, setup_s: float, pause_s: float
    ) -> Snapshot:
        why = (
            f"all {self.settings.slots} slots of rank {job.topology.rank} still drain; "
            f"node agent: {self._ledger.agent}"
        )
        line = self._ledger.open(step, attempt, messages.Phase.SKIPPED, why)
        job.link.skip(step, attempt, why)
        emit("snapshot.skipped", level=30, step=step, why=why)
        return Snapshot(
            step=step,
            attempt=attempt,
            bytes=0,
            pause_s=pause_s,
            setup_s=setup_s,
            skipped=why,
            line=line,
            ledger=self._ledger,
        )

    def _choose(
        self,
        job: Membership,
        step: int | None,
        older_than: int | None,
        timeout_s: float,
        *,
        fallback: bool,
    ) -> Manifest | None:
        """The manifest to restore, chosen by rank 0 and sent to all; None when there is none."""
        alone = not agree.group_is_up()
        if alone and job.topology.world_size > 1 and step is None:
            raise UsageError(
                f"restore: {job.topology.world_size} ranks cannot agree on a step: call "
                "torch.distributed.init_process_group() first, or give step="
            )
        data, failure = b"", None
        if alone or job.topology.rank == 0:
            try:
                if not job.link.settle(timeout_s).settled:
                    emit("restore.not_settled", level=30, waited_s=timeout_s)
                catalog = Catalog(job.store)
                data = _manifest_bytes(catalog, step, older_than, fallback=fallback)
            except Exception as error:  # noqa: BLE001 - the others wait in the exchange below
                failure = agree.as_failure(error)
        failure = self._exchange.together(failure)
        if failure is not None:
            raise failure
        data = self._exchange.from_first(data)
        return read_manifest(data, "manifest") if data else None


def _shown(line: Line) -> dict[str, Any]:
    return {"step": line.step, "phase": line.phase.value, "detail": line.detail}


def _manifest_bytes(
    catalog: Catalog, step: int | None, older_than: int | None, *, fallback: bool
) -> bytes:
    """The manifest of ``step``, or of the newest below ``older_than``; empty when a run has none.

    With ``fallback``, one that is damaged is passed over and told.
    """
    if step is not None:
        return _intact(catalog, step)
    steps = catalog.steps()
    for newest in reversed([s for s in steps if older_than is None or s < older_than]):
        try:
            return _intact(catalog, newest)
        except DamagedError as error:
            if not fallback:
                raise
            emit("restore.fallback", level=30, step=newest, why=error)
    if steps:
        raise NotFoundError(f"{catalog.store.url}: no older committed step is left to try")
    return b""


def _intact(catalog: Catalog, step: int) -> bytes:
    return catalog.manifest_bytes(step)
