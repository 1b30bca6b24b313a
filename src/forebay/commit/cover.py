"""Is every tensor stored whole and once? Judged on columns; pure.

What is surely right is found for all slices at once: in the order of a tensor's elements, ranges
that do not meet; or a grid, whose cells can only be equal or apart. What is not is looked at slice
by slice, and that alone says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from forebay.errors import ConflictError, IncompleteError
from forebay.format import tree
from forebay.format.slices import Box, TensorKey, find_overlap, missing_elements
from forebay.format.stored import Flags, Ints, Stored, Table

ADVICE = "make them equal, or declare it forebay.per_rank(...)"
_EXACT = 2.0**52  # a float counts exactly up to there


def keep_one_copy(table: Table) -> Table:
    """Drop equal copies of a slice, keeping the lowest rank's. ConflictError if they differ."""
    order, begin = table.order, table.geometry.begin
    tensor = table.tensor
    alike = (tensor[order[1:]] == tensor[order[:-1]]) & (begin[order[1:]] == begin[order[:-1]])
    if not alike.any():
        return table
    starts = np.flatnonzero(np.concatenate([[True], ~alike]))
    ends = np.append(starts[1:], len(table))
    dropped = np.zeros(len(table), np.bool_)
    for run in np.flatnonzero(ends - starts > 1).tolist():
        rows = sorted(order[starts[run] : ends[run]].tolist(), key=lambda r: int(table.rank[r]))
        kept: dict[Box, Stored] = {}
        for number in rows:
            piece = table.row(number)
            first = kept.setdefault(piece.slice.box, piece)
            dropped[number] = first is not piece
            if (first.slice, first.digest) != (piece.slice, piece.digest):
                raise ConflictError(
                    f"{piece.slice.key}: rank {first.rank} and rank {piece.rank} stored different "
                    f"bytes for the same part of it: {ADVICE}"
                )
    return table.take(np.flatnonzero(~dropped))


def check_cover(wanted: Sequence[tuple[tree.Tensor, int | None]], table: Table) -> None:
    """Raise unless the slices of every tensor, each given with its owner, cover it exactly.

    ConflictError where two overlap or disagree about shape or dtype, IncompleteError for a hole.
    """
    places = {key: number for number, key in enumerate(table.tensors)}
    bounds = table.bounds
    sound = _sound(wanted, table, places)
    for number, (entry, owner) in enumerate(wanted):
        if sound[number]:
            continue
        place = places.get(TensorKey(entry.fqn, owner))
        rows = [] if place is None else table.order[bounds[place] : bounds[place + 1]].tolist()
        _check_one(entry, owner, [table.row(row) for row in rows])


def _sound(
    wanted: Sequence[tuple[tree.Tensor, int | None]],
    table: Table,
    places: dict[TensorKey, int],
) -> list[bool]:
    """Which of the wanted tensors are surely stored whole and once."""
    if not len(table):
        return [math.prod(entry.shape) == 0 for entry, _ in wanted]
    dtypes = {name: number for number, name in enumerate(table.dtypes)}
    shapes = {shape: number for number, shape in enumerate(table.shapes)}
    order, begins = table.order, table.bounds[:-1]
    geometry = table.geometry
    dtype, shape = table.dtype[order], table.shape[order]
    one_kind = _alike(dtype, begins) & _alike(shape, begins)
    elements = geometry.elements[order]
    counts = np.add.reduceat(elements.astype(np.float64), begins)
    apart = _apart(table)
    sound = []
    for entry, owner in wanted:
        place, volume = places.get(TensorKey(entry.fqn, owner)), math.prod(entry.shape)
        if place is None:
            sound.append(volume == 0)
            continue
        row = begins[place]
        sound.append(
            volume < _EXACT
            and bool(one_kind[place] and apart[place])
            and dtype[row] == dtypes.get(entry.dtype)
            and shape[row] == shapes.get(entry.shape)
            and counts[place] == volume
        )
    return sound


def _alike(column: Ints, begins: Ints) -> Flags:
    """For each group of rows, True when all have the same number."""
    same: Flags = np.minimum.reduceat(column, begins) == np.maximum.reduceat(column, begins)
    return same


def _apart(table: Table) -> Flags:
    """For each tensor, True when its slices surely share no element."""
    order, geometry, bounds = table.order, table.geometry, table.bounds
    begins = bounds[:-1]
    begin, end = geometry.begin[order], geometry.begin[order] + geometry.elements[order]
    follows = np.ones(len(order), np.bool_)
    follows[1:] = begin[1:] >= end[:-1]
    follows[begins] = True  # the first has none before it
    apart = np.logical_and.reduceat(follows & geometry.dense[order], begins)
    sizes = np.diff(bounds)
    for place in np.flatnonzero(~apart).tolist():
        if sizes[place] > 1:
            rows = order[bounds[place] : bounds[place + 1]]
            apart[place] = _is_grid(table, rows)
        else:
            apart[place] = True
    found: Flags = apart
    return found


def _is_grid(table: Table, rows: Ints) -> bool:
    """True when in each dimension two slices have the same range or ones that do not meet.

    Then two of them meet only where they are the same cell, which the sum of elements tells.
    """
    first, last = table.first[rows], table.first[rows + 1]
    dims = int(last[0] - first[0])
    if (last - first != dims).any() or not dims:
        return False
    cell = np.zeros(len(rows), np.int64)
    for d in range(dims):
        starts, sizes = table.offsets[first + d], table.sizes[first + d]
        begins, one, number = np.unique(starts, return_index=True, return_inverse=True)
        ends = begins + sizes[one]
        if (sizes != sizes[one][number]).any() or (begins[1:] < ends[:-1]).any():
            return False
        cell = cell * len(begins) + number
        if len(begins) > 1 and d < dims - 1:
            cell = np.unique(cell, return_inverse=True)[1]
    return len(np.unique(cell)) == len(rows)


def _check_one(entry: tree.Tensor, owner: int | None, pieces: Sequence[Stored]) -> None:
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


def find_rows(
    table: Table, keys: Sequence[TensorKey], boxes: Sequence[Box]
) -> Iterator[int | None]:
    """For each box of a tensor, the row that stores just that, or None."""
    places = {key: number for number, key in enumerate(table.tensors)}
    order, bounds = table.order, table.bounds
    begin = table.geometry.begin[order]
    for key, box in zip(keys, boxes, strict=True):
        place = places.get(key)
        found = None
        if place is not None:
            low, high = int(bounds[place]), int(bounds[place + 1])
            shape = table.shapes[table.shape[order[low]]]
            if box.inside(shape):
                at = low + int(np.searchsorted(begin[low:high], _begin(box, shape)))
                while at < high and found is None and begin[at] == _begin(box, shape):
                    found = int(order[at]) if table.row(int(order[at])).slice.box == box else None
                    at += 1
        yield found


def _begin(box: Box, shape: Sequence[int]) -> int:
    """The number of the box's first element in the tensor's row-major order."""
    begin = 0
    for offset, size in zip(box.offsets, shape, strict=True):
        begin = begin * max(size, 1) + offset
    return begin
