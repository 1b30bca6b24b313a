"""The read plan: each range once, neighbours together, whole or in whole blocks."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.errors import MismatchError
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Stored
from forebay.restore import reads
from forebay.restore.reads import Want, plan_reads


def stored(
    fqn: str,
    box: Box,
    start: int,
    *,
    key: str = "f",
    shape: tuple[int, ...] = (8, 4),
    blocks: int = 0,
    dtype: str = "float32",
) -> Stored:
    piece = Slice(TensorKey(fqn), dtype, shape, box)
    return Stored(piece, key, start, bytes(32), (bytes(32),) * blocks, 0)


def want(fqn: str, box: Box, shape: tuple[int, ...] = (8, 4), dtype: str = "float32") -> Want:
    return Want(TensorKey(fqn), dtype, shape, box)


TOP, BOTTOM, ALL = Box((0, 0), (4, 4)), Box((4, 0), (4, 4)), Box((0, 0), (8, 4))


def test_a_range_is_read_once_however_many_need_it() -> None:
    there = [stored("w", TOP, 4096), stored("w", BOTTOM, 4160)]
    plan = plan_reads([want("w", ALL), want("w", ALL), want("w", TOP)], there)
    ranges = [(r.start, r.nbytes) for b in plan.batches for r in b.reads]
    assert ranges == [(4096, 64), (4160, 64)]
    assert (plan.bytes_needed, plan.bytes_read) == (128 + 128 + 64, 128)
    assert plan.batches[0].reads[0].direct == 2
    assert plan.batches[0].reads[1].direct is None


def test_only_what_is_needed_is_read() -> None:
    there = [stored("w", TOP, 4096), stored("w", BOTTOM, 4160), stored("x", ALL, 9000)]
    plan = plan_reads([want("w", Box((5, 1), (1, 2)))], there)
    assert [(b.start, b.nbytes) for b in plan.batches] == [(4160, 64)]
    assert plan_reads([], there).batches == ()


def test_neighbours_are_read_together_and_far_ones_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "GAP_BYTES", 100)
    monkeypatch.setattr(reads, "BATCH_BYTES", 300)
    names = ["a", "b", "c", "d", "e"]
    starts = [0, 128, 356, 485, 700]
    there = [stored(n, ALL, s) for n, s in zip(names, starts, strict=True)]
    there.append(stored("f", ALL, 128, key="g"))
    plan = plan_reads([want(n, ALL) for n in [*names, "f"]], there)
    found = [(b.key, b.start, b.nbytes, len(b.reads)) for b in plan.batches]
    assert found == [
        ("f", 0, 256, 2),
        ("f", 356, 257, 2),
        ("f", 700, 128, 1),
        ("g", 128, 128, 1),
    ]


def test_blocks_of_a_large_slice_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "BLOCK_BYTES", 32)
    monkeypatch.setattr(reads, "GAP_BYTES", 0)
    there = [stored("w", ALL, 4096, blocks=4)]  # 128 bytes: a block is two rows
    plan = plan_reads([want("w", Box((1, 0), (1, 4))), want("w", Box((7, 3), (1, 1)))], there)
    found = [(r.start, r.nbytes, r.first_block) for b in plan.batches for r in b.reads]
    assert found == [(4096, 32, 0), (4192, 32, 3)]
    whole = plan_reads([want("w", Box((1, 0), (7, 1)))], there).batches[0].reads[0]
    assert (whole.nbytes, whole.first_block) == (128, None)
    whole = plan_reads([want("w", ALL), want("w", Box((1, 0), (1, 4)))], there).batches[0].reads[0]
    assert (whole.first_block, whole.direct, len(whole.pieces)) == (None, 0, 2)


def test_an_empty_want_needs_nothing() -> None:
    plan = plan_reads([want("w", Box((0, 0), (0, 4)), (0, 4))], [])
    assert (plan.batches, plan.bytes_needed) == ((), 0)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (want("w", ALL, dtype="float16"), "w: dtype float16 in the target, float32 stored"),
        (want("w", Box((0, 0), (8, 5)), (8, 5)), r"w: shape \(8, 5\) in the target"),
        (want("v", ALL), "v: 32 of 32 elements"),
        (want("w", ALL), "w: 16 of 32 elements"),
    ],
)
def test_what_does_not_fit_is_named(wanted: Want, why: str) -> None:
    with pytest.raises(MismatchError, match=why):
        plan_reads([wanted], [stored("w", TOP, 0)])


def test_many_problems_are_counted() -> None:
    with pytest.raises(MismatchError, match="and 3 more") as told:
        plan_reads([want(f"w{n}", ALL) for n in range(8)], [])
    assert str(told.value).count("stored by no rank") == 5


def test_another_rank_s_own_tensor_is_not_taken() -> None:
    piece = Slice(TensorKey("rng", 1), "uint8", (4,), Box.whole((4,)))
    mine = Want(TensorKey("rng", 0), "uint8", (4,), Box.whole((4,)))
    with pytest.raises(MismatchError, match=r"rng \(rank 0\)"):
        plan_reads([mine], [Stored(piece, "f", 0, bytes(32), (), 1)])
    assert np.prod(mine.shape) == mine.nbytes
