"""The index: comes back, and a reader of few tensors reads few row groups."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.format import index
from forebay.format.index import read_index, read_tables, write_index
from forebay.format.row_group import RowGroup
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Ints, Stored, Table


def stored(fqn: str, *, rank: int = 0, at: int = 0, owner: int | None = None) -> Stored:
    """Half of a tensor of 8 rows; the second half has 5 blocks."""
    width = 5 * 2**20 if at else 4
    piece = Slice(TensorKey(fqn, owner), "float32", (8, width), Box((at, 0), (4, width)))
    seal = bytes([rank, at]) * 16
    blocks = (seal, seal[::-1], seal, seal, seal) if at else ()
    return Stored(piece, f"file-{rank}", 4096 + at, seal, blocks, rank)


def many(count: int) -> list[Stored]:
    return [stored(f"layer.{n:05d}", rank=at // 4, at=at) for n in range(count) for at in (0, 4)]


def test_slices_come_back_sorted() -> None:
    scalar = Slice(TensorKey("a"), "bfloat16", (), Box((), ()))
    rows = [
        stored("b", at=4),
        stored("b"),
        stored("own", owner=1, rank=1),
        stored("own", owner=0),
        Stored(scalar, "f", 4096, bytes(32), (), 3),
    ]
    mixed = rows[:]
    random.Random(1).shuffle(mixed)
    found = list(read_index(write_index(mixed)))
    assert found == [rows[4], rows[1], rows[0], rows[3], rows[2]]
    assert write_index(mixed) == write_index(rows)


def test_only_what_was_asked_for() -> None:
    data = write_index(many(10))
    found = list(read_index(data, ["layer.00003", "layer.00007", "nowhere"]))
    assert {s.slice.key.fqn for s in found} == {"layer.00003", "layer.00007"}
    assert len(found) == 4
    assert list(read_index(data, [])) == []


def test_few_row_groups_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "ROW_GROUP_ROWS", 16)
    data = write_index(many(200))
    assert pq.ParquetFile(io.BytesIO(data)).num_row_groups == 25
    read: list[int] = []

    class Counting(pq.ParquetFile):  # type: ignore[misc]
        def read_row_group(self, group: int, *args: object, **kwargs: object) -> pa.Table:
            read.append(group)
            return super().read_row_group(group, *args, **kwargs)

    monkeypatch.setattr(pq, "ParquetFile", Counting)
    assert len(list(read_index(data, ["layer.00000"]))) == 2
    assert read == [0, 0]  # places, and then digests
    read.clear()
    assert len(list(read_index(data, ["layer.00199", "layer.00101"]))) == 4
    assert read == [12, 12, 24, 24]
    read.clear()
    assert len(list(read_index(data))) == 400
    assert len(read) == 50


def test_of_a_row_group_only_what_is_chosen_is_sealed() -> None:
    """Rows are chosen by where they lie; those with blocks too."""
    data = write_index(many(10))
    seen: list[int] = []

    def choose(table: Table) -> Ints:
        seen.append(len(table))
        return np.flatnonzero(table.offsets[table.first[:-1]] == 4)

    (table,) = read_tables(data, ["layer.00003", "layer.00007"], "x", choose)
    assert list(table) == [row for row in many(10) if row.blocks and row.slice.key.fqn[-1] in "37"]
    assert seen == [4]
    assert list(read_tables(data, None, "x", lambda _: np.zeros(0, np.int64))) == []


def test_tensors_of_few_slices_stand_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wanted one is found without a look at the groups of the others, whose range it is in."""
    monkeypatch.setattr(index, "ROW_GROUP_ROWS", 64)
    rows = [
        Stored(
            Slice(TensorKey(f"w{n}"), "int8", (40,), Box((at,), (1,))), "f", at, bytes(32), (), 0
        )
        for n in range(5)
        for at in range(40)
    ]
    rows += [
        Stored(Slice(TensorKey(f"w{n}/step"), "int8", (), Box((), ())), "f", 0, bytes(32), (), 0)
        for n in range(4)
    ]
    data = write_index(rows)
    assert len(list(read_index(data))) == len(rows)
    read: list[int] = []
    inner = RowGroup.__init__

    def counting(self: RowGroup, *given: Any) -> None:
        read.append(given[2])
        inner(self, *given)

    monkeypatch.setattr(RowGroup, "__init__", counting)
    found = list(read_index(data, ["w1/step", "w3/step"]))
    assert ([s.slice.key.fqn for s in found], read) == (["w1/step", "w3/step"], [0])
    read.clear()
    assert len(list(read_index(data, ["w1/step", "w2"]))) == 41
    assert read[0] == 0
    assert set(read) < {0, 1, 2, 3, 4}


def test_a_slice_over_two_groups_is_found_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "ROW_GROUP_ROWS", 3)
    data = write_index(many(9))
    for n in range(9):
        assert len(list(read_index(data, [f"layer.{n:05d}"]))) == 2


def test_an_index_of_nothing() -> None:
    assert list(read_index(write_index([]))) == []


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^x: "):
        list(read_index(data, None, "x"))


def test_every_cut_is_refused() -> None:
    data = write_index(many(3))
    for cut in range(0, len(data), 7):
        with pytest.raises(FormatError):
            list(read_index(data[:cut]))


def table_of(data: bytes) -> pa.Table:
    return pq.read_table(io.BytesIO(data))


def written(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, use_dictionary=["fqn", "dtype", "file"])
    return sink.getvalue()


def test_another_table_is_refused() -> None:
    with pytest.raises(FormatError, match="version 1"):
        list(read_index(written(pa.table({"fqn": ["a"]}))))
    table = table_of(write_index(many(2)))
    assert list(read_index(written(table))) == many(2)
    with pytest.raises(FormatError, match="columns"):
        list(read_index(written(table.drop_columns(["digest"]))))
    with pytest.raises(FormatError, match="version 1"):
        list(read_index(written(table.replace_schema_metadata({b"forebay.index": b"2"}))))


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("nbytes", pa.array([63] * 4), "expected 64"),
        ("start", pa.array([-1] * 4), "expected"),
        ("sizes", pa.array([[9, 4]] * 4), "does not lie inside"),
        ("offsets", pa.array([[0]] * 4), "does not lie inside"),
        ("dtype", pa.array(["int3"] * 4), "int3"),
    ],
)
def test_rows_that_lie_are_refused(column: str, value: pa.Array, why: str) -> None:
    table = table_of(write_index(many(2)))
    place = table.schema.get_field_index(column)
    with pytest.raises(FormatError, match=why):
        list(read_index(written(table.set_column(place, column, value))))


def test_reading_loads_no_pandas() -> None:
    """Where it is installed pyarrow imports it at many turns, which takes longer than the rest."""
    code = (
        "import sys; from forebay.format.index import read_index; "
        "assert len(list(read_index(sys.stdin.buffer.read(), ['layer.00001']))) == 2; "
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], input=write_index(many(3)), check=True)


def test_an_owner_that_no_rank_can_be_is_refused() -> None:
    table = table_of(write_index(many(2)))
    place = table.schema.get_field_index("owner")
    for owner in (-1, -5):
        wrong = table.set_column(place, "owner", pa.array([owner] * 4, pa.int32()))
        with pytest.raises(FormatError, match="an owner below 0"):
            list(read_index(written(wrong)))
