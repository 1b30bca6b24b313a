"""Which bytes of a walked state this rank stages, and where in its slot. Pure arithmetic.

A tensor that other ranks hold too is divided among its holders, if all of them agreed that they
hold it; otherwise each writes it whole and the commit drops equal copies. What a rank holds but
does not write is witnessed: small ones in full, large ones by a sample that moves with the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.capture.placement import SMALL_BYTES, held_boxes, written_part
from forebay.capture.topology import Topology
from forebay.errors import StateError
from forebay.format.dtypes import element_type
from forebay.format.paths import component, parent_of
from forebay.format.shard import Image, plan_image, round_up
from forebay.format.slices import Box, Slice
from forebay.format.slot import Layout, SliceRow, StartDigest, WitnessRow

if TYPE_CHECKING:
    from forebay.capture.state import Leaf, Walked

SAMPLE_BYTES = 4096
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """A copy to make: box ``local`` of a leaf's tensor (None: all of it) to ``start`` in the slot.

    ``stride`` above 0 makes it a sample: every stride-th element of the flat tensor, ``nbytes`` in
    all, beginning at an element that depends on the step.
    """

    leaf: int
    local: Box | None
    sizes: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int
    stride: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a save does, known before it: header, copies, and the fixed part of the ticket.

    ``reserve_bytes`` is what the slot should have room for beyond ``slot_bytes``: two moments for
    each parameter whose optimizer has no state yet, so that they find touched memory.
    """

    image: Image
    parts: tuple[Part, ...]
    layout: Layout
    slot_bytes: int
    reserve_bytes: int
    sign: tuple[object, ...]

    @property
    def staged_bytes(self) -> int:
        """Bytes that each save copies."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that hold equal copies: how many, and which of them this rank is."""

    ranks: tuple[int, ...] | None
    count: int
    index: int


def group_of(leaf: Leaf, walked: Walked, topology: Topology) -> Group:
    """Who holds what ``leaf`` holds. A plain tensor is held by the ranks of its entry's mesh."""
    holders = leaf.spread.holders
    if leaf.key.rank is not None:
        return Group((topology.rank,), 1, 0)
    if holders is None:
        holders = walked.meshes.get(component(leaf.path))
    if holders is None:
        return Group(None, topology.world_size, topology.rank)
    if topology.rank not in holders:
        raise StateError(
            f"{leaf.path}: rank {topology.rank} is not among its holders {holders[:8]}"
        )
    return Group(holders, len(holders), holders.index(topology.rank))


def agreement_marks(walked: Walked, topology: Topology, buckets: int) -> dict[int, int]:
    """Per bucket, a number that is equal on all ranks whose replicas under it are the same set.

    A bucket stands for a group of holders. Ranks take the minimum and the maximum over all of
    them: where the two are equal, the group agrees. Two groups in one bucket only cost agreement.
    """
    marks: dict[int, int] = {}
    for leaf in walked.leaves:
        group = group_of(leaf, walked, topology)
        if group.count > 1:
            bucket = bucket_of(group, buckets)
            text = repr((leaf.key.fqn, leaf.dtype, leaf.shape)).encode()
            mark = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
            marks[bucket] = marks.get(bucket, 0) ^ mark
    return marks


def bucket_of(group: Group, buckets: int) -> int:
    """The bucket of a group of holders."""
    text = repr(group.ranks).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % buckets


@dataclass(frozen=True, slots=True)
class Agreed:
    """Replicas that all their holders agreed to hold, by sign, and parameters of which they know.

    An optimizer makes its state at its first step, after the agreement; it is divided like the
    parameter's own group, because the same parameter has the same state wherever it is.
    """

    signs: frozenset[tuple[object, ...]] = frozenset()
    parameters: frozenset[str] = frozenset()

    def covers(self, leaf: Leaf, walked: Walked) -> bool:
        """True when every holder of this leaf knows that the others hold it."""
        if leaf.sign in self.signs:
            return True
        return walked.slots_of.get(parent_of(leaf.path)) in self.parameters


def agree_on(walked: Walked, topology: Topology, buckets: int, agreed: Collection[int]) -> Agreed:
    """What the agreed buckets mean for the leaves of this rank."""
    signs: set[tuple[object, ...]] = set()
    parameters: set[str] = set()
    for leaf in walked.leaves:
        group = group_of(leaf, walked, topology)
        if group.count == 1 or bucket_of(group, buckets) in agreed:
            parameters.add(leaf.path)
            if group.count > 1:
                signs.add(leaf.sign)
    return Agreed(frozenset(signs), frozenset(parameters) if agreed else frozenset())


