"""A training job of thousands of ranks without its tensors: who holds what, and nodes' records.

Layouts come from the product's own walk over meta tensors, laid out by ``plan_layout``, and records
from ``build_record``; only that is done once for each kind of node. Nodes of a kind differ in their
place along the data-parallel dimension: their boxes are moved there. Digests are made up, equal
where replicas are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from forebay.capture.layout import Agreed, plan_layout
from forebay.capture.placement import Split, held_boxes, local_shape
from forebay.capture.state import Leaf, Spread, Walked
from forebay.capture.topology import Topology
from forebay.drain.job import Digests, Part, PartState, Snapshot
from forebay.drain.seal import build_record
from forebay.errors import UsageError
from forebay.format import names, tree
from forebay.format.digests import block_count, digest
from forebay.format.record import Record, Shard, Witness
from forebay.format.shard import round_up
from forebay.format.slices import Box, TensorKey
from forebay.format.slot import Layout, Stamp
from forebay.restore.reads import Want
from forebay.testing.llama import STATES, Llama, Weight

RANKS_PER_NODE = 8
_STEP_BYTES = 4

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks numbered as torchtitan does: pipeline stages outermost, tensor parallelism innermost.

    ``dp`` is how many ways FSDP shards. With ``tp`` and ``pp`` 1 it is FSDP alone.
    """

    tp: int
    pp: int
    dp: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Pipeline stage, data-parallel index, tensor-parallel index."""
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def stage(self, number: int) -> range:
        """The ranks of a pipeline stage."""
        each = self.dp * self.tp
        return range(number * each, (number + 1) * each)

    def splits(self, weight: Weight, rank: int) -> tuple[Split, ...]:
        """How a weight is cut on a rank, as FSDP2 after tensor parallelism has it."""
        _, dp, tp = self.place(rank)
        if weight.cut == "none" or self.tp == 1:
            return (Split(0, self.dp, dp),)
        if weight.cut == "rows":
            return Split(0, self.dp, dp), Split(1, self.tp, tp)
        return Split(0, self.dp, dp, self.tp), Split(0, self.tp, tp)


class Cluster:
    """A job that saves one step of a model on a mesh."""

    def __init__(
        self, mesh: Mesh, model: Llama, *, run: str, step: int = 1, attempt: str = "a1"
    ) -> None:
        if mesh.dp * mesh.tp % RANKS_PER_NODE or RANKS_PER_NODE % mesh.tp:
            raise UsageError(f"{mesh}: a node's {RANKS_PER_NODE} ranks are of one pipeline stage")
        self.mesh = mesh
        self.model = model
        self.nodes = -(-mesh.ranks // RANKS_PER_NODE)
        self._run, self._step, self._attempt = run, step, attempt
        self._stages = [model.stage(number, mesh.pp) for number in range(mesh.pp)]
        self._trees = [tree.write_tree(entries_of(weights)) for weights in self._stages]
        self._kinds: dict[tuple[object, ...], Record] = {}

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks of a node."""
        first = node * RANKS_PER_NODE
        return tuple(range(first, min(first + RANKS_PER_NODE, self.mesh.ranks)))

    def topology(self, rank: int) -> Topology:
        """A rank's place in the job."""
        node = rank // RANKS_PER_NODE
        return Topology(
            rank=rank,
            world_size=self.mesh.ranks,
            node=node,
            nodes=self.nodes,
            node_ranks=self.ranks_of(node),
        )

    def walked(self, rank: int) -> Walked:
        """What the walk over a rank's state finds, steps of the optimizer aside."""
        found = Walked()
        mesh, (stage, dp, _) = self.mesh, self.mesh.place(rank)
        for weight in self._stages[stage]:
            splits = mesh.splits(weight, rank)
            holders: tuple[int, ...] = (rank,)
            if weight.cut == "none" and mesh.tp > 1:
                first = mesh.stage(stage).start + dp * mesh.tp
                holders = tuple(range(first, first + mesh.tp))
            spread, shape = Spread(splits, holders), local_shape(weight.shape, splits)
            for prefix, dtype, end in STATES:
                path = f"{prefix}{weight.name}{end}"
                kind = getattr(torch, dtype)
                local = torch.empty(shape, dtype=kind, device="meta")
                key = TensorKey(path)
                leaf = Leaf(path, key, dtype, weight.shape, spread, local, "accelerator")
                found.leaves.append(leaf)
        return found

    def layout(self, rank: int) -> Layout:
        """Where a rank's slices lie in its image, steps of the optimizer aside."""
        walked = self.walked(rank)
        return plan_layout(
            walked,
            self.topology(rank),
            run=self._run,
            agreed=Agreed(frozenset(leaf.sign for leaf in walked.leaves)),
            check_always=False,
            start_digest=None,
        ).layout

    def wants(self, rank: int) -> list[Want]:
        """What a rank of this mesh restores, steps of the optimizer included."""
        stage = self.mesh.place(rank)[0]
        found = [
            Want(leaf.key, leaf.dtype, leaf.shape, box)
            for leaf in self.walked(rank).leaves
            for box, _ in held_boxes(leaf.shape, leaf.spread.splits)
        ]
        steps = (step_of(weight) for weight in self._stages[stage])
        return found + [Want(TensorKey(name), "float32", (), Box((), ())) for name in steps]

    def snapshot(self, node: int) -> Snapshot:
        """All that a node's agent knows of the step once its images are drained."""
        ranks = self.ranks_of(node)
        made = Snapshot(step=self._step, attempt=self._attempt, node_ranks=ranks)
        for rank in ranks:
            layout = self.layout(rank)
            stamp = Stamp(
                step=self._step,
                attempt=self._attempt,
                staged_s=0.0,
                pause_s=0.0,
                durable=True,
                tree=self._trees[self.mesh.place(rank)[0]],
                own=tree.write_tree([]),
            )
            part = Part(layout=layout, stamp=stamp, arena="", slot=0, state=PartState.UPLOADED)
            part.digests = Digests(
                header=digest(b""),
                slices=tuple(seal_of(row.fqn, row.offsets) for row in layout.slices),
                blocks=tuple(
                    (seal_of(row.fqn, row.offsets),) * block_count(row.nbytes)
                    for row in layout.slices
                ),
                witnesses=tuple(seal_of(row.fqn, row.offsets) for row in layout.witnesses),
            )
            made.parts[rank] = part
        return made

    def record(self, node: int) -> Record:
        """The record that the node's agent would write."""
        kind = self._kind(node)
        first = self._kinds.get(kind)
        if first is None:
            first = self._kinds[kind] = build_record(self.snapshot(node), 0.0)
        return self._with_steps(self._moved(first, node), node)

    def records(self) -> Iterator[Record]:
        """All records, in node order."""
        return (self.record(node) for node in range(self.nodes))

    def _kind(self, node: int) -> tuple[object, ...]:
        """Nodes of a kind have the same tensors, cut into as many elements."""
        ranks = self.ranks_of(node)
        stage = self.mesh.place(ranks[0])[0]
        shapes = {(weight.shape, weight.cut): weight for weight in self._stages[stage]}
        return stage, tuple(
            local_shape(weight.shape, self.mesh.splits(weight, rank))
            for rank in ranks
            for weight in shapes.values()
        )

    def _moved(self, first: Record, node: int) -> Record:
        """The record of another node of the kind: its ranks, its place, its digests."""
        by = node * RANKS_PER_NODE - first.node * RANKS_PER_NODE
        stage = self.mesh.place(self.ranks_of(node)[0])[0]
        moves = {
            (rank, f"{prefix}{weight.name}{end}"): self._chunk(weight, rank) * (by // self.mesh.tp)
            for rank in self.ranks_of(first.node)
            for weight in self._stages[stage]
            for prefix, _, end in STATES
        }
        old = first.slices
        offsets, digests, at = list(old.offsets), [], 0
        for rank, name, shape in zip(old.rank, old.name, old.shape, strict=True):
            offsets[at] += moves[rank, first.names[name]]
            dims = len(first.shapes[shape])
            digests.append(seal_of(first.names[name], offsets[at : at + dims]))
            at += dims
        counts = self._block_counts(first)
        blocks = [seal for seal, count in zip(digests, counts, strict=True) for _ in range(count)]
        return msgspec.structs.replace(
            first,
            node=node,
            shards=[self._shard(shard, shard.rank + by, node) for shard in first.shards],
            slices=msgspec.structs.replace(
                old,
                rank=[rank + by for rank in old.rank],
                offsets=offsets,
                digest=b"".join(digests).hex(),
                blocks=b"".join(blocks).hex(),
            ),
            witnesses=[
                Witness(
                    seen.rank + by,
                    seen.scope,
                    seen.name,
                    place := (seen.offsets[0] + moves[seen.rank, seen.name], *seen.offsets[1:]),
                    seen.sizes,
                    seal_of(seen.name, place).hex(),
                )
                for seen in first.witnesses
            ],
        )

    def _chunk(self, weight: Weight, rank: int) -> int:
        """How many rows further the next data-parallel index begins."""
        rows = weight.shape[0]
        if weight.cut == "columns":
            (rows,) = local_shape((rows,), [Split(0, self.mesh.tp, self.mesh.place(rank)[2])])
        return -(-rows // self.mesh.dp)

    @staticmethod
    def _block_counts(record: Record) -> list[int]:
        sizes, counts, at = record.slices.sizes, [], 0
        for dtype, shape in zip(record.slices.dtype, record.slices.shape, strict=True):
            elements = 1
            for n in sizes[at : at + len(record.shapes[shape])]:
                elements *= n
            at += len(record.shapes[shape])
            counts.append(block_count(elements * getattr(torch, record.dtypes[dtype]).itemsize))
        return counts

    def _shard(self, shard: Shard, rank: int, node: int) -> Shard:
        key = names.shard_key(self._step, self._attempt, node, rank) if shard.key else ""
        return msgspec.structs.replace(shard, rank=rank, key=key)

    def _with_steps(self, record: Record, node: int) -> Record:
        """With the optimizer's steps: plain numbers that one rank of the stage writes."""
        ranks = self.ranks_of(node)
        stage = self.mesh.place(ranks[0])[0]
        everyone = self.mesh.stage(stage)
        columns = msgspec.to_builtins(record.slices)
        tables = (list(record.names), list(record.dtypes), list(record.shapes))
        shards = {shard.rank: shard for shard in record.shards}
        witnesses = list(record.witnesses)
        for weight in self._stages[stage]:
            name = step_of(weight)
            writer = everyone[_pick(name, len(everyone))]
            seal = seal_of(name, ()).hex()
            if writer in ranks:
                shard = shards[writer]
                start = round_up(max(shard.nbytes, shard.header_bytes), 64)
                row = (_number(tables[0], name), _number(tables[1], "float32"))
                added = (writer, *row, _number(tables[2], ()), 0, start)
                keys = ("rank", "name", "dtype", "shape", "per_rank", "start")
                for key, value in zip(keys, added, strict=True):
                    columns[key].append(value)
                columns["digest"] += seal
                shards[writer] = msgspec.structs.replace(
                    shard,
                    key=names.shard_key(self._step, self._attempt, node, writer),
                    nbytes=start + _STEP_BYTES,
                )
            witnesses += [Witness(r, "full", name, (), (), seal) for r in ranks if r != writer]
        return msgspec.structs.replace(
            record,
            shards=list(shards.values()),
            names=tables[0],
            dtypes=tables[1],
            shapes=tables[2],
            slices=type(record.slices)(**columns),
            witnesses=witnesses,
        )


def step_of(weight: Weight) -> str:
    """Where the optimizer counts the steps of a weight."""
    return f"optimizer/state/{weight.name}/step"


def seal_of(fqn: str, offsets: Sequence[int]) -> bytes:
    """A made-up digest: the same wherever the same part of a tensor is held."""
    return digest(f"{fqn} {tuple(offsets)}".encode())


def entries_of(weights: Sequence[Weight]) -> list[tree.Entry]:
    """The state's entries on the ranks of one pipeline stage."""
    found: list[tree.Entry] = [
        tree.Container("", "dict", 2),
        tree.Container("model", "odict", len(weights)),
        tree.Container("optimizer", "dict", 2),
        tree.Container("optimizer/master", "dict", len(weights)),
        tree.Container("optimizer/state", "dict", len(weights)),
    ]
    for weight in weights:
        found.append(tree.Container(f"optimizer/state/{weight.name}", "dict", 3))
        for prefix, dtype, end in STATES:
            path = f"{prefix}{weight.name}{end}"
            found.append(tree.Tensor(path, path, dtype, weight.shape, "accelerator", True))
        name = step_of(weight)
        found.append(tree.Tensor(name, name, "float32", (), "accelerator", False))
    return found


def _pick(name: str, count: int) -> int:
    """Whose turn a small replica is, as ``placement.written_part`` has it."""
    word = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(word, "big") % count


def _number(known: list[_T], value: _T) -> int:
    if value not in known:
        known.append(value)
    return known.index(value)
