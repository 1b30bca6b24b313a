"""Checkpoints made by hand from ``forebay.format`` alone: no trainer, no agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import forebay
from forebay.format import names, tree
from forebay.format.digests import block_digests, digest
from forebay.format.record import (
    RECORD_VERSION,
    ColumnWriter,
    Record,
    Shard,
    Tree,
    Witness,
    write_record,
)
from forebay.format.shard import plan_image
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Stored
from forebay.storage.store import Store

STEP, ATTEMPT, RUN = 7, "first", "/runs/one"


@dataclass(slots=True)
class Rank:
    """What one rank stores: parts of tensors as ``(fqn, whole array, box, owner)``, and entries."""

    parts: list[tuple[str, np.ndarray[Any, Any], Box, int | None]] = field(default_factory=list)
    entries: list[tree.Entry] = field(default_factory=list)
    own: list[tree.Entry] = field(default_factory=list)
    witnesses: list[Witness] = field(default_factory=list)

    def part(
        self,
        fqn: str,
        array: np.ndarray[Any, Any],
        box: Box | None = None,
        owner: int | None = None,
    ) -> Rank:
        """Store a box of an array."""
        self.parts.append((fqn, array, box or Box.whole(array.shape), owner))
        return self


def cut(array: np.ndarray[Any, Any], box: Box) -> bytes:
    """The bytes of a box."""
    where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    return np.ascontiguousarray(array[where]).tobytes()


def entries_of(*tensors: tuple[str, np.ndarray[Any, Any]], **values: object) -> list[tree.Entry]:
    """A flat state dict: tensors and values."""
    found: list[tree.Entry] = [tree.Container("", "dict", len(tensors) + len(values))]
    found += [
        tree.Tensor(name, name, array.dtype.name, array.shape, "cpu", False)
        for name, array in tensors
    ]
    return found + [tree.Value(n, tree.encode_value(v, n)) for n, v in values.items()]


def image_of(rank: int, made: Rank, key: str) -> tuple[bytes, bytes, list[Stored]]:
    """``(header, file, stored slices)`` of one rank."""
    data = {}
    for fqn, array, box, owner in made.parts:
        piece = Slice(TensorKey(fqn, owner), array.dtype.name, array.shape, box)
        data[piece] = cut(array, box)
    image = plan_image(data, {"rank": str(rank)})
    file = bytearray(image.header).ljust(image.total_bytes, b"\0")
    stored = []
    for placed in image.placed:
        body = data[placed.slice]
        file[placed.start : placed.start + placed.nbytes] = body
        blocks = tuple(block_digests(body))
        stored.append(Stored(placed.slice, key, placed.start, digest(body), blocks, rank))
    return image.header, bytes(file), stored


def record_of(
    ranks: dict[int, Rank],
    *,
    store: Store | None = None,
    node: int = 0,
    nodes: int = 1,
    world_size: int | None = None,
    step: int = STEP,
    attempt: str = ATTEMPT,
    run: str = RUN,
) -> Record:
    """The record of a node; its images are put into ``store``."""
    writer = ColumnWriter()
    shards, trees, witnesses = [], {}, []
    for rank, made in ranks.items():
        key = names.shard_key(step, attempt, node, rank)
        header, file, stored = image_of(rank, made, key)
        blob = tree.write_tree(made.entries)
        name = digest(blob).hex()
        trees[name] = Tree(name, blob)
        own = tree.write_tree(made.own)
        if stored:
            if store is not None:
                store.put(key, file)
            sealed = digest(header).hex()
            shards.append(Shard(rank, key, len(file), len(header), sealed, name, own))
        else:
            shards.append(Shard(rank, "", 0, 0, "", name, own))
        for piece in stored:
            writer.add(piece)
        witnesses += made.witnesses
    fqns, dtypes, shapes, columns = writer.tables()
    return Record(
        version=RECORD_VERSION,
        features=[],
        forebay=forebay.__version__,
        run=run,
        step=step,
        attempt=attempt,
        node=node,
        nodes=nodes,
        world_size=len(ranks) if world_size is None else world_size,
        written_s=1.0,
        shards=shards,
        trees=list(trees.values()),
        names=fqns,
        dtypes=dtypes,
        shapes=shapes,
        slices=columns,
        witnesses=witnesses,
    )


def put_record(store: Store, record: Record) -> None:
    """Store a record where it belongs."""
    key = names.record_key(record.step, record.attempt, record.node)
    store.put(key, write_record(record))


def put_nodes(
    store: Store,
    nodes: Sequence[dict[int, Rank]],
    *,
    step: int = STEP,
    attempt: str = ATTEMPT,
) -> list[Record]:
    """Store all nodes of one attempt, images and records."""
    world = sum(map(len, nodes))
    records = [
        record_of(
            ranks,
            store=store,
            node=node,
            nodes=len(nodes),
            world_size=world,
            step=step,
            attempt=attempt,
        )
        for node, ranks in enumerate(nodes)
    ]
    for record in records:
        put_record(store, record)
    return records


W = np.arange(32, dtype=np.float32).reshape(8, 4)
B = np.arange(5, dtype=np.int64)


def two_nodes(**values: object) -> list[dict[int, Rank]]:
    """A good checkpoint: ``w`` is cut in two, ``b`` written by rank 0, one value, own values."""
    values = values or {"step": 7}
    ranks = []
    for rank in (0, 1):
        made = Rank(entries=entries_of(("w", W), ("b", B), **values))
        made.part("w", W, Box((4 * rank, 0), (4, 4)))
        made.own = [tree.Value("seed", tree.encode_value(rank, "seed"))]
        ranks.append(made)
    ranks[0].part("b", B)
    sealed = digest(B.tobytes()).hex()
    ranks[1].witnesses.append(Witness(1, "full", "b", (0,), (5,), sealed))
    return [{0: ranks[0]}, {1: ranks[1]}]
