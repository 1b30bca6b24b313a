"""Take the records of all nodes as they arrive, and check that they make one checkpoint."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from forebay.commit import merge
from forebay.commit.cover import check_cover, keep_one_copy
from forebay.commit.spool import Spool
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
from forebay.format.record import MAX_RECORD_BYTES, NO_COLUMNS, Record, read_slices
from forebay.format.stored import Table
from forebay.storage.reread import read_checked
from forebay.storage.store import Store

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 2.0
_LISTED_ABOVE = 16  # records that are missing: fewer are asked for one by one
_READERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A node's record as stored: how the manifest will name it, what it says, its slices."""

    ref: Ref
    record: Record
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A complete set of records: what the manifest says of it, merged entries, one of each slice.

    ``refs`` are the records in node order; ``data_bytes`` is the size of all shards; ``stored``
    are the slices, of which all may be too many to hold.
    """

    run: str
    step: int
    attempt: str
    world_size: int
    nodes: int
    refs: tuple[Ref, ...]
    data_bytes: int
    entries: tuple[tree.Entry, ...]
    stored: Spool


def read_one(store: Store, step: int, attempt: str, node: int) -> Gathered | None:
    """A node's record, or None while it is not there."""
    key = names.record_key(step, attempt, node)

    def gathered(data: bytes) -> Gathered:
        where = f"{store.url}/{key}"
        record, table = read_slices(data, where)
        # The manifest vouches for these very bytes, and some bits of a frame mean nothing. Bytes
        # that this version would have written are right; others have to be read twice alike.
        ours = pack(unpack(data, MAX_RECORD_BYTES, where)) == data
        if not ours and store.get(key, max_bytes=MAX_RECORD_BYTES) != data:
            raise DamagedError(f"{where}: two reads of it differ")
        return Gathered(ref=Ref(key, len(data), digest(data).hex()), record=record, table=table)

    try:
        found = read_checked(store, key, MAX_RECORD_BYTES, gathered)
    except NotFoundError:
        return None
    record = found.record
    if (record.step, record.attempt, record.node) != (step, attempt, node):
        raise ConflictError(f"{store.url}/{key}: belongs to another step, attempt or node")
    return found


class Gathering:
    """The records of one attempt, taken as they arrive, in any order.

    Each is compared with those before it and folded into columns; nothing else of it is kept, so
    that little is left to do, and to hold, when the last one comes.
    """

    def __init__(self, store: Store, step: int, attempt: str, nodes: int) -> None:
        self._store = store
        self._step, self._attempt, self._nodes = step, attempt, nodes
        self._refs: dict[int, Ref] = {}
        self._first: Record | None = None
        self._ranks: list[int] = []
        self._own: list[tuple[tree.Tensor, int | None]] = []
        self._trees = merge.Trees()
        self._witnesses = merge.Witnesses()
        self._slices = Spool(keep_one_copy)
        self._data_bytes = 0

    @property
    def missing(self) -> list[int]:
        """Nodes whose record has not been taken."""
        return [node for node in range(self._nodes) if node not in self._refs]

    def take(self, one: Gathered, sizes: Mapping[str, int] | None = None) -> None:
        """Take a record. ``sizes`` of objects that a listing has just shown need not be asked for.

        Raises IncompleteError when a shard of it is not there, ConflictError when it disagrees
        with those taken before.
        """
        record = one.record
        first = self._first or record
        for what in ("run", "step", "attempt", "world_size", "nodes"):
            if getattr(record, what) != getattr(first, what):
                raise ConflictError(
                    f"step {self._step}: node {record.node} has {what} "
                    f"{getattr(record, what)!r}, node {first.node} has {getattr(first, what)!r}"
                )
        if first.nodes != self._nodes:
            raise ConflictError(
                f"step {self._step}: node {record.node} is of {first.nodes}, expected {self._nodes}"
            )
        self._check_shards(record, sizes or {})
        self._trees.add(record)
        self._witnesses.add(record)
        for shard in record.shards:
            entries = tree.read_tree(shard.own, f"per-rank entries of rank {shard.rank}")
            own = (entry for entry in entries if isinstance(entry, tree.Tensor))
            self._own += [(entry, shard.rank) for entry in own]
            self._ranks.append(shard.rank)
            self._data_bytes += shard.nbytes
        self._slices.add(one.table)
        if self._first is None:
            self._first = msgspec.structs.replace(
                record, shards=[], trees=[], names=[], slices=NO_COLUMNS, witnesses=[]
            )
        self._refs[record.node] = one.ref

    def check(self) -> Checked:
        """Check that the records make one whole checkpoint; there is nothing to take any more.

        Raises IncompleteError for what is missing, ConflictError for what disagrees.
        """
        first = self._first
        if first is None or self.missing:
            raise IncompleteError(
                f"step {self._step}: records of nodes {_some(sorted(self._refs))}, expected all of "
                f"{self._nodes}"
            )
        self._check_ranks(first.world_size)
        entries = self._trees.merged(self._slices.common)
        tensors = [(entry, None) for entry in entries if isinstance(entry, tree.Tensor)]
        self._check_slices([*tensors, *self._own])
        return Checked(
            run=first.run,
            step=first.step,
            attempt=first.attempt,
            world_size=first.world_size,
            nodes=first.nodes,
            refs=tuple(self._refs[node] for node in range(self._nodes)),
            data_bytes=self._data_bytes,
            entries=tuple(entries),
            stored=self._slices,
        )

    def _check_slices(self, tensors: Iterable[tuple[tree.Tensor, int | None]]) -> None:
        wanted: dict[str, list[tuple[tree.Tensor, int | None]]] = {}
        for entry, owner in tensors:
            wanted.setdefault(entry.fqn, []).append((entry, owner))
        for part in self._slices.parts():
            fqns = dict.fromkeys(key.fqn for key in part.tensors)
            self._witnesses.check(part)
            check_cover([one for fqn in fqns for one in wanted.pop(fqn, ())], part)
        check_cover([one for rest in wanted.values() for one in rest], Table.of(()))

    def _check_ranks(self, world_size: int) -> None:
        ranks = sorted(self._ranks)
        if ranks != list(range(world_size)):
            missing = sorted(set(range(world_size)) - set(ranks))
            twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
            raise IncompleteError(
                f"step {self._step}: world size {world_size}, "
                + (
                    f"no shard of ranks {_some(missing)}"
                    if missing
                    else f"ranks {_some(twice)} twice"
                )
            )

    def _check_shards(self, record: Record, sizes: Mapping[str, int]) -> None:
        for shard in record.shards:
            if not shard.key:
                continue
            size = sizes.get(shard.key)
            if size is None:
                info = self._store.head(shard.key)
                size = None if info is None else info.size
            if size != shard.nbytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise IncompleteError(
                    f"step {record.step}: shard {shard.key} of rank {shard.rank} {found}, "
                    f"its record says {shard.nbytes}"
                )


