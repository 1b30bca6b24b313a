"""Slices in columns: what comes out is what went in, in whatever order and however joined."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.format import digests
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Stored, Table, Tables


@st.composite
def pieces(draw: st.DrawFn) -> Stored:
    """A slice of up to three dimensions, a common one or a rank's own."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - at)) for n, at in zip(shape, offsets, strict=True))
    rank = draw(st.integers(0, 5))
    key = TensorKey(draw(st.sampled_from("abc")), draw(st.sampled_from([None, rank])))
    piece = Slice(key, draw(st.sampled_from(["float32", "bfloat16"])), shape, Box(offsets, sizes))
    start = draw(st.sampled_from([0, 4096, 2**40]))
    seed = random.Random(f"{piece}{rank}")
    blocks = tuple(seed.randbytes(32) for _ in range(digests.block_count(piece.nbytes)))
    return Stored(piece, f"file-{rank}", start, seed.randbytes(32), blocks, rank)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK_BYTES", 16), ("BLOCKS_ABOVE_BYTES", 64)):
        monkeypatch.setattr(digests, name, value)


@given(st.lists(pieces(), max_size=12), st.randoms(use_true_random=False))
def test_rows_come_back(rows: list[Stored], shuffled: random.Random) -> None:
    table = Table.of(rows)
    assert list(table) == rows
    assert table.nbytes().tolist() == [row.nbytes for row in rows]
    order = list(range(len(rows)))
    shuffled.shuffle(order)
    assert list(table.take(np.array(order, np.int64))) == [rows[number] for number in order]
    table.check_boxes("x")


@given(st.lists(st.lists(pieces(), max_size=5), max_size=4))
def test_tables_are_joined(parts: list[list[Stored]]) -> None:
    tables = Tables()
    for part in parts:
        tables.add(Table.of(part))
    assert list(tables.taken()) == [row for part in parts for row in part]


@given(st.lists(pieces(), max_size=12))
def test_the_order_is_by_name_owner_and_place(rows: list[Stored]) -> None:
    alike = {(row.slice.key.fqn, row.slice.key.rank): row.slice.shape for row in rows}
    rows = [r for r in rows if alike[r.slice.key.fqn, r.slice.key.rank] == r.slice.shape]
    table = Table.of(rows)

    def place(row: Stored) -> tuple[str, int, tuple[int, ...]]:
        key = row.slice.key
        return key.fqn, -1 if key.rank is None else key.rank, row.slice.box.offsets

    found = [place(table.row(number)) for number in table.order.tolist()]
    assert found == sorted(map(place, rows))
    assert [str(key) for key in table.tensors] == list(
        dict.fromkeys(str(table.row(number).slice.key) for number in table.order.tolist())
    )
    bounds = table.bounds.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(rows)


@given(st.lists(pieces(), min_size=1, max_size=8))
def test_dense_boxes_are_ranges(rows: list[Stored]) -> None:
    geometry = Table.of(rows).geometry
    for number, row in enumerate(rows):
        box, shape = row.slice.box, row.slice.shape
        cells = np.zeros(shape, np.bool_)
        cells[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] = True
        places = np.flatnonzero(cells)
        assert geometry.begin[number] == places[0]
        assert geometry.elements[number] == len(places)
        assert geometry.dense[number] == (places[-1] - places[0] + 1 == len(places))


def test_numbers_above_four_bytes_are_kept() -> None:
    shape, box = (2**40, 2), Box((2**35, 0), (2**33, 2))
    piece = Slice(TensorKey("w"), "uint8", shape, box)
    blocks = (bytes(32),) * 2**3
    row = Stored(piece, "f", 2**50, bytes(32), blocks, 0)
    table = Table.of([row])
    assert table.geometry.begin.tolist() == [2**36]
    assert table.nbytes().tolist() == [2**34]
    assert (table.offsets.dtype, table.rank.dtype) == (np.int64, np.int32)


def test_a_shape_of_more_elements_than_there_can_be_is_refused() -> None:
    piece = Slice(TensorKey("w"), "uint8", (2**40, 2**40), Box((0, 0), (1, 1)))
    with pytest.raises(FormatError, match="too large"):
        Table.of([Stored(piece, "f", 0, bytes(32), (), 0)]).check_boxes("x")
    piece = Slice(TensorKey("w"), "complex128", (2**62,), Box((0,), (2**62,)))
    with pytest.raises(FormatError, match="larger than any store"):
        Table.of([Stored(piece, "f", 0, bytes(32), (), 0)]).check_boxes("x")


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((4,), Box((0,), (5,))),
        ((4,), Box((3,), (2,))),
        ((-4,), Box((0,), (0,))),
        ((4,), Box((0, 0), (1, 1))),
        ((4, 4), Box((0,), (1,))),
        ((), Box((0,), (1,))),
    ],
)
def test_a_box_outside_its_shape_is_refused(shape: tuple[int, ...], box: Box) -> None:
    piece = Slice(TensorKey("model/w"), "uint8", shape, box)
    table = Table.of([Stored(piece, "file", 0, bytes(32), (), 0)])
    with pytest.raises(FormatError, match="x: "):
        table.check_boxes("x")
