"""The read plan where it is easy to be wrong: ranges within rows, spans, slices stored twice."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import MismatchError
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Stored
from forebay.restore import reads
from forebay.restore.reads import Want, dense_boxes, plan_reads


def stored(box: Box, shape: tuple[int, ...], *, start: int = 4096, blocks: int = 0) -> Stored:
    piece = Slice(TensorKey("w"), "int16", shape, box)
    return Stored(piece, "f", start, bytes(32), (bytes(32),) * blocks, 0)


def want(box: Box, shape: tuple[int, ...]) -> Want:
    return Want(TensorKey("w"), "int16", shape, box)


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_a_range_of_a_slice_is_a_few_dense_boxes(sizes: list[int], data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, 3)) for _ in sizes)
    outer = Box(offsets, tuple(sizes))
    count = prod(sizes)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    there = stored(outer, tuple(o + n for o, n in zip(offsets, sizes, strict=True)))
    numbers = np.arange(count).reshape(sizes)
    found, places = [], []
    for at, box in dense_boxes(there, 2 * start, 2 * (stop - start)):
        inner = box.relative_to(outer)
        where = tuple(slice(o, o + n) for o, n in zip(inner.offsets, inner.sizes, strict=True))
        places.append((at, 2 * sum(map(len, found))))
        found.append(numbers[where].ravel().tolist())
    assert [n for run in found for n in run] == list(range(start, stop))
    assert all(at == expected for at, expected in places)
    assert len(found) <= max(1, 2 * len(sizes) - 1)


@given(st.data())
def test_the_blocks_read_are_those_that_hold_a_wanted_element(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    most = data.draw(st.integers(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads, "BLOCK_BYTES", 16)
        patch.setattr(reads, "SPAN_BYTES", 16 * most)
        patch.setattr(reads, "GAP_BYTES", -1)
        nbytes = 2 * prod(shape)
        there = stored(Box.whole(shape), shape, start=0, blocks=-(-nbytes // 16))
        plan = plan_reads([want(Box(offsets, sizes), shape)], [there])
    flat = np.arange(prod(shape)).reshape(shape)
    inner = flat[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    expected = sorted({int(n) * 2 // 16 for n in inner.ravel()})
    ranges = [(r.start, r.start + r.nbytes) for b in plan.batches for r in b.reads]
    covered = [n for low, high in ranges for n in range(low // 16, -(-high // 16))]
    assert covered == expected
    if sizes != shape:
        assert all(high - low <= 16 * most for low, high in ranges)


def test_a_large_slice_is_read_in_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "BLOCK_BYTES", 16)
    monkeypatch.setattr(reads, "SPAN_BYTES", 48)
    monkeypatch.setattr(reads, "GAP_BYTES", -1)
    there = stored(Box.whole((64,)), (64,), start=0, blocks=8)
    plan = plan_reads([want(Box((1,), (63,)), (64,))], [there])
    found = [(r.start, r.nbytes, r.first_block) for b in plan.batches for r in b.reads]
    assert found == [(0, 48, 0), (48, 48, 3), (96, 32, 6)]
    # What is exactly a want is still read in place, in one piece.
    whole = plan_reads([want(Box.whole((64,)), (64,))], [there]).batches[0].reads
    assert [(r.nbytes, r.direct) for r in whole] == [(128, 0)]


def test_a_hole_is_not_made_up_for_by_an_overlap() -> None:
    # Rows 0-3 twice, rows 4-7 never: as many elements as are wanted.
    twice = [stored(Box((0, 0), (4, 4)), (8, 4), start=at) for at in (4096, 8192)]
    with pytest.raises(MismatchError, match=r"w: parts .* stored twice"):
        plan_reads([want(Box.whole((8, 4)), (8, 4))], twice)


def test_overlap_out_of_sight_of_the_want_is_no_matter() -> None:
    twice = [stored(Box((0, 0), (4, 4)), (8, 4), start=at) for at in (4096, 8192)]
    rest = stored(Box((4, 0), (4, 4)), (8, 4), start=9000)
    plan = plan_reads([want(Box((5, 0), (2, 4)), (8, 4))], [*twice, rest])
    assert [b.start for b in plan.batches] == [9000]


def test_a_tensor_that_is_not_there_is_told_from_a_hole() -> None:
    with pytest.raises(MismatchError, match="the checkpoint has no such tensor"):
        plan_reads([want(Box.whole((4,)), (4,))], [])
    with pytest.raises(MismatchError, match="2 of 4 elements") as told:
        plan_reads([want(Box.whole((4,)), (4,))], [stored(Box((0,), (2,)), (4,))])
    assert "no such tensor" not in str(told.value)


def test_what_is_read_counts_the_gaps_between_neighbours() -> None:
    there = [stored(Box((n,), (1,)), (3,), start=100 * n) for n in range(3)]
    plan = plan_reads([want(Box.whole((3,)), (3,))], there)
    assert len(plan.batches) == 1
    assert (plan.bytes_needed, plan.bytes_read) == (6, 202)


def test_thousands_of_small_tensors_are_few_requests() -> None:
    keys = [TensorKey(f"t{n}") for n in range(5000)]
    there = [
        Stored(Slice(key, "int32", (), Box((), ())), "f", 4096 + 64 * n, bytes(32), (), 0)
        for n, key in enumerate(keys)
    ]
    plan = plan_reads([Want(key, "int32", (), Box((), ())) for key in keys], there)
    assert len(plan.batches) == 1
    assert len(plan.batches[0].reads) == 5000