def gather(
    store: Store,
    step: int,
    attempt: str,
    *,
    nodes: int,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Checked:
    """Take the records of nodes 0 to ``nodes`` as they arrive, and check them.

    Raises DeadlineError naming the nodes that are missing after ``timeout_s``, else as
    ``Gathering`` does.
    """
    deadline = clock() + timeout_s
    gathering = Gathering(store, step, attempt, nodes)
    wait_s = _FIRST_WAIT_S
    while True:
        missing = gathering.missing
        sizes = _listed(store, step, attempt) if len(missing) > _LISTED_ABOVE else None
        for one in _arrived(store, step, attempt, missing, sizes):
            gathering.take(one, sizes)
            wait_s = _FIRST_WAIT_S
        missing = gathering.missing
        if not missing:
            return gathering.check()
        if clock() >= deadline:
            raise DeadlineError(
                f"step {step}, attempt {attempt}: no record of nodes {_some(missing)} after "
                f"{timeout_s:g} s: their agents failed or still drain"
            )
        sleep(min(wait_s, max(0.0, deadline - clock())))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _arrived(
    store: Store, step: int, attempt: str, nodes: Sequence[int], sizes: Mapping[str, int] | None
) -> Iterator[Gathered]:
    """The records of these nodes that are there; of very many, some at a time side by side."""
    read = functools.partial(read_one, store, step, attempt)
    if sizes is None:
        yield from (one for node in nodes if (one := read(node)) is not None)
        return
    there = [node for node in nodes if names.record_key(step, attempt, node) in sizes]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="records") as pool:
        for at in range(0, len(there), 4 * _READERS):
            some = pool.map(read, there[at : at + 4 * _READERS])
            yield from (one for one in some if one is not None)


def _listed(store: Store, step: int, attempt: str) -> dict[str, int]:
    """Sizes of all objects of the attempt, by key: one request where it would be a thousand."""
    return {info.key: info.size for info in store.list(names.attempt_prefix(step, attempt))}


def _some(numbers: Sequence[int], most: int = 8) -> str:
    listed = ", ".join(map(str, numbers[:most]))
    return f"{listed} and {len(numbers) - most} more" if len(numbers) > most else listed
