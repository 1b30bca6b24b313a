"""Do ranks agree? What differs is named with its path and two ranks."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.commit import cover
from forebay.commit.merge import Trees, Witnesses
from forebay.errors import ConflictError, FormatError, IncompleteError
from forebay.format import tree
from forebay.format.digests import digest
from forebay.format.record import Witness
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Stored, Table
from tests.build import B, Rank, W, entries_of, record_of


def record(*ranks: list[tree.Entry]):  # type: ignore[no-untyped-def]  # noqa: ANN201
    return record_of({rank: Rank(entries=entries) for rank, entries in enumerate(ranks)})


def merge_trees(records, written=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    trees = Trees()
    for one in records:
        trees.add(one)
    return trees.merged(written)


def check_witnesses(records, stored) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    seen = Witnesses()
    for one in records:
        seen.add(one)
    seen.check(Table.of(stored))


def keep_one_copy(stored: list[Stored]) -> list[Stored]:
    return list(cover.keep_one_copy(Table.of(stored)))


def check_cover(entries: list[tree.Entry], owner: int | None, stored: list[Stored]) -> None:
    tensors = [(entry, owner) for entry in entries if isinstance(entry, tree.Tensor)]
    cover.check_cover(tensors, Table.of(stored))


def value(path: str, item: object) -> tree.Value:
    return tree.Value(path, tree.encode_value(item, path))


def test_equal_trees_are_one() -> None:
    entries = entries_of(("w", W), step=7, lr=0.1)
    assert merge_trees([record(entries, entries)]) == entries


def test_a_value_that_differs_names_its_path_both_values_and_two_ranks() -> None:
    one = [tree.Container("", "dict", 1), value("args/lr", 0.1)]
    other = [tree.Container("", "dict", 1), value("args/lr", 0.2)]
    with pytest.raises(
        ConflictError,
        match=r"args/lr: differs between rank 0 \(0\.1\) and rank 2 \(0\.2\).*per_rank",
    ):
        merge_trees([record(one, one, other)])


def tied(fqn: str, shape: tuple[int, ...] = (3,)) -> list[tree.Entry]:
    return [
        tree.Container("", "dict", 2),
        tree.Tensor("embed", "embed", "float32", shape, "cpu", True),
        tree.Tensor("head", fqn, "float32", shape, "cpu", True),
    ]


@pytest.mark.parametrize("order", [("embed", "embed", "head"), ("head", "embed", "embed")])
def test_a_rank_with_an_empty_shard_cannot_see_that_it_is_tied(order: tuple[str, ...]) -> None:
    """Three rows on four ranks: the others know. With bytes of its own it is no tie."""
    records = [record(*map(tied, order))]
    assert merge_trees(records, {"embed"}) == tied("embed")
    with pytest.raises(ConflictError, match=r"head: differs between rank 0 .* and rank"):
        merge_trees(records, {"embed", "head"})


def test_nan_agrees_with_itself() -> None:
    entries = [value("loss", float("nan"))]
    assert merge_trees([record(entries, entries)]) == entries


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (value("a", 1), value("a", True)),
        (value("a", 1), value("a", 1.0)),
        (value("a", [1]), value("a", (1,))),
        (value("a", 1), tree.Container("a", "dict", 0)),
        (tree.Container("a", "dict", 0), tree.Container("a", "odict", 0)),
        (tree.Container("a", "list", 1), tree.Container("a", "list", 2)),
        (
            tree.Tensor("a", "a", "float32", (2,), "cpu", False),
            tree.Tensor("a", "a", "float32", (3,), "cpu", False),
        ),
        (
            tree.Tensor("a", "a", "float32", (2,), "cpu", False),
            tree.Tensor("a", "b", "float32", (2,), "cpu", False),
        ),
    ],
)
def test_what_is_not_the_same_conflicts(one: tree.Entry, other: tree.Entry) -> None:
    with pytest.raises(ConflictError, match=r"a: differs between rank 0 .* and rank 1"):
        merge_trees([record([one], [other])])


def test_pipeline_stages_with_different_entries_merge() -> None:
    first = [
        tree.Container("", "dict", 2),
        tree.Container("model", "odict", 2),
        tree.Tensor("model/0.w", "model/0.w", "float32", (2,), "cpu", False),
        tree.Tensor("model/emb", "model/emb", "float32", (2,), "cpu", False),
        value("step", 3),
    ]
    last = [
        tree.Container("", "dict", 2),
        tree.Container("model", "odict", 1),
        tree.Tensor("model/1.w", "model/1.w", "float32", (2,), "cpu", False),
        value("step", 3),
    ]
    merged = {entry.path: entry for entry in merge_trees([record(first, last)])}
    assert merged["model"] == tree.Container("model", "odict", 3)
    assert merged[""] == tree.Container("", "dict", 2)
    assert merged.keys() == {"", "model", "model/0.w", "model/emb", "model/1.w", "step"}


def stored(box: Box, rank: int, *, data: bytes = b"", owner: int | None = None) -> Stored:
    piece = Slice(TensorKey("w", owner), "float32", (8, 4), box)
    return Stored(piece, f"f{rank}", 4096, digest(data), (), rank)


TOP, BOTTOM, ALL = Box((0, 0), (4, 4)), Box((4, 0), (4, 4)), Box((0, 0), (8, 4))


def test_of_equal_copies_the_lowest_rank_stays() -> None:
    kept = keep_one_copy([stored(ALL, 2), stored(ALL, 0), stored(ALL, 1)])
    assert [piece.rank for piece in kept] == [0]
    own = [stored(ALL, rank, owner=rank, data=bytes([rank])) for rank in range(3)]
    assert keep_one_copy(own) == own


def test_copies_that_differ_conflict() -> None:
    with pytest.raises(ConflictError, match="w: rank 0 and rank 2 stored different bytes"):
        keep_one_copy([stored(ALL, 2, data=b"x"), stored(ALL, 0)])


def witness(rank: int, data: bytes, scope: str = "full", box: Box = ALL) -> Witness:
    return Witness(rank, scope, "w", box.offsets, box.sizes, digest(data).hex())


def with_witnesses(*witnesses: Witness):  # type: ignore[no-untyped-def]  # noqa: ANN201
    return record_of({0: Rank(entries=[], witnesses=list(witnesses))})


def test_a_witness_of_other_bytes_conflicts() -> None:
    check_witnesses([with_witnesses(witness(1, b""))], [stored(ALL, 0)])
    with pytest.raises(ConflictError, match="w: rank 0 and rank 1 hold different bytes, it is"):
        check_witnesses([with_witnesses(witness(1, b"x"))], [stored(ALL, 0)])
    check_witnesses([with_witnesses(witness(1, b"x", box=TOP))], [stored(ALL, 0)])
    check_witnesses([with_witnesses(witness(1, b"x"))], [stored(ALL, 0, owner=0)])


@pytest.mark.parametrize("scope", ["sample", "start"])
def test_witnesses_are_compared_with_each_other(scope: str) -> None:
    both = with_witnesses(witness(0, b"x", scope)), with_witnesses(witness(3, b"y", scope))
    with pytest.raises(ConflictError, match="rank 0 and rank 3 hold different bytes"):
        check_witnesses(both, [])
    check_witnesses([both[0], both[0]], [stored(ALL, 0)])


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(FormatError, match="'half'"):
        check_witnesses([with_witnesses(witness(0, b"", "half"))], [])


ENTRY = entries_of(("w", W))


def test_a_cover_is_exact() -> None:
    check_cover(ENTRY, None, [stored(TOP, 0), stored(BOTTOM, 1)])
    check_cover(ENTRY, None, [stored(ALL, 0)])
    check_cover(entries_of(("e", np.zeros((0, 3), np.float32))), None, [])
    check_cover([value("n", 1)], None, [])


def test_an_overlap_names_the_ranks() -> None:
    with pytest.raises(ConflictError, match=r"w: ranks \[0, 1\] stored overlapping parts"):
        check_cover(ENTRY, None, [stored(TOP, 0), stored(Box((3, 0), (5, 4)), 1)])


def test_a_hole_is_counted() -> None:
    with pytest.raises(IncompleteError, match=r"w: 16 of 32 elements .* ranks \[1\]"):
        check_cover(ENTRY, None, [stored(BOTTOM, 1)])
    with pytest.raises(IncompleteError, match=r"w \(rank 3\): 32 of 32"):
        check_cover(ENTRY, 3, [])


def test_another_shape_or_dtype_than_the_state_s_conflicts() -> None:
    for array in (W.astype(np.float64), W.reshape(4, 8), B):
        with pytest.raises(ConflictError, match="w: rank 0 stored float32"):
            check_cover(entries_of(("w", array)), None, [stored(ALL, 0)])