def plan_layout(
    walked: Walked,
    topology: Topology,
    *,
    run: str,
    agreed: Agreed,
    check_always: bool,
    start_digest: Callable[[Leaf], str] | None,
) -> Plan:
    """Lay out the slot. ``start_digest`` gives the digest of a leaf's local bytes, or is None."""
    slices: list[Slice] = []
    sources: dict[Slice, tuple[int, Box]] = {}
    witnessed: list[tuple[int, str, Box, Box]] = []
    digests: list[StartDigest] = []
    for number, leaf in enumerate(walked.leaves):
        item_bytes = element_type(leaf.dtype).item_bytes
        group = group_of(leaf, walked, topology)
        together = group.count > 1 and agreed.covers(leaf, walked)
        held = held_boxes(leaf.shape, leaf.spread.splits)
        for box, local in held:
            first = box == held[0][0]  # stands for all boxes of the leaf where one name is enough
            mine = [box]
            if together:
                mine = written_part(leaf.key.fqn, box, item_bytes, group.count, group.index)
                nbytes = box.elements * item_bytes
                small = nbytes <= SMALL_BYTES or check_always
                if not small and start_digest is not None and first:
                    digests.append(
                        StartDigest(leaf.key.fqn, box.offsets, box.sizes, start_digest(leaf))
                    )
                if mine != [box] and small:
                    witnessed.append((number, "full", box, local))
                elif not small and first:
                    witnessed.append((number, "sample", box, local))
            for part in mine:
                piece = Slice(leaf.key, leaf.dtype, leaf.shape, part)
                if piece.nbytes:
                    slices.append(piece)
                    sources[piece] = (number, _shift(part, box, local))
    image = plan_image(slices, {"format": "forebay", "rank": str(topology.rank)})
    parts = [
        _part(walked.leaves[sources[p.slice][0]], *sources[p.slice], p.start, p.nbytes)
        for p in image.placed
    ]
    rows, extra, slot_bytes = _witness_parts(walked, witnessed, round_up(image.total_bytes))
    layout = Layout(
        run=run,
        rank=topology.rank,
        world_size=topology.world_size,
        node=topology.node,
        nodes=topology.nodes,
        node_ranks=topology.node_ranks,
        image_bytes=image.total_bytes if image.placed else 0,
        header_bytes=len(image.header),
        slices=list(_slice_rows(image)),
        witnesses=rows,
        start_digests=digests,
    )
    return Plan(
        image=image,
        parts=(*parts, *extra),
        layout=layout,
        slot_bytes=slot_bytes,
        reserve_bytes=sum(
            2 * p.nbytes + _PAGE_BYTES for p in image.placed if p.slice.key.fqn in walked.waiting
        ),
        sign=walked.sign,
    )


def _shift(part: Box, box: Box, local: Box) -> Box:
    """``part`` of the global ``box`` in the coordinates of the local tensor."""
    offsets = tuple(
        p - b + start for p, b, start in zip(part.offsets, box.offsets, local.offsets, strict=True)
    )
    return Box(offsets, part.sizes)


def _part(leaf: Leaf, number: int, local: Box, start: int, nbytes: int) -> Part:
    whole = local == Box.whole(tuple(leaf.tensor.shape))
    return Part(number, None if whole else local, local.sizes, leaf.dtype, start, nbytes)


def _witness_parts(
    walked: Walked, witnessed: Sequence[tuple[int, str, Box, Box]], at: int
) -> tuple[list[WitnessRow], list[Part], int]:
    rows: list[WitnessRow] = []
    parts: list[Part] = []
    for number, scope, box, local in witnessed:
        leaf = walked.leaves[number]
        item_bytes = element_type(leaf.dtype).item_bytes
        if scope == "full":
            nbytes = box.elements * item_bytes
            part = _part(leaf, number, local, at, nbytes)
        elif leaf.tensor.is_contiguous():
            elements = leaf.tensor.numel()
            stride = -(-elements // max(1, SAMPLE_BYTES // item_bytes))
            count = elements // stride
            nbytes = count * item_bytes
            part = Part(number, None, (count,), leaf.dtype, at, nbytes, stride)
        else:
            continue
        rows.append(WitnessRow(scope, leaf.key.fqn, box.offsets, box.sizes, at, nbytes))
        parts.append(part)
        at = round_up(at + nbytes, 64)
    return rows, parts, at


def _slice_rows(image: Image) -> Iterator[SliceRow]:
    for placed in image.placed:
        piece = placed.slice
        yield SliceRow(
            piece.key.fqn,
            piece.key.rank,
            piece.dtype,
            piece.shape,
            piece.box.offsets,
            piece.box.sizes,
            placed.start,
            placed.nbytes,
        )
