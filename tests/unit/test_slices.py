"""Boxes against brute force on small arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.format.slices import (
    Box,
    Slice,
    TensorKey,
    find_overlap,
    missing_elements,
    runs_of,
)


def cells(box: Box) -> set[tuple[int, ...]]:
    grid = np.ndindex(*box.sizes)
    return {tuple(o + i for o, i in zip(box.offsets, at, strict=True)) for at in grid}


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets, sizes = [], []
    for n in shape:
        low = draw(st.integers(0, n))
        offsets.append(low)
        sizes.append(draw(st.integers(0, n - low)))
    return Box(tuple(offsets), tuple(sizes))


SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes_in(shape), min_size=count, max_size=count))


@given(shape_and_boxes(2))
def test_meet_is_the_common_cells(given_: tuple[tuple[int, ...], list[Box]]) -> None:
    _, (one, other) = given_
    common = cells(one) & cells(other)
    met = one.meet(other)
    assert met == other.meet(one)
    assert (cells(met) if met else set()) == common
    if met:
        assert met.relative_to(one).inside(one.sizes)


@given(shape_and_boxes(5))
def test_find_overlap_finds_one_if_there_is_one(
    given_: tuple[tuple[int, ...], list[Box]],
) -> None:
    _, boxes = given_
    pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if cells(a) & cells(b)]
    found = find_overlap(boxes)
    assert (found is not None) == bool(pairs)
    if found:
        assert cells(found[0]) & cells(found[1])
        assert found[0] in boxes
        assert found[1] in boxes


@given(shape_and_boxes(4))
def test_missing_elements_of_disjoint_boxes(given_: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = given_
    kept: list[Box] = []
    for box in boxes:
        if find_overlap([*kept, box]) is None:
            kept.append(box)
    covered = set().union(*map(cells, kept)) if kept else set()
    assert missing_elements(shape, kept) == len(cells(Box.whole(shape)) - covered)


@given(shape_and_boxes(1), st.data())
def test_runs_are_the_flat_positions(
    given_: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    _, (outer,) = given_
    inner_relative = data.draw(boxes_in(outer.sizes))
    inner = Box(
        tuple(a + b for a, b in zip(inner_relative.offsets, outer.offsets, strict=True)),
        inner_relative.sizes,
    )
    mask = np.zeros(outer.sizes, dtype=bool)
    mask[tuple(slice(o, o + n) for o, n in zip(*_of(inner_relative), strict=True))] = True
    positions = [start + i for start, count in runs_of(inner, outer) for i in range(count)]
    assert positions == np.flatnonzero(mask).tolist()


def _of(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offsets, box.sizes


def test_full_rows_are_one_run() -> None:
    outer = Box.whole((8, 3, 4))
    assert runs_of(Box((2, 0, 0), (5, 3, 4)), outer) == [(24, 60)]
    assert runs_of(Box((2, 0, 0), (2, 3, 2)), outer) == [(24 + 4 * i, 2) for i in range(6)]
    assert runs_of(Box((), ()), Box((), ())) == [(0, 1)]


def test_two_scalars_overlap() -> None:
    scalar = Box((), ())
    assert find_overlap([scalar]) is None
    assert find_overlap([scalar, scalar]) == (scalar, scalar)


def test_bytes_of_a_slice() -> None:
    piece = Slice(TensorKey("w", 3), "bfloat16", (8, 4), Box((2, 0), (3, 4)))
    assert piece.nbytes == 24
    assert str(piece.key) == "w (rank 3)"
    with pytest.raises(FormatError, match="int3"):
        _ = Slice(TensorKey("w"), "int3", (1,), Box.whole((1,))).nbytes
