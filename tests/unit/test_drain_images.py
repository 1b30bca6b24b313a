"""Hashing, writing, uploading and sealing images, in this process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from forebay.drain.seal import build_record, put_record
from forebay.drain.spill import hash_slot, write_image
from forebay.drain.upload import upload_file
from forebay.errors import ConflictError, StoreError
from forebay.format import names
from forebay.format.digests import digest
from forebay.format.record import read_record, stored_slices, write_record
from forebay.format.slot import StartDigest
from forebay.storage.directory import DirectoryStore
from forebay.storage.memory import MemoryStore
from tests.player import Player
from tests.unit.test_drain_job import part, snapshot

KEY = names.shard_key(1, "a", 0, 0)


def test_every_slice_witness_and_header_is_digested(tmp_path: Path) -> None:
    player = Player(tmp_path, "/run", nbytes=70 * 2**20)
    player.fill(1)
    start = player.head.image_start(0)
    with memoryview(player.map) as view, view[start : start + player.head.image_bytes] as area:
        found = hash_slot(area, player.layout)
    data = player.data(1)
    assert found.header == digest(player.image.header)
    assert found.slices == (digest(data),)
    assert len(found.blocks[0]) == 5
    assert found.blocks[0][4] == digest(data[64 * 2**20 :])
    assert found.witnesses == (digest(b"the same"),)
    player.die()


def test_an_equal_object_counts_as_written_and_any_other_is_refused() -> None:
    store = MemoryStore()
    data = bytes(range(256)) * 40_000
    told: list[int] = []
    for _ in range(2):
        write_image(store, KEY, memoryview(data), on_progress=told.append)
    assert sum(told) == 2 * len(data)
    other = data[:-1] + b"x"
    with pytest.raises(ConflictError):
        write_image(store, KEY, memoryview(other), on_progress=told.append)
    assert store.get(KEY, max_bytes=1 << 30) == data


@pytest.mark.parametrize("nbytes", [1, 4096, 100_001, 70 * 2**20 + 5])
def test_an_upload_is_the_local_image(tmp_path: Path, nbytes: int) -> None:
    local, durable = DirectoryStore(tmp_path / "local"), DirectoryStore(tmp_path / "durable")
    data = bytes(range(251)) * (nbytes // 251 + 1)
    local.put_large(KEY, memoryview(data[:nbytes]))
    told: list[int] = []
    upload_file(local, durable, KEY, nbytes, on_progress=told.append)
    assert durable.get(KEY, max_bytes=1 << 30) == data[:nbytes]
    assert sum(told) == nbytes


def test_a_local_image_that_is_cut_or_gone_is_not_uploaded(tmp_path: Path) -> None:
    local, durable = DirectoryStore(tmp_path / "local"), MemoryStore()
    upload = lambda: upload_file(local, durable, KEY, 4097, on_progress=lambda _: None)
    with pytest.raises(StoreError, match="cannot be read back"):
        upload()
    local.put(KEY, bytes(4096))
    with pytest.raises(StoreError, match=r"expected 4097 bytes .* found 4096"):
        upload()
    assert durable.head(KEY) is None


def sealed() -> tuple[object, ...]:
    one, two = part(0), part(1)
    for each in (one, two):
        each.layout = msgspec.structs.replace(
            each.layout, start_digests=[StartDigest("model/big", (0,), (4,), "ab" * 32)]
        )
        image = memoryview(bytes(each.layout.image_bytes))
        each.digests = hash_slot(image, each.layout)
    two.layout = msgspec.structs.replace(two.layout, slices=[], image_bytes=0)
    two.digests = hash_slot(memoryview(bytes(4096)), two.layout)
    return snapshot(one, two), one, two


def test_the_record_says_what_each_rank_stored() -> None:
    made, _, _ = sealed()
    record = build_record(made, 7.0)  # type: ignore[arg-type]
    assert read_record(write_record(record)) == record
    assert [shard.key for shard in record.shards] == [names.shard_key(1, "a", 0, 0), ""]
    assert [shard.nbytes for shard in record.shards] == [4100, 0]
    assert len(record.trees) == 1  # equal trees stand once
    (stored,) = stored_slices(record)
    assert (stored.rank, stored.start, stored.digest) == (0, 4096, digest(bytes(4)))
    assert [(w.rank, w.scope, w.digest) for w in record.witnesses] == [
        (0, "start", "ab" * 32),
        (1, "start", "ab" * 32),
    ]


def test_a_record_written_twice_is_one_and_another_is_refused() -> None:
    made, _, _ = sealed()
    store = MemoryStore()
    put_record(store, build_record(made, 7.0))  # type: ignore[arg-type]
    put_record(store, build_record(made, 8.0))  # type: ignore[arg-type]
    key = names.record_key(1, "a", 0)
    assert read_record(store.get(key, max_bytes=1 << 20)).written_s == 7.0
    other = msgspec.structs.replace(build_record(made, 7.0), run="/other")  # type: ignore[arg-type]
    with pytest.raises(ConflictError):
        put_record(store, other)
