"""Who holds what, and who writes which part of it, against torch.chunk and brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.capture.placement import (
    PART_BYTES,
    SMALL_BYTES,
    Split,
    held_boxes,
    held_runs,
    local_shape,
    written_part,
)
from forebay.format.slices import Box


def count_of(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How many of the boxes hold each element."""
    held = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        held[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return held


@given(st.integers(0, 40), st.integers(1, 9))
def test_an_even_split_is_torch_chunk(size: int, parts: int) -> None:
    expected = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)] if size else []
    expected += [[]] * (parts - len(expected))
    for index in range(parts):
        runs = held_runs(size, [Split(0, parts, index)])
        assert [at for start, n in runs for at in range(start, start + n)] == expected[index]


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_two_splits_of_one_dimension_chunk_twice(size: int, outer: int, inner: int) -> None:
    for i, j in itertools.product(range(outer), range(inner)):
        first = list(torch.arange(size).chunk(outer)) if size else []
        mine = first[i] if i < len(first) else torch.arange(0)
        second = list(mine.chunk(inner)) if mine.numel() else []
        expected = second[j].tolist() if j < len(second) else []
        runs = held_runs(size, [Split(0, outer, i), Split(0, inner, j)])
        assert [at for start, n in runs for at in range(start, start + n)] == expected


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_a_strided_split_cuts_what_the_later_dimension_cut_first(
    data: int, tensor: int, each: int
) -> None:
    """FSDP over tensor parallel: rows go to tensor ranks first, then to data ranks."""
    size = data * tensor * each
    for i, j in itertools.product(range(data), range(tensor)):
        expected = torch.arange(size).chunk(tensor)[j].chunk(data)[i].tolist()
        runs = held_runs(size, [Split(0, data, i, stride=tensor), Split(0, tensor, j)])
        assert [at for start, n in runs for at in range(start, start + n)] == expected


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    """A shape, and for each mesh dimension ``(tensor dim, parts, stride)``."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    dims = draw(
        st.lists(
            st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 4), st.integers(1, 3)),
            min_size=1,
            max_size=3,
        )
    )
    return shape, dims


@given(meshes())
def test_over_all_ranks_boxes_are_disjoint_and_cover(
    mesh: tuple[tuple[int, ...], list[tuple[int, int, int]]],
) -> None:
    shape, dims = mesh
    everyone: list[Box] = []
    for coordinate in itertools.product(*(range(parts) for _, parts, _ in dims)):
        splits = [
            Split(dim, parts, index, stride)
            for (dim, parts, stride), index in zip(dims, coordinate, strict=True)
        ]
        pairs = held_boxes(shape, splits)
        local = local_shape(shape, splits)
        assert (count_of(local, [inner for _, inner in pairs]) == 1).all()
        assert all(outer.sizes == inner.sizes for outer, inner in pairs)
        everyone += [outer for outer, _ in pairs]
    assert (count_of(shape, everyone) == 1).all()


@given(meshes(), st.data())
def test_the_local_tensor_is_the_held_boxes_put_together(
    mesh: tuple[tuple[int, ...], list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    shape, dims = mesh
    splits = [
        Split(dim, parts, data.draw(st.integers(0, parts - 1)), stride)
        for dim, parts, stride in dims
    ]
    rows = [
        [
            at
            for start, n in held_runs(size, [s for s in splits if s.dim == d])
            for at in range(start, start + n)
        ]
        for d, size in enumerate(shape)
    ]
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    local = whole[np.ix_(*rows)]
    for outer, inner in held_boxes(shape, splits):
        take = [
            tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes, strict=True))
            for b in (outer, inner)
        ]
        assert (whole[take[0]] == local[take[1]]).all()


def test_without_splits_all_is_held() -> None:
    assert held_boxes((3, 4), []) == [(Box.whole((3, 4)), Box.whole((3, 4)))]
    assert held_boxes((), []) == [(Box((), ()), Box((), ()))]


@st.composite
def replicas(draw: st.DrawFn) -> tuple[Box, int, int]:
    """A box whose rows are heavy, so that few elements reach the sizes that are cut."""
    sizes = draw(st.lists(st.integers(1, 30), max_size=3))
    offsets = draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    return (
        Box(tuple(offsets), tuple(sizes)),
        draw(st.sampled_from([1, 1000, 10**5, 10**6])),
        draw(st.integers(1, 9)),
    )


@given(replicas(), st.text(max_size=9))
def test_over_all_holders_parts_are_disjoint_and_cover(
    replica: tuple[Box, int, int], name: str
) -> None:
    box, item_bytes, holders = replica
    parts = [
        p for index in range(holders) for p in written_part(name, box, item_bytes, holders, index)
    ]
    assert (count_of(box.sizes, [part.relative_to(box) for part in parts]) == 1).all()
    if box.elements * item_bytes <= SMALL_BYTES:
        assert parts == [box]
    if len(parts) > 1:
        assert box.elements * item_bytes // len(parts) >= PART_BYTES


@pytest.mark.parametrize("holders", [2, 3, 8])
def test_small_ones_spread_over_the_holders_and_large_ones_over_all(holders: int) -> None:
    small = Box.whole((8,))
    writers = {
        index
        for n in range(100)
        for index in range(holders)
        if written_part(f"bias.{n}", small, 4, holders, index)
    }
    assert writers == set(range(holders))
    large = Box.whole((64, 2**20))
    shares = [
        sum(p.elements for p in written_part("w", large, 4, holders, index))
        for index in range(holders)
    ]
    assert max(shares) - min(shares) <= 2**20 * 64 // holders
    assert min(shares) > 0
