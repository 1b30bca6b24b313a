"""Which checkpoints there are; what a manifest names is checked before it is used."""

from __future__ import annotations

import io

import pytest

from forebay.commit.catalog import Catalog, ObjectFile, pack_entries, unpack_entries
from forebay.commit.publish import finish
from forebay.errors import DamagedError, FormatError, NotFoundError
from forebay.format import names
from forebay.format.manifest import Manifest, Ref
from forebay.format.slices import TensorKey
from forebay.storage.memory import MemoryStore
from tests.build import ATTEMPT, STEP, put_nodes, put_record, two_nodes


def committed(*steps: int) -> MemoryStore:
    store = MemoryStore()
    for step in steps or (STEP,):
        put_nodes(store, two_nodes(), step=step)
        finish(store, step)
    return store


def swap(store: MemoryStore, key: str, data: bytes) -> None:
    store.delete(key)
    store.put(key, data)


def flip(store: MemoryStore, key: str, at: int = -1) -> None:
    data = bytearray(store.get(key, max_bytes=1 << 20))
    data[at] ^= 1
    swap(store, key, bytes(data))


def test_steps_are_manifests_and_nothing_else() -> None:
    store = committed(30, 7, 200)
    store.put("manifests/step-50.backup", b"mine")
    store.put("manifests/50.json", b"mine")
    put_nodes(store, two_nodes(), step=300)
    catalog = Catalog(store)
    assert catalog.steps() == [7, 30, 200]
    assert catalog.latest() == 200
    assert Catalog(MemoryStore()).latest() is None


def test_a_step_that_is_not_there_tells_the_newest() -> None:
    with pytest.raises(NotFoundError, match="no committed step 9: newest are 7, 30"):
        Catalog(committed(7, 30)).manifest(9)
    with pytest.raises(NotFoundError, match="not a forebay run"):
        Catalog(MemoryStore()).manifest(9)
    store = MemoryStore()
    put_nodes(store, two_nodes())
    with pytest.raises(NotFoundError, match="it has none yet"):
        Catalog(store).manifest(STEP)


def test_a_manifest_under_another_step_s_name_is_refused() -> None:
    store = committed(7, 30)
    swap(store, names.manifest_key(30), store.get(names.manifest_key(7), max_bytes=1 << 20))
    with pytest.raises(FormatError, match="is the manifest of step 7"):
        Catalog(store).manifest(30)


def opened() -> tuple[MemoryStore, Catalog, Manifest]:
    store = committed()
    catalog = Catalog(store)
    return store, catalog, catalog.manifest(STEP)


def test_everything_a_manifest_names_is_read_back() -> None:
    _, catalog, manifest = opened()
    assert [entry.path for entry in catalog.entries(manifest)] == ["", "w", "b", "step"]
    assert [catalog.record(manifest, node).node for node in (0, 1)] == [0, 1]
    every = list(catalog.slices(manifest))
    assert len(every) == 3
    assert list(catalog.slices(manifest, ["b"])) == [
        s for s in every if s.slice.key == TensorKey("b")
    ]


@pytest.mark.parametrize("part", ["state", "index", "record"])
def test_damage_is_seen_in_whatever_it_names(part: str) -> None:
    store, catalog, manifest = opened()
    ref: Ref = {
        "state": manifest.state,
        "index": manifest.index,
        "record": manifest.records[1],
    }[part]

    def read() -> None:
        catalog.entries(manifest)
        list(catalog.slices(manifest))
        catalog.record(manifest, 1)

    read()
    whole = store.get(ref.key, max_bytes=1 << 20)
    flip(store, ref.key, len(whole) // 2)
    with pytest.raises(DamagedError, match=f"{ref.key}: expected digest"):
        read()
    swap(store, ref.key, whole[:-1])
    with pytest.raises(DamagedError, match=f"{ref.key}: expected {ref.nbytes} bytes, found"):
        read()
    store.delete(ref.key)
    with pytest.raises(DamagedError, match=f"{ref.key}: is gone, the manifest names it"):
        read()


def test_unfinished_attempts_are_listed_with_what_they_lack() -> None:
    store = committed(7)
    now = max(info.modified_s for info in store.list("")) + 100
    records = put_nodes(MemoryStore(), two_nodes(), step=9, attempt="half")
    put_record(store, records[1])
    put_nodes(store, two_nodes(), step=9, attempt="whole")
    put_nodes(store, two_nodes(), step=7, attempt="loser")
    store.put(names.shard_key(11, "bare", 0, 0), b"x")
    store.put("data/000000000011/notes.txt", b"mine")
    found = {(u.step, u.attempt): u for u in Catalog(store, clock=lambda: now).unfinished()}
    assert list(found) == [(7, "loser"), (9, "half"), (9, "whole"), (11, "bare")]
    half, whole, bare = found[9, "half"], found[9, "whole"], found[11, "bare"]
    assert (half.present, half.nodes, half.complete) == ((1,), 2, False)
    assert (whole.present, whole.nodes, whole.complete) == ((0, 1), 2, True)
    assert (bare.present, bare.nodes, bare.complete) == ((), None, False)
    assert 0 < half.age_s <= 100


def test_nothing_of_a_step_with_an_unreadable_manifest_is_loose() -> None:
    store = committed(7)
    flip(store, names.manifest_key(7), 3)
    assert Catalog(store).unfinished() == []


def test_entries_pack_and_unpack() -> None:
    entries = two_nodes()[0][0].entries
    data = pack_entries(entries)
    assert unpack_entries(data, "x") == entries
    for bad in (b"", b"garbage", data[:-3]):
        with pytest.raises(FormatError, match="x: "):
            unpack_entries(bad, "x")


def test_an_object_reads_like_a_file() -> None:
    store = MemoryStore()
    data = bytes(range(200))
    store.put("a", data)
    file = ObjectFile(store, Ref("a", len(data), ""))
    plain = io.BytesIO(data)
    for where in ((10, io.SEEK_SET), (-5, io.SEEK_END), (-30, io.SEEK_CUR), (500, io.SEEK_SET)):
        assert file.seek(*where) == plain.seek(*where)
        assert file.tell() == plain.tell()
        assert file.read(12) == plain.read(12)
    file.seek(0)
    assert file.read() == data
    assert io.BufferedReader(ObjectFile(store, Ref("a", 200, ""))).read(7) == data[:7]


def test_an_index_that_names_foreign_objects_is_refused() -> None:
    store, catalog, manifest = opened()
    other = committed(9)
    moved = Catalog(other).manifest(9)
    swap(store, manifest.index.key, other.get(moved.index.key, max_bytes=1 << 20))
    with pytest.raises(FormatError, match="damaged or forged"):
        list(catalog.slices(manifest, ["w"]))
    assert manifest.attempt == ATTEMPT
