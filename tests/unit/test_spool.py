"""Slices that are too many to hold: the same checks, the same index, in parts."""

from __future__ import annotations

import io
import random
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.commit.cover import keep_one_copy
from forebay.commit.spool import Spool, view
from forebay.errors import ConflictError, FullError
from forebay.format import index
from forebay.format.index import write_index, write_parts
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Stored, Table


def row(fqn: str, at: int, of: int, rank: int, owner: int | None = None, blocks: int = 0) -> Stored:
    piece = Slice(TensorKey(fqn, owner), "uint8", (of, 3), Box((at, 0), (1, 3)))
    if blocks:
        tall = (2**25, 3)
        piece = Slice(TensorKey(fqn, owner), "uint8", tall, Box((0, 0), tall))
    sign = bytes([at % 256, rank % 256]) * 16
    return Stored(piece, f"data/{rank}", 4096 * at, sign, (sign,) * blocks, rank)


def checkpoint(seed: int, tensors: int) -> list[list[Stored]]:
    """What ranks stored: some tensors in many slices, some in one, some their own, some large."""
    draw = random.Random(seed)
    ranks: list[list[Stored]] = [[] for _ in range(8)]
    for number in range(tensors):
        fqn, of = f"w{draw.randrange(1000)}.{number}", draw.choice((1, 2, 17, 40))
        for at in range(of):
            rank = draw.randrange(8)
            ranks[rank].append(row(fqn, at, of, rank))
    for rank, rows in enumerate(ranks):
        rows.append(row("own", 0, 1, rank, owner=rank))
        draw.shuffle(rows)
    ranks[3].append(row("large", 0, 1, 3, blocks=6))
    return ranks


@pytest.mark.parametrize("group_rows", [7, 65_536])
@given(seed=st.integers(0, 2**32), most=st.integers(1, 400), tensors=st.integers(0, 30))
def test_parts_are_as_the_whole(group_rows: int, seed: int, most: int, tensors: int) -> None:
    ranks = checkpoint(seed, tensors)
    spool = Spool(keep_one_copy, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "ROW_GROUP_ROWS", group_rows)
        for rows in ranks:
            spool.add(Table.of(rows))
        every = [one for rows in ranks for one in rows]
        assert spool.is_large == (most <= len(every))
        with spool.sink() as sink:
            assert write_parts(spool.parts, sink) == len(every)
            assert isinstance(sink, io.BytesIO) != spool.is_large
            data = view(sink)
            assert bytes(data) == write_index(every)
            data.release()
    assert len(spool) == len(every)
    held: list[str] = []
    for part in spool.parts():
        names = [key.fqn for key in part.tensors]
        assert not held or held[-1] < names[0]  # no tensor in two parts, and sorted
        assert len(part) <= most + 40 or not spool.is_large
        held += names
    assert spool.common == {one.slice.key.fqn for one in every if one.slice.key.rank is None}


def test_copies_in_different_runs_are_one() -> None:
    spool = Spool(keep_one_copy, most_rows=2)
    for rank in range(5):
        spool.add(Table.of([row("a", 0, 1, 0), row("b", 0, 1, 7)]))
        assert spool.is_large, rank
    assert sorted(one.slice.key.fqn for one in spool) == ["a", "b"]
    spool = Spool(keep_one_copy, most_rows=2)
    for rank in (1, 2):
        spool.add(Table.of([row("a", 0, 1, rank), row("b", 0, 1, 7)]))
    with pytest.raises(ConflictError, match="rank 1 and rank 2 stored different bytes"):
        len(spool)


def test_nothing_at_all() -> None:
    spool = Spool(keep_one_copy)
    assert [len(part) for part in spool.parts()] == [0]
    assert not spool.is_large


def test_no_room_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spool = Spool(keep_one_copy, most_rows=100)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(FullError, match=str(tmp_path)):
            spool.add(Table.of(row("w", at, 200, 0) for at in range(200)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    spool = Spool(keep_one_copy, most_rows=1)
    with pytest.raises(FullError, match="name another place in TMPDIR"):
        spool.add(Table.of([row("w", 0, 1, 0)]))


def test_a_file_of_slices_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spool = Spool(keep_one_copy, most_rows=1)
    spool.add(Table.of([row("w", 0, 1, 0)]))
    assert spool.is_large
    assert list(tmp_path.iterdir()) == []
