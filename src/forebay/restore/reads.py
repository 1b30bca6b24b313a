"""Target slices x stored slices -> byte ranges. Pure.

A range that is read must be verified whole, so it is a whole slice, or whole 16 MiB blocks of a
slice that carries block digests. Each is read once, however many targets need it; neighbours in an
object are read together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.errors import MismatchError
from forebay.format.digests import BLOCK_BYTES
from forebay.format.dtypes import element_type
from forebay.format.slices import Box, TensorKey, find_overlap
from forebay.format.stored import Ints, Stored, Table

GAP_BYTES = 64 * 2**10
BATCH_BYTES = 8 * 2**20
SPAN_BYTES = 64 * 2**20  # of blocks in one read: bounds scratch, and lets threads share a slice
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a tensor that is to lie in a dense row-major host buffer of ``box.sizes``."""

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self.box.elements * element_type(self.dtype).item_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """What want number ``want`` takes from a read: the common box of the two."""

    want: int
    box: Box


@dataclass(frozen=True, slots=True)
class Read:
    """A verifiable byte range: ``start`` in the object; ``first_block`` is None for a whole slice.

    ``direct`` is the want whose buffer is exactly this range, so that it can be read in place.
    """

    stored: Stored
    start: int
    nbytes: int
    first_block: int | None
    pieces: tuple[Piece, ...]
    direct: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """Reads of one object that are one request: ``start`` and ``nbytes`` span them all."""

    key: str
    start: int
    nbytes: int
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """All requests, by object and offset.

    ``bytes_needed`` is what the wants hold, ``bytes_read`` what the requests span: whole slices or
    blocks, and the gaps that are cheaper read than left out.
    """

    wants: tuple[Want, ...]
    batches: tuple[Batch, ...]
    bytes_needed: int
    bytes_read: int


def plan_reads(wants: Sequence[Want], stored: Iterable[Stored]) -> ReadPlan:
    """Plan the reads that fill every want. Raises MismatchError naming what does not fit.

    That the slices of a tensor do not overlap was checked at the commit, and is again: an overlap
    could make up for a hole in the count, and the hole would be filled with nothing.
    """
    by_key: dict[TensorKey, list[Stored]] = {}
    for piece in stored:
        by_key.setdefault(piece.slice.key, []).append(piece)
    needs: dict[tuple[str, int], tuple[Stored, list[Piece]]] = {}
    problems: list[str] = []
    for number, want in enumerate(wants):
        problem = _match(number, want, by_key.get(want.key, []), needs)
        if problem:
            problems.append(problem)
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise MismatchError("; ".join(problems[:_SHOWN]) + more)
    reads = [read for piece, parts in needs.values() for read in _reads_of(piece, parts, wants)]
    reads.sort(key=lambda read: (read.stored.key, read.start))
    batches = tuple(_batches(reads))
    return ReadPlan(
        wants=tuple(wants),
        batches=batches,
        bytes_needed=sum(want.nbytes for want in wants),
        bytes_read=sum(batch.nbytes for batch in batches),
    )


def touched(wants: Sequence[Want], table: Table) -> Ints:
    """Rows that share an element with a want, or that do not fit one: ``plan_reads`` says how."""
    by_key: dict[TensorKey, list[Want]] = {}
    for want in wants:
        by_key.setdefault(want.key, []).append(want)
    kept = np.zeros(len(table), np.bool_)
    for place, key in enumerate(table.tensors):
        rows = table.order[table.bounds[place] : table.bounds[place + 1]]
        for want in by_key.get(key, ()):
            fits = np.array([shape == want.shape for shape in table.shapes])[table.shape[rows]]
            kept[rows[~fits]] = True
            alike = rows[fits]
            first, meets = table.first[alike], np.ones(len(alike), np.bool_)
            for d, (offset, size) in enumerate(zip(want.box.offsets, want.box.sizes, strict=True)):
                begin = table.offsets[first + d]
                meets &= (begin < offset + size) & (begin + table.sizes[first + d] > offset)
            kept[alike[meets]] = True
    return np.flatnonzero(kept)


