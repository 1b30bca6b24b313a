"""One restore on one rank: bind the target, fetch and verify all bytes, only then fill."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forebay.commit.catalog import Catalog
from forebay.errors import MismatchError
from forebay.format import tree
from forebay.format.manifest import Manifest
from forebay.format.record import Record, table_of
from forebay.format.slices import TensorKey
from forebay.format.stored import Stored
from forebay.restore.buffers import Buffers
from forebay.restore.fetch import Fetched, fetch
from forebay.restore.fill import Binder
from forebay.restore.reads import Want, plan_reads, touched
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

    def fetch(self) -> None:
        """Read and verify every byte the target needs. Raises DamagedError, MismatchError."""
        wants = self._binder.wants
        plan = plan_reads(wants, self._slices(wants))
        self._fetched = fetch(plan, self._sources, allocate=Buffers().take)
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
        """Stored slices that cover the wants: this rank's own, and the index where they do not."""
        needed = {want.key for want in wants if want.box.elements}
        mine: dict[TensorKey, list[Stored]] = {}
        for stored in self._own_slices():
            if stored.slice.key in needed:
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

    def _own_slices(self) -> Iterator[Stored]:
        if self._record is not None:
            table = table_of(self._record)
            yield from table.take(np.flatnonzero(table.rank == self._rank))


def _covered(want: Want, stored: list[Stored]) -> bool:
    met = (want.box.meet(s.slice.box) for s in stored)
    return sum(box.elements for box in met if box is not None) == want.box.elements
