"""Wait for the records of all nodes and check that they make one checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.commit import merge
from forebay.errors import (
    ConflictError,
    DamagedError,
    DeadlineError,
    IncompleteError,
    NotFoundError,
)
from forebay.format import names, tree
from forebay.format.digests import digest
from forebay.format.manifest import Ref
from forebay.format.packed import pack, unpack
from forebay.format.record import MAX_RECORD_BYTES, Record, Stored, read_record, stored_slices
from forebay.storage.reread import read_checked
from forebay.storage.store import Store

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A node's record as stored: how the manifest will name it, and what it says."""

    ref: Ref
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A complete set: the records in node order, the merged entries, one copy of each slice."""

    gathered: tuple[Gathered, ...]
    entries: tuple[tree.Entry, ...]
    stored: tuple[Stored, ...]

    @property
    def first(self) -> Record:
        """Node 0's record; step, attempt and sizes are the same in all."""
        return self.gathered[0].record


def read_one(store: Store, step: int, attempt: str, node: int) -> Gathered | None:
    """A node's record, or None while it is not there."""
    key = names.record_key(step, attempt, node)

    def gathered(data: bytes) -> Gathered:
        where = f"{store.url}/{key}"
        record = read_record(data, where)
        # The manifest vouches for these very bytes, and some bits of a frame mean nothing. Bytes
        # that this version would have written are right; others have to be read twice alike.
        ours = pack(unpack(data, MAX_RECORD_BYTES, where)) == data
        if not ours and store.get(key, max_bytes=MAX_RECORD_BYTES) != data:
            raise DamagedError(f"{where}: two reads of it differ")
        return Gathered(ref=Ref(key, len(data), digest(data).hex()), record=record)

    try:
        found = read_checked(store, key, MAX_RECORD_BYTES, gathered)
    except NotFoundError:
        return None
    record = found.record
    if (record.step, record.attempt, record.node) != (step, attempt, node):
        raise ConflictError(f"{store.url}/{key}: belongs to another step, attempt or node")
    return found


def wait_for_records(
    store: Store,
    step: int,
    attempt: str,
    *,
    nodes: int,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Gathered]:
    """The records of nodes 0 to ``nodes``, read as they arrive.

    Raises DeadlineError naming the nodes that are missing after ``timeout_s``.
    """
    deadline = clock() + timeout_s
    found: dict[int, Gathered] = {}
    wait_s = _FIRST_WAIT_S
    while True:
        for node in range(nodes):
            if node not in found:
                one = read_one(store, step, attempt, node)
                if one is not None:
                    found[node] = one
                    wait_s = _FIRST_WAIT_S
        if len(found) == nodes:
            return [found[node] for node in range(nodes)]
        if clock() >= deadline:
            missing = [node for node in range(nodes) if node not in found]
            raise DeadlineError(
                f"step {step}, attempt {attempt}: no record of nodes {_some(missing)} after "
                f"{timeout_s:g} s: their agents failed or still drain"
            )
        sleep(min(wait_s, max(0.0, deadline - clock())))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def check_records(store: Store, gathered: Sequence[Gathered]) -> Checked:
    """Check that the records make one whole checkpoint and that every shard is there.

    Raises IncompleteError for what is missing, ConflictError for what disagrees.
    """
    records = [one.record for one in gathered]
    first = records[0]
    for record in records[1:]:
        for what in ("run", "step", "attempt", "world_size", "nodes"):
            if getattr(record, what) != getattr(first, what):
                raise ConflictError(
                    f"step {first.step}: node {record.node} has {what} "
                    f"{getattr(record, what)!r}, node {first.node} has {getattr(first, what)!r}"
                )
    if [record.node for record in records] != list(range(first.nodes)):
        raise IncompleteError(
            f"step {first.step}: records of nodes {_some([r.node for r in records])}, expected all "
            f"of {first.nodes}"
        )
    _check_ranks(first, records)
    _check_shards(store, records)
    stored = [piece for record in records for piece in stored_slices(record)]
    written = {piece.slice.key.fqn for piece in stored if piece.slice.key.rank is None}
    common = merge.merge_trees(records, written)
    merge.check_witnesses(records, stored)
    kept = merge.keep_one_copy(stored)
    merge.check_cover(common, None, (s for s in kept if s.slice.key.rank is None))
    own: dict[int, list[Stored]] = {}
    for piece in kept:
        if piece.slice.key.rank is not None:
            own.setdefault(piece.slice.key.rank, []).append(piece)
    for record in records:
        for shard in record.shards:
            entries = tree.read_tree(shard.own, f"per-rank entries of rank {shard.rank}")
            merge.check_cover(entries, shard.rank, own.get(shard.rank, ()))
    return Checked(gathered=tuple(gathered), entries=tuple(common), stored=tuple(kept))


def _check_ranks(first: Record, records: Sequence[Record]) -> None:
    ranks = sorted(shard.rank for record in records for shard in record.shards)
    if ranks != list(range(first.world_size)):
        missing = sorted(set(range(first.world_size)) - set(ranks))
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if not missing else []
        raise IncompleteError(
            f"step {first.step}: world size {first.world_size}, "
            + (f"no shard of ranks {_some(missing)}" if missing else f"ranks {_some(twice)} twice")
        )


def _check_shards(store: Store, records: Sequence[Record]) -> None:
    for record in records:
        for shard in record.shards:
            if not shard.key:
                continue
            info = store.head(shard.key)
            if info is None or info.size != shard.nbytes:
                found = "is missing" if info is None else f"has {info.size} bytes"
                raise IncompleteError(
                    f"step {record.step}: shard {shard.key} of rank {shard.rank} {found}, "
                    f"its record says {shard.nbytes}"
                )


def _some(numbers: Sequence[int], most: int = 8) -> str:
    listed = ", ".join(map(str, numbers[:most]))
    return f"{listed} and {len(numbers) - most} more" if len(numbers) > most else listed
