"""The record: columns in, slices out; what does not fit is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.format import digests, names
from forebay.format.record import Columns, Record, read_record, stored_slices, write_record
from forebay.format.slices import Box
from tests.build import ATTEMPT, STEP, B, Rank, W, entries_of, image_of, record_of, two_nodes


def good() -> Record:
    return record_of(two_nodes()[0] | two_nodes()[1])


def changed(**fields: Any) -> bytes:
    return write_record(msgspec.structs.replace(good(), **fields))


def columns(**fields: Any) -> bytes:
    return changed(slices=msgspec.structs.replace(good().slices, **fields))


def test_a_record_comes_back() -> None:
    record = good()
    assert read_record(write_record(record)) == record
    ranks = two_nodes()[0] | two_nodes()[1]
    expected = []
    for rank, made in ranks.items():
        expected += image_of(rank, made, names.shard_key(STEP, ATTEMPT, 0, rank))[2]
    assert list(stored_slices(record)) == expected
    assert len(expected) == 3


def test_scalars_empty_parts_and_owned_tensors() -> None:
    scalar = np.array(2.5)
    rank = Rank(entries=entries_of(("s", scalar)))
    rank.part("s", scalar).part("mine", B, owner=0).part("none", np.zeros((0, 3)))
    found = list(stored_slices(read_record(write_record(record_of({0: rank})))))
    assert sorted((str(s.slice.key), s.slice.box) for s in found) == [
        ("mine (rank 0)", Box((0,), (5,))),
        ("s", Box((), ())),
    ]


def test_block_digests_go_to_their_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK_BYTES", 32), ("BLOCKS_ABOVE_BYTES", 64)):
        monkeypatch.setattr(digests, name, value)
    rank = Rank(entries=entries_of(("w", W), ("b", B))).part("w", W).part("b", B)
    found = {s.slice.key.fqn: s for s in stored_slices(record_of({0: rank}))}
    data = W.tobytes()
    assert found["w"].blocks == tuple(
        digests.digest(data[at : at + 32]) for at in range(0, len(data), 32)
    )
    assert found["b"].blocks == ()


def test_a_rank_without_tensors_stores_no_image() -> None:
    record = record_of({0: Rank(entries=entries_of(n=1))})
    assert (record.shards[0].key, record.shards[0].nbytes) == ("", 0)
    assert read_record(write_record(record)) == record


BAD_COLUMNS: list[tuple[dict[str, Any], str]] = [
    ({"rank": [0, 0]}, "different lengths"),
    ({"start": [4096]}, "different lengths"),
    ({"digest": "00" * 32}, "different lengths"),
    ({"digest": "zz" * 96}, "not hexadecimal"),
    ({"blocks": "z"}, "not hexadecimal"),
    ({"blocks": "00" * 32}, "more numbers"),
    ({"name": [0, 1, 9]}, "outside the record's tables"),
    ({"name": [0, 1, -1]}, "negative"),
    ({"shape": [5, 5, 5]}, "outside the record's tables"),
    ({"dtype": [9, 9, 9]}, "outside the record's tables"),
    ({"rank": [0, 0, 5]}, "outside the record's tables"),
    ({"start": [4096, 4096, 10**9]}, "outside its shard"),
    ({"start": [0, 4096, 4096]}, "outside its shard"),
    ({"offsets": [0, 0, 0, 4, 0, 7]}, "more numbers"),
    ({"offsets": [0, 0, 0, 4]}, "fewer numbers"),
    ({"sizes": [9] * 5}, "does not lie inside"),
    ({"sizes": [0] * 5}, "outside its shard"),
    ({"sizes": [-1] * 5}, "negative"),
]


@pytest.mark.parametrize(("fields", "why"), BAD_COLUMNS, ids=[str(f)[:40] for f, _ in BAD_COLUMNS])
def test_columns_that_do_not_fit_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(FormatError, match=why):
        read_record(columns(**fields), "x")


def test_fields_that_do_not_fit_are_refused() -> None:
    record = good()
    zero, one = record.shards
    replace = msgspec.structs.replace
    cases: list[tuple[dict[str, Any], str]] = [
        ({"version": 2}, "upgrade"),
        ({"features": ["sparse"]}, "sparse"),
        ({"shards": [zero, zero]}, "two shards"),
        ({"world_size": 1}, "outside world size"),
        ({"node": 1}, "node 1 of 1"),
        ({"node": -1}, "node -1"),
        ({"trees": []}, "tree that is not there"),
        ({"dtypes": ["int3", "int5"]}, "int3"),
        ({"attempt": "other"}, "damaged or forged"),
        ({"step": 8}, "damaged or forged"),
        ({"shards": [zero, replace(one, key="../../etc/passwd")]}, "damaged or forged"),
        ({"shards": [zero, replace(one, nbytes=4096)]}, "outside its shard"),
    ]
    for fields, why in cases:
        with pytest.raises(FormatError, match=why):
            read_record(changed(**fields), "x")


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^x: "):
        read_record(data, "x")
    with pytest.raises(FormatError, match=r"^x: "):
        read_record(zstandard.ZstdCompressor().compress(data), "x")


def test_every_cut_is_refused() -> None:
    data = write_record(good())
    for cut in range(len(data)):
        with pytest.raises(FormatError):
            read_record(data[:cut])


def test_an_unknown_field_and_a_bomb_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = msgspec.to_builtins(good()) | {"extra": 1}
    with pytest.raises(FormatError, match="extra"):
        read_record(zstandard.ZstdCompressor().compress(msgspec.json.encode(raw)))
    monkeypatch.setattr("forebay.format.record.MAX_RECORD_BYTES", 100)
    with pytest.raises(FormatError, match="limit 100"):
        read_record(write_record(good()))


def test_columns_have_no_room_for_more() -> None:
    assert set(Columns.__struct_fields__) >= {"rank", "digest", "blocks"}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(good().slices) | {"x": []}, Columns)