def _match(
    number: int,
    want: Want,
    pieces: list[Stored],
    needs: dict[tuple[str, int], tuple[Stored, list[Piece]]],
) -> str | None:
    met: list[Box] = []
    for piece in pieces:
        if piece.slice.shape != want.shape:
            return f"{want.key}: shape {want.shape} in the target, {piece.slice.shape} stored"
        if piece.slice.dtype != want.dtype:
            return f"{want.key}: dtype {want.dtype} in the target, {piece.slice.dtype} stored"
        common = piece.slice.box.meet(want.box) if want.box.elements else None
        if common is not None:
            met.append(common)
            needs.setdefault((piece.key, piece.start), (piece, []))[1].append(Piece(number, common))
    twice = find_overlap(met)
    if twice is not None:
        return (
            f"{want.key}: parts {twice[0].offsets}+{twice[0].sizes} and {twice[1].offsets}+"
            f"{twice[1].sizes} are stored twice, the index is damaged: restore an older step"
        )
    missing = want.box.elements - sum(box.elements for box in met)
    if missing:
        return (
            f"{want.key}: {missing} of {want.box.elements} elements of box {want.box.offsets}+"
            f"{want.box.sizes} are stored by no rank"
            + ("" if pieces else ": the checkpoint has no such tensor")
        )
    return None


def _reads_of(stored: Stored, pieces: list[Piece], wants: Sequence[Want]) -> Iterator[Read]:
    box = stored.slice.box
    whole = [p for p in pieces if p.box == box and wants[p.want].box == box]
    if whole or not stored.blocks:
        direct = whole[0].want if whole else None
        yield Read(stored, stored.start, stored.nbytes, None, tuple(pieces), direct)
        return
    blocks = [n for n in range(len(stored.blocks)) if _touches(stored, n, pieces)]
    if len(blocks) == len(stored.blocks) and stored.nbytes <= SPAN_BYTES:
        yield Read(stored, stored.start, stored.nbytes, None, tuple(pieces), None)
        return
    for first, last in _spans(blocks):
        begin = first * BLOCK_BYTES
        end = min((last + 1) * BLOCK_BYTES, stored.nbytes)
        yield Read(stored, stored.start + begin, end - begin, first, tuple(pieces), None)


def _touches(stored: Stored, block: int, pieces: Sequence[Piece]) -> bool:
    """True when a piece has an element in the block. Works on boxes: a piece may have 10^8 runs."""
    begin = block * BLOCK_BYTES
    nbytes = min(BLOCK_BYTES, stored.nbytes - begin)
    return any(
        box.meet(piece.box) is not None
        for _, box in dense_boxes(stored, begin, nbytes)
        for piece in pieces
    )


def _spans(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each stretch of consecutive blocks, none above SPAN_BYTES."""
    most = max(1, SPAN_BYTES // BLOCK_BYTES)
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1 or number - first == most:
            yield first, last
            first = number
        last = number
    yield first, last


def dense_boxes(stored: Stored, begin: int, nbytes: int) -> Iterator[tuple[int, Box]]:
    """The boxes that bytes ``begin`` to ``begin + nbytes`` of a slice are, each with its place.

    A range that begins and ends within rows is a few boxes (at most two a dimension), each dense
    in the slice. Places are in bytes from ``begin``. Blocks begin at whole elements: their size is
    a multiple of every item's.
    """
    item = element_type(stored.slice.dtype).item_bytes
    outer = stored.slice.box
    at = 0
    for box in _cut(outer, (), begin // item, (begin + nbytes) // item):
        yield at, box
        at += box.elements * item


def _cut(outer: Box, index: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements ``start`` to ``stop`` of the sub-box of ``outer`` at ``index``, in order."""
    dim = len(index)
    if dim == len(outer.sizes):
        yield Box(index, (1,) * dim)
        return
    row = math.prod(outer.sizes[dim + 1 :])
    low, high = -(-start // row), stop // row
    if low > high:  # within one row
        yield from _cut(outer, (*index, outer.offsets[dim] + high), start % row, stop - high * row)
        return
    if start % row:
        yield from _cut(outer, (*index, outer.offsets[dim] + low - 1), start % row, row)
    if low < high:
        offsets = (*index, outer.offsets[dim] + low, *outer.offsets[dim + 1 :])
        yield Box(offsets, ((1,) * dim) + (high - low, *outer.sizes[dim + 1 :]))
    if stop % row:
        yield from _cut(outer, (*index, outer.offsets[dim] + high), 0, stop % row)


def _batches(reads: Sequence[Read]) -> Iterator[Batch]:
    held: list[Read] = []
    for read in reads:
        if held and not _joins(held, read):
            yield _batch(held)
            held = []
        held.append(read)
    if held:
        yield _batch(held)


def _joins(held: list[Read], read: Read) -> bool:
    end = held[-1].start + held[-1].nbytes
    return (
        held[-1].stored.key == read.stored.key
        and read.start - end <= GAP_BYTES
        and read.start + read.nbytes - held[0].start <= BATCH_BYTES
    )


def _batch(held: list[Read]) -> Batch:
    start = held[0].start
    end = held[-1].start + held[-1].nbytes
    return Batch(held[0].stored.key, start, end - start, tuple(held))
