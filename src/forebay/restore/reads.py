"""Target slices x stored slices -> byte ranges. Pure.

A range that is read must be verified whole, so it is a whole slice, or whole 16 MiB blocks of a
slice that carries block digests. Each is read once, however many targets need it; neighbours in an
object are read together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forebay.errors import MismatchError
from forebay.format.digests import BLOCK_BYTES
from forebay.format.dtypes import element_type
from forebay.format.record import Stored
from forebay.format.slices import Box, TensorKey, runs_of

GAP_BYTES = 64 * 2**10
BATCH_BYTES = 8 * 2**20
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
    """All requests, by object and offset; ``bytes_needed`` is what the wants hold."""

    wants: tuple[Want, ...]
    batches: tuple[Batch, ...]
    bytes_needed: int
    bytes_read: int


def plan_reads(wants: Sequence[Want], stored: Iterable[Stored]) -> ReadPlan:
    """Plan the reads that fill every want. Raises MismatchError naming what does not fit.

    ``stored`` slices of one tensor do not overlap, as a commit has checked.
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
    return ReadPlan(
        wants=tuple(wants),
        batches=tuple(_batches(reads)),
        bytes_needed=sum(want.nbytes for want in wants),
        bytes_read=sum(read.nbytes for read in reads),
    )


def _match(
    number: int,
    want: Want,
    pieces: list[Stored],
    needs: dict[tuple[str, int], tuple[Stored, list[Piece]]],
) -> str | None:
    found = 0
    for piece in pieces:
        if piece.slice.shape != want.shape:
            return f"{want.key}: shape {want.shape} in the target, {piece.slice.shape} stored"
        if piece.slice.dtype != want.dtype:
            return f"{want.key}: dtype {want.dtype} in the target, {piece.slice.dtype} stored"
        common = piece.slice.box.meet(want.box) if want.box.elements else None
        if common is not None:
            found += common.elements
            needs.setdefault((piece.key, piece.start), (piece, []))[1].append(Piece(number, common))
    missing = want.box.elements - found
    if missing:
        return (
            f"{want.key}: {missing} of {want.box.elements} elements of box {want.box.offsets}+"
            f"{want.box.sizes} are stored by no rank"
        )
    return None


def _reads_of(stored: Stored, pieces: list[Piece], wants: Sequence[Want]) -> Iterable[Read]:
    box = stored.slice.box
    whole = [p for p in pieces if p.box == box and wants[p.want].box == box]
    if whole or not stored.blocks:
        direct = whole[0].want if whole else None
        yield Read(stored, stored.start, stored.nbytes, None, tuple(pieces), direct)
        return
    item = element_type(stored.slice.dtype).item_bytes
    touched: dict[int, None] = {}
    for piece in pieces:
        for start, count in runs_of(piece.box, box):
            first, last = start * item // BLOCK_BYTES, ((start + count) * item - 1) // BLOCK_BYTES
            touched.update(dict.fromkeys(range(first, last + 1)))
    blocks = sorted(touched)
    if len(blocks) == len(stored.blocks):
        yield Read(stored, stored.start, stored.nbytes, None, tuple(pieces), None)
        return
    for first, last in _spans(blocks):
        begin = first * BLOCK_BYTES
        end = min((last + 1) * BLOCK_BYTES, stored.nbytes)
        yield Read(stored, stored.start + begin, end - begin, first, tuple(pieces), None)


def _spans(numbers: Sequence[int]) -> Iterable[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _batches(reads: Sequence[Read]) -> Iterable[Batch]:
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
