"""One restore on one rank: bind the target, fetch and verify all bytes, only then fill."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from forebay.commit.catalog import Catalog
from forebay.errors import ForebayError, MismatchError
from forebay.format import tree
from forebay.format.manifest import Manifest
from forebay.format.record import Record, table_of
from forebay.format.slices import Box, TensorKey
from forebay.format.stored import Stored
from forebay.restore import replicas
from forebay.restore.buffers import Buffers
from forebay.restore.fetch import Fetched, fetch
from forebay.restore.fill import Binder
from forebay.restore.passing import Peers, pass_on
from forebay.restore.reads import ReadPlan, Want, plan_reads, touched
from forebay.restore.report import RestoreReport
from forebay.restore.source import ArenaSource, Source, StoreSource
from forebay.storage.read_once import ReadOnce
from forebay.storage.store import Store

_SHOWN = 5
_SHARED = "shared-reads"


class Session:
    """Restores one committed step into one target. Used by one thread, once, in order."""

    def __init__(
        self,
        *,
        store: Store,
        manifest: Manifest,
        rank: int,
        world_size: int,
        node: int,
        job_directory: Path,
        local: Store | None,
        strict: bool,
        allow_cast: bool,
        per_rank: Literal["require", "skip"],
        share: bool = False,
    ) -> None:
        """``share`` what is read of records and index with the other ranks of the node."""
        self._began = time.perf_counter()
        self._shared = ReadOnce(store, job_directory / _SHARED) if share else None
        self._catalog = Catalog(self._shared or store)
        self._manifest = manifest
        self._rank = rank
        self._node = node
        self._strict = strict
        self._unused: list[str] = []
        self._sources: list[Source] = [ArenaSource(job_directory)]
        if local is not None:
            self._sources.append(StoreSource("local", local))
        self._sources.append(StoreSource("durable", store))
        self._common = self._catalog.entries(manifest)
        self._record = self._own_record()
        same_world = manifest.world_size == world_size
        own: list[tree.Entry] | None = None
        if per_rank == "require" and same_world:
            own = self._own_entries()
        self._refuse_own = per_rank == "require" and not same_world
        self._binder = Binder(self._common, own, rank=rank, strict=strict, allow_cast=allow_cast)
        self._world_size = world_size
        self._stored: list[Stored] = []
        self._plan: ReadPlan | None = None
        self._division: replicas.Division | None = None
        self._fetched: Fetched | None = None

    def bind(self, state: dict[Any, Any]) -> bytes:
        """Compare target and checkpoint; returns a mark for each common entry: 1 where it is used.

        Raises MismatchError; nothing was read of the tensors, nothing changed.
        """
        self._binder.bind(state)
        if self._refuse_own and self._binder.skipped:
            raise MismatchError(
                f"{', '.join(self._binder.skipped[:_SHOWN])}: declared per rank and saved on "
                f"{self._manifest.world_size} ranks: cannot be restored on another number; "
                "per_rank='skip' leaves them as they are"
            )
        return bytes(entry.path in self._binder.used for entry in self._common)

    def check_unused(self, used: bytes) -> None:
        """Refuse entries that no rank's target has a place for, unless restoring is not strict."""
        self._unused = [e.path for e, mark in zip(self._common, used, strict=True) if not mark]
        self._unused += self._binder.unused_own()
        if self._strict and self._unused:
            more = len(self._unused) - _SHOWN
            listed = ", ".join(self._unused[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
            raise MismatchError(
                f"the checkpoint holds entries the target has no place for: {listed}; "
                "add them, or strict=False leaves them out and reports them"
            )

    def read(self, peers: Peers, used: bytes, count: int) -> ForebayError | None:
        """Read and verify every byte the target needs; the first rank's failure, on each.

        ``used`` marks the entries for which any rank has a place, ``count`` is how many buckets
        ranks agree by. Plans, divides what several ranks want, fetches, passes on: each ends on
        all ranks before the next begins. Collective.
        """
        near = True

        def plan() -> None:
            nonlocal near
            self.check_unused(used)
            near = self.plan()

        failure = peers.attempt(plan)
        # Where all is on its node already, nobody has to read for others.
        if failure is None and peers.are_there() and peers.any_of(bytes([not near])) != b"\0":
            failure = peers.attempt(lambda: self.divide(peers, count))
        return failure or peers.attempt(self.fetch) or peers.attempt(lambda: self.pass_on(peers))

    def plan(self) -> bool:
        """Plan the reads of every byte the target needs; True when all seem to be on this node.

        Raises MismatchError.
        """
        wants = self._binder.wants
        self._stored = list(self._slices(wants))
        self._plan = plan_reads(wants, self._stored)
        keys, near = {batch.key for batch in self._plan.batches}, self._sources[:-1]
        return all(any(source.has(key) for source in near) for key in keys)

    def divide(self, peers: Peers, count: int) -> None:
        """Leave to other ranks what they read too, and take it from them. Collective.

        ``count`` is how many buckets the ranks agree by. Nothing is divided unless all holders of
        each piece want the same.
        """
        wants, holders = self._binder.wants, self._binder.holders
        agreed = peers.agreed_buckets(replicas.marks_for_all(wants, holders, count))
        said = replicas.marks_for_peers(wants, holders, self._rank)
        differs = peers.swap(said) != said
        if peers.any_of(bytes([differs])) != b"\0":
            return
        self._division = replicas.divide(
            wants,
            holders,
            rank=self._rank,
            world_size=self._world_size,
            count=count,
            agreed=agreed,
        )

    def fetch(self) -> None:
        """Read and verify what this rank reads, for itself or for others. Raises DamagedError."""
        if self._plan is None:
            self.plan()
        assert self._plan is not None
        memory, division = Buffers(), self._division
        if division is None:
            self._fetched = fetch(self._plan, self._sources, allocate=memory.take)
            self._binder.check_ties(self._fetched.buffers)
            return
        wants = self._plan.wants
        some = plan_reads([wants[number] for number in division.read], self._stored)
        found = fetch(some, self._sources, allocate=memory.take)
        mine = dict(zip(division.read, found.buffers, strict=True))
        buffers = [
            mine[number] if number in mine else memory.take(want.nbytes)
            for number, want in enumerate(wants)
        ]
        self._fetched = dataclasses.replace(
            found, buffers=buffers, bytes_needed=self._plan.bytes_needed
        )

    def pass_on(self, peers: Peers) -> None:
        """Give and get what was divided, compared by digest. Collective. Raises DamagedError."""
        if self._division is None:
            return
        assert self._fetched is not None
        share = pass_on(self._division, self._fetched.buffers, peers, self._rank)
        if share.bytes:
            self._fetched.by_source["ranks"] = share
        self._binder.check_ties(self._fetched.buffers)

    def end_sharing(self) -> None:
        """All ranks of the node have fetched, or failed: nobody needs what was shared."""
        if self._shared is not None:
            self._shared.clear()

    def apply(self) -> RestoreReport:
        """Fill the target; only now does it change."""
        assert self._fetched is not None
        self._binder.fill(self._fetched.buffers)
        return RestoreReport(
            step=self._manifest.step,
            attempt=self._manifest.attempt,
            seconds=time.perf_counter() - self._began,
            by_source=self._fetched.by_source,
            bad_ranges=self._fetched.bad_ranges,
            bytes_needed=self._fetched.bytes_needed,
            bytes_read=self._fetched.bytes_read,
            missing=tuple(self._binder.missing),
            unused=tuple(self._unused),
            cast=tuple(self._binder.cast),
            skipped=tuple(self._binder.skipped),
        )

    def _own_record(self) -> Record | None:
        """The record with this rank's image, when the saved job had such a rank."""
        if self._rank >= self._manifest.world_size:
            return None
        guesses = [self._node] if self._node < self._manifest.nodes else []
        share = -(-self._manifest.world_size // self._manifest.nodes)
        guesses.append(min(self._rank // share, self._manifest.nodes - 1))
        guesses.append(self._rank % self._manifest.nodes)  # ranks dealt out in turn
        for node in dict.fromkeys((*guesses, *range(self._manifest.nodes))):
            record = self._catalog.record(self._manifest, node)
            if any(shard.rank == self._rank for shard in record.shards):
                return record
        return None

    def _own_entries(self) -> list[tree.Entry]:
        if self._record is None:
            return []
        shard = next(s for s in self._record.shards if s.rank == self._rank)
        return tree.read_tree(shard.own, f"per-rank entries of rank {self._rank}")

    def _slices(self, wants: list[Want]) -> Iterator[Stored]:
        """Stored slices that cover the wants: this node's own, and the index where they do not."""
        mine: dict[TensorKey, list[Stored]] = {}
        for stored in self._own_slices(wants):
            mine.setdefault(stored.slice.key, []).append(stored)
        open_keys = {want.key for want in wants if not _covered(want, mine.get(want.key, []))}
        for key, slices in mine.items():
            if key not in open_keys:
                yield from slices
        if open_keys:
            fqns = sorted({key.fqn for key in open_keys})
            open_wants = [want for want in wants if want.key in open_keys]
            choose = functools.partial(touched, open_wants)
            for table in self._catalog.tables(self._manifest, fqns, choose):
                yield from table

    def _own_slices(self, wants: list[Want]) -> Iterator[Stored]:
        if self._record is not None:
            table = table_of(self._record)
            # Two ranks of the node may have stored the same piece: two copies of a half would count
            # as the whole. The index has one of them.
            seen: set[tuple[TensorKey, Box]] = set()
            for stored in table.take(touched(wants, table)):
                place = (stored.slice.key, stored.slice.box)
                if place not in seen:
                    seen.add(place)
                    yield stored


def _covered(want: Want, stored: list[Stored]) -> bool:
    met = (want.box.meet(s.slice.box) for s in stored)
    return sum(box.elements for box in met if box is not None) == want.box.elements
