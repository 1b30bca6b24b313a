"""The judgement on columns is the one that each slice against each other gives."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.commit import cover
from forebay.commit.cover import check_cover, find_rows, keep_one_copy
from forebay.errors import ConflictError, IncompleteError
from forebay.format import tree
from forebay.format.digests import digest
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Stored, Table
from forebay.restore.reads import Want, touched


def entry(fqn: str, shape: tuple[int, ...], dtype: str = "uint8") -> tree.Tensor:
    return tree.Tensor(fqn, fqn, dtype, shape, "cpu", True)


def piece(fqn: str, shape: tuple[int, ...], box: Box, rank: int, dtype: str = "uint8") -> Stored:
    made = Slice(TensorKey(fqn), dtype, shape, box)
    return Stored(made, f"f{rank}", 0, digest(repr((fqn, box)).encode()), (), rank)


def cells(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*ranges))


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape cut into a grid, or cut again and again; then perhaps spoiled."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    seed = draw(st.randoms(use_true_random=False))
    if draw(st.booleans()):
        edges = [
            [0, *sorted(seed.sample(range(1, n), seed.randint(0, n - 1))), n] if n > 1 else [0, n]
            for n in shape
        ]
        ranges = [list(itertools.pairwise(edge)) for edge in edges]
        boxes = [
            Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
            for cell in itertools.product(*ranges)
        ]
    else:
        boxes = [Box.whole(shape)]
        for _ in range(draw(st.integers(0, 6))):
            boxes += _split(boxes.pop(seed.randrange(len(boxes))), seed)
    how = draw(st.sampled_from(["whole", "hole", "twice", "moved"]))
    if how == "hole":
        boxes.pop(seed.randrange(len(boxes)))
    elif how == "twice" and shape:
        box = boxes[seed.randrange(len(boxes))]
        boxes.append(Box(box.offsets, tuple(max(1, n - 1) for n in box.sizes)))
    elif how == "moved" and shape:
        at = seed.randrange(len(boxes))
        box = boxes[at]
        room = [n - size for n, size in zip(shape, box.sizes, strict=True)]
        boxes[at] = Box(tuple(seed.randint(0, n) for n in room), box.sizes)
    seed.shuffle(boxes)
    return shape, boxes


def _split(box: Box, seed: random.Random) -> list[Box]:
    wide = [d for d, n in enumerate(box.sizes) if n > 1]
    if not wide:
        return [box]
    d = seed.choice(wide)
    at = seed.randint(1, box.sizes[d] - 1)
    low = Box(box.offsets, (*box.sizes[:d], at, *box.sizes[d + 1 :]))
    offsets = (*box.offsets[:d], box.offsets[d] + at, *box.offsets[d + 1 :])
    return [low, Box(offsets, (*box.sizes[:d], box.sizes[d] - at, *box.sizes[d + 1 :]))]


@settings(max_examples=400)
@given(st.lists(cut(), min_size=1, max_size=3))
def test_a_cover_is_what_counting_cells_says(made: list[tuple[tuple[int, ...], list[Box]]]) -> None:
    rows, expected = [], None
    for number, (shape, boxes) in enumerate(made):
        rows += [piece(f"w{number}", shape, box, rank) for rank, box in enumerate(boxes)]
        count = sum(len(cells(box)) for box in boxes)
        union = set().union(*(cells(box) for box in boxes)) if boxes else set()
        if expected is None and count > len(union):
            expected = ConflictError
        elif expected is None and union != cells(Box.whole(shape)):
            expected = IncompleteError
    wanted = [(entry(f"w{number}", shape), None) for number, (shape, _) in enumerate(made)]
    table = Table.of(rows)
    if expected is None:
        check_cover(wanted, table)
    else:
        with pytest.raises(expected):
            check_cover(wanted, table)


@pytest.mark.parametrize(
    ("shape", "ranges"),
    [((4096,), [(i, 1) for i in range(4096)]), ((64, 3), [(2 * i, 2) for i in range(32)])],
)
def test_rows_and_grids_are_judged_without_a_look_at_each(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], ranges: list[tuple[int, int]]
) -> None:
    """Sharded on the first dimension, and on all of them."""
    rest = [[(d, 1) for d in range(n)] for n in shape[1:]]
    boxes = [
        Box(tuple(a for a, _ in cell), tuple(n for _, n in cell))
        for cell in itertools.product(ranges, *rest)
    ]
    monkeypatch.setattr(cover, "_check_one", None)
    check_cover([(entry("w", shape), None)], Table.of(piece("w", shape, b, 0) for b in boxes))


def test_another_dtype_and_another_shape_are_named() -> None:
    whole = [piece("w", (4,), Box((0,), (4,)), 3)]
    for wanted in (entry("w", (4,), "int8"), entry("w", (2, 2))):
        with pytest.raises(ConflictError, match="w: rank 3 stored uint8"):
            check_cover([(wanted, None)], Table.of(whole))
    halves = [piece("w", (4,), Box((0,), (2,)), 0), piece("w", (4,), Box((2,), (2,)), 1, "int8")]
    with pytest.raises(ConflictError, match="w: rank 1 stored int8"):
        check_cover([(entry("w", (4,)), None)], Table.of(halves))


def test_of_equal_copies_the_lowest_rank_s_is_kept_among_others() -> None:
    shape, low, high = (4,), Box((0,), (2,)), Box((2,), (2,))
    rows = [piece("w", shape, box, rank) for rank in (3, 1, 2) for box in (high, low)]
    rows += [piece("v", shape, Box.whole(shape), 7)]
    kept = keep_one_copy(Table.of(rows))
    assert sorted((str(r.slice.key), r.rank) for r in kept) == [("v", 7), ("w", 1), ("w", 1)]
    check_cover([(entry("w", shape), None), (entry("v", shape), None)], kept)


@given(cut())
def test_a_box_is_found_where_it_is_stored(made: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = made
    table = Table.of(piece("w", shape, box, rank) for rank, box in enumerate(boxes))
    asked = [*boxes, Box.whole(shape), Box.whole((*shape, 2))]
    found = list(find_rows(table, [TensorKey("w")] * len(asked), asked))
    for box, row in zip(asked, found, strict=True):
        assert (row is None) == (box not in boxes)
        assert row is None or table.row(row).slice.box == box
    assert list(find_rows(table, [TensorKey("other")], [Box.whole(shape)])) == [None]
    assert np.all(np.diff(table.bounds) >= 0)


def test_numbers_that_fill_four_bytes_only_when_added() -> None:
    """Three billion elements in slices of a billion: begin and end are apart by all 32 bits."""
    shape, billion = (3 * 10**9,), 10**9
    rows = [piece("w", shape, Box((n * billion,), (billion,)), n) for n in range(3)]
    table = Table.of(rows)
    check_cover([(entry("w", shape), None)], table)
    want = Want(TensorKey("w"), "uint8", shape, Box((2_900_000_000,), (10,)))
    assert touched([want], table).tolist() == [2]
    twice = [*rows[:2], piece("w", shape, Box((1_900_000_000,), (1_100_000_000,)), 2)]
    with pytest.raises(ConflictError, match="overlapping"):
        check_cover([(entry("w", shape), None)], Table.of(twice))
