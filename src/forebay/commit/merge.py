"""Do ranks agree? Trees merged entry by entry, witnesses compared by digest. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from forebay.commit.cover import ADVICE, find_rows
from forebay.errors import ConflictError, FormatError
from forebay.format import tree
from forebay.format.record import Record
from forebay.format.slices import Box, TensorKey
from forebay.format.stored import Table

_Place = tuple[str, str, tuple[int, ...], tuple[int, ...]]
_SCOPES = ("full", "sample", "start")


class Trees:
    """The distinct trees of all ranks, with the lowest rank that holds each."""

    def __init__(self) -> None:
        self._blobs: dict[str, tuple[int, bytes]] = {}

    def add(self, record: Record) -> None:
        """Take the trees of a node."""
        data = {blob.digest: blob.data for blob in record.trees}
        for shard in record.shards:
            held = self._blobs.get(shard.tree)
            if held is None or shard.rank < held[0]:
                self._blobs[shard.tree] = (shard.rank, data[shard.tree])

    def merged(self, written: Collection[str] | None = None) -> list[tree.Entry]:
        """One tree of all that ranks hold in common; work for each distinct tree, not each rank.

        Pipeline stages hold different entries; an entry that several hold must be the same in all,
        a dict's number of children apart. ``written`` names the tensors that have bytes of their
        own. Raises ConflictError naming path and two ranks.
        """
        return _merged(sorted(self._blobs.values()), written)


def _merged(
    blobs: Iterable[tuple[int, bytes]], written: Collection[str] | None
) -> list[tree.Entry]:
    merged: dict[str, tuple[int, tree.Entry]] = {}
    for rank, blob in blobs:
        for entry in tree.read_tree(blob, f"tree of rank {rank}"):
            first = merged.setdefault(entry.path, (rank, entry))
            if not _same(first[1], entry):
                tied = None if written is None else _tied(first[1], entry, written)
                if tied is not None:
                    merged[entry.path] = (first[0], tied)
                    continue
                raise ConflictError(
                    f"{entry.path or 'state'}: differs between rank {first[0]} "
                    f"({_show(first[1])}) and rank {rank} ({_show(entry)}): {ADVICE}"
                )
    return _counted([entry for _, entry in merged.values()])


def _same(one: tree.Entry, other: tree.Entry) -> bool:
    if isinstance(one, tree.Container) and isinstance(other, tree.Container):
        return one.kind == other.kind and (
            one.length == other.length or one.kind in ("dict", "odict")
        )
    return one == other


def _tied(one: tree.Entry, other: tree.Entry, written: Collection[str]) -> tree.Entry | None:
    """Which of two entries knows that a tensor is tied, where they differ in nothing else.

    A rank whose shard is empty has no memory by which to see it. None where the path has bytes of
    its own: then a rank that has some holds it untied.
    """
    if not (isinstance(one, tree.Tensor) and isinstance(other, tree.Tensor)):
        return None
    if one.path in written or msgspec.structs.replace(one, fqn=other.fqn) != other:
        return None
    if one.path not in (one.fqn, other.fqn):
        return None
    return other if one.fqn == one.path else one


def _counted(entries: list[tree.Entry]) -> list[tree.Entry]:
    """Containers with the number of children they have in the union."""
    counts: dict[str, int] = {}
    for entry in entries:
        if entry.path:
            parent = entry.path.rpartition("/")[0]
            counts[parent] = counts.get(parent, 0) + 1
    return [
        tree.Container(entry.path, entry.kind, counts.get(entry.path, 0))
        if isinstance(entry, tree.Container)
        else entry
        for entry in entries
    ]


def _show(entry: tree.Entry) -> str:
    if isinstance(entry, tree.Value):
        text = repr(tree.decode_value(entry.data, entry.path))
        return text if len(text) <= 60 else text[:57] + "..."
    if isinstance(entry, tree.Tensor):
        return f"tensor {entry.dtype} {list(entry.shape)}"
    return f"{entry.kind} of {entry.length}"


class Witnesses:
    """What ranks saw of that which they hold together: equal places must have equal digests."""

    def __init__(self) -> None:
        self._seen: dict[_Place, tuple[int, str]] = {}

    def add(self, record: Record) -> None:
        """Compare what a node's ranks saw with what others did. Raises ConflictError."""
        for witness in record.witnesses:
            if witness.scope not in _SCOPES:
                raise FormatError(f"witness of {witness.name}: unknown scope {witness.scope!r}")
            place = (witness.scope, witness.name, witness.offsets, witness.sizes)
            first = self._seen.setdefault(place, (witness.rank, witness.digest))
            if first[1] != witness.digest:
                raise _disagreement(place, first[0], witness.rank)

    def check(self, table: Table) -> None:
        """Compare with what was stored of some tensors. Raises ConflictError."""
        there = {key.fqn for key in table.tensors if key.rank is None}
        full = [place for place in self._seen if place[0] == "full" and place[1] in there]
        keys = [TensorKey(place[1]) for place in full]
        boxes = [Box(place[2], place[3]) for place in full]
        for place, row in zip(full, find_rows(table, keys, boxes), strict=True):
            rank, seen = self._seen[place]
            if row is not None and table.digest[row].tobytes().hex() != seen:
                raise _disagreement(place, int(table.rank[row]), rank)


def _disagreement(place: _Place, one: int, other: int) -> ConflictError:
    when = " when the attempt began" if place[0] == "start" else ""
    return ConflictError(
        f"{place[1]}: rank {one} and rank {other} hold different bytes{when}, it is replicated: "
        f"{ADVICE}"
    )
