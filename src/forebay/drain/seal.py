"""A node's record: built from the parts of its ranks, written once."""

from __future__ import annotations

import msgspec

import forebay
from forebay.drain.job import Snapshot
from forebay.errors import ConflictError
from forebay.format import names
from forebay.format.digests import digest
from forebay.format.record import (
    MAX_RECORD_BYTES,
    RECORD_VERSION,
    ColumnWriter,
    Record,
    Shard,
    Tree,
    Witness,
    read_record,
    write_record,
)
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Stored
from forebay.storage.reread import read_checked
from forebay.storage.store import Store


def build_record(snapshot: Snapshot, now_s: float) -> Record:
    """The record of a snapshot all of whose parts are drained."""
    columns = ColumnWriter()
    shards: list[Shard] = []
    trees: dict[str, bytes] = {}
    witnesses: list[Witness] = []
    for rank in sorted(snapshot.parts):
        part = snapshot.parts[rank]
        layout, digests = part.layout, part.digests
        assert digests is not None
        stored = bool(layout.slices)
        key = names.shard_key(snapshot.step, snapshot.attempt, layout.node, rank)
        tree = digest(part.stamp.tree).hex()
        trees[tree] = part.stamp.tree
        shards.append(
            Shard(
                rank=rank,
                key=key if stored else "",
                nbytes=layout.image_bytes if stored else 0,
                header_bytes=layout.header_bytes if stored else 0,
                header_digest=digests.header.hex() if stored else "",
                tree=tree,
                own=part.stamp.own,
            )
        )
        for row, one, blocks in zip(layout.slices, digests.slices, digests.blocks, strict=True):
            box = Box(row.offsets, row.sizes)
            piece = Slice(TensorKey(row.fqn, row.owner), row.dtype, row.shape, box)
            columns.add(Stored(piece, key, row.start, one, blocks, rank))
        for seen, one in zip(layout.witnesses, digests.witnesses, strict=True):
            witnesses.append(
                Witness(rank, seen.scope, seen.fqn, seen.offsets, seen.sizes, one.hex())
            )
        witnesses.extend(
            Witness(rank, "start", begun.fqn, begun.offsets, begun.sizes, begun.digest)
            for begun in layout.start_digests
        )
    tables = columns.tables()
    first = next(iter(snapshot.parts.values())).layout
    return Record(
        version=RECORD_VERSION,
        features=[],
        forebay=forebay.__version__,
        run=first.run,
        step=snapshot.step,
        attempt=snapshot.attempt,
        node=first.node,
        nodes=first.nodes,
        world_size=first.world_size,
        written_s=now_s,
        shards=shards,
        trees=[Tree(name, data) for name, data in trees.items()],
        names=tables[0],
        dtypes=tables[1],
        shapes=tables[2],
        slices=tables[3],
        witnesses=witnesses,
    )


def put_record(store: Store, record: Record) -> None:
    """Write a node's record; durable on return. One that says the same is there already is fine.

    That happens when an agent died between the write and its note of it. Raises ConflictError when
    it says something else.
    """
    key = names.record_key(record.step, record.attempt, record.node)
    try:
        store.put(key, write_record(record))
    except ConflictError:
        where = f"{store.url}/{key}"
        there = read_checked(store, key, MAX_RECORD_BYTES, lambda data: read_record(data, where))
        if _content(there) != _content(record):
            raise


def _content(record: Record) -> Record:
    """A record without when and by which version it was written."""
    return msgspec.structs.replace(record, written_s=0.0, forebay="")
