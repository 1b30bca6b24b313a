"""Do ranks agree? Trees merged entry by entry, witnesses and copies compared by digest. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from forebay.errors import ConflictError, FormatError, IncompleteError
from forebay.format import tree
from forebay.format.record import Record, Stored
from forebay.format.slices import Box, TensorKey, find_overlap, missing_elements

_SCOPES = ("full", "sample", "start")
_ADVICE = "make them equal, or declare it forebay.per_rank(...)"


def merge_trees(
    records: Sequence[Record], written: Collection[str] | None = None
) -> list[tree.Entry]:
    """One tree of all that ranks hold in common; work for each distinct tree, not for each rank.

    Pipeline stages hold different entries; an entry that several hold must be the same in all, a
    dict's number of children apart. ``written`` names the tensors that have bytes of their own.
    Raises ConflictError naming path and two ranks.
    """
    blobs: dict[str, tuple[int, bytes]] = {}
    for record in records:
        data = {blob.digest: blob.data for blob in record.trees}
        for shard in record.shards:
            held = blobs.get(shard.tree)
            if held is None or shard.rank < held[0]:
                blobs[shard.tree] = (shard.rank, data[shard.tree])
    merged: dict[str, tuple[int, tree.Entry]] = {}
    for rank, blob in sorted(blobs.values()):
        for entry in tree.read_tree(blob, f"tree of rank {rank}"):
            first = merged.setdefault(entry.path, (rank, entry))
            if not _same(first[1], entry):
                tied = None if written is None else _tied(first[1], entry, written)
                if tied is not None:
                    merged[entry.path] = (first[0], tied)
                    continue
                raise ConflictError(
                    f"{entry.path or 'state'}: differs between rank {first[0]} "
                    f"({_show(first[1])}) and rank {rank} ({_show(entry)}): {_ADVICE}"
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


def check_witnesses(records: Sequence[Record], stored: Iterable[Stored]) -> None:
    """Raise ConflictError unless all ranks saw the same bytes of what they hold together."""
    seen: dict[tuple[object, ...], tuple[int, str]] = {}
    for piece in stored:
        if piece.slice.key.rank is None:
            box = piece.slice.box
            place = ("full", piece.slice.key.fqn, box.offsets, box.sizes)
            seen.setdefault(place, (piece.rank, piece.digest.hex()))
    for record in records:
        for witness in record.witnesses:
            if witness.scope not in _SCOPES:
                raise FormatError(f"witness of {witness.name}: unknown scope {witness.scope!r}")
            place = (witness.scope, witness.name, witness.offsets, witness.sizes)
            first = seen.setdefault(place, (witness.rank, witness.digest))
            if first[1] != witness.digest:
                when = " when the attempt began" if witness.scope == "start" else ""
                raise ConflictError(
                    f"{witness.name}: rank {first[0]} and rank {witness.rank} hold different "
                    f"bytes{when}, it is replicated: {_ADVICE}"
                )


def keep_one_copy(stored: Iterable[Stored]) -> list[Stored]:
    """Drop equal copies of a slice, keeping the lowest rank's. ConflictError if they differ."""
    kept: dict[tuple[TensorKey, Box], Stored] = {}
    for piece in sorted(stored, key=lambda s: s.rank):
        first = kept.setdefault((piece.slice.key, piece.slice.box), piece)
        if (first.slice, first.digest) != (piece.slice, piece.digest):
            raise ConflictError(
                f"{piece.slice.key}: rank {first.rank} and rank {piece.rank} stored different "
                f"bytes for the same part of it: {_ADVICE}"
            )
    return list(kept.values())


def check_cover(entries: Iterable[tree.Entry], owner: int | None, stored: Iterable[Stored]) -> None:
    """Raise unless the slices of every tensor entry cover it exactly.

    ConflictError where two overlap or disagree about shape or dtype, IncompleteError for a hole.
    """
    by_fqn: dict[str, list[Stored]] = {}
    for piece in stored:
        by_fqn.setdefault(piece.slice.key.fqn, []).append(piece)
    for entry in entries:
        if not isinstance(entry, tree.Tensor):
            continue
        pieces = by_fqn.get(entry.fqn, [])
        key = TensorKey(entry.fqn, owner)
        for piece in pieces:
            if (piece.slice.dtype, piece.slice.shape) != (entry.dtype, entry.shape):
                raise ConflictError(
                    f"{key}: rank {piece.rank} stored {piece.slice.dtype} "
                    f"{list(piece.slice.shape)}, the state has {entry.dtype} {list(entry.shape)}"
                )
        overlap = find_overlap(piece.slice.box for piece in pieces)
        if overlap is not None:
            ranks = sorted(p.rank for p in pieces if p.slice.box in overlap)
            raise ConflictError(f"{key}: ranks {ranks} stored overlapping parts {overlap}")
        missing = missing_elements(entry.shape, (piece.slice.box for piece in pieces))
        if missing:
            total = missing + sum(piece.slice.box.elements for piece in pieces)
            ranks = sorted({piece.rank for piece in pieces})
            raise IncompleteError(
                f"{key}: {missing} of {total} elements were stored by no rank "
                f"(parts came from ranks {ranks})"
            )
