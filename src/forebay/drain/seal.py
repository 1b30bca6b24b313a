"""A node's record from the parts of its ranks. Pure."""

from __future__ import annotations

import forebay
from forebay.drain.job import Snapshot
from forebay.format import names
from forebay.format.digests import digest
from forebay.format.record import (
    RECORD_VERSION,
    ColumnWriter,
    Record,
    Shard,
    Stored,
    Tree,
    Witness,
)
from forebay.format.slices import Box, Slice, TensorKey


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
