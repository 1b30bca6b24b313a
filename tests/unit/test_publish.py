"""The commit point: one manifest whoever races, the right verdict for each, nothing half."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest

from forebay.commit import gather as gather_module
from forebay.commit import publish as publish_module
from forebay.commit.catalog import Catalog
from forebay.commit.gather import Checked, gather
from forebay.commit.publish import Verdict, commit_step, finish, publish
from forebay.commit.spool import Spool
from forebay.errors import (
    ConflictError,
    DamagedError,
    DeadlineError,
    FormatError,
    FullError,
    IncompleteError,
    NotFoundError,
    StoreError,
)
from forebay.format import names
from forebay.format.manifest import Manifest
from forebay.storage.memory import MemoryStore
from forebay.storage.store import CreateOutcome
from tests.build import ATTEMPT, STEP, put_nodes, put_record, two_nodes


def ready(store: MemoryStore, attempt: str = ATTEMPT) -> Checked:
    put_nodes(store, two_nodes(), attempt=attempt)
    return gather(store, STEP, attempt, nodes=2, timeout_s=0)


def together(*work: Callable[[], Verdict]) -> list[Verdict]:
    barrier = threading.Barrier(len(work))

    def run(one: Callable[[], Verdict]) -> Verdict:
        barrier.wait()
        return one()

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, work))


def manifest_of(store: MemoryStore) -> Manifest:
    return Catalog(store).manifest(STEP)


def manifests(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list(names.MANIFEST_PREFIX)]


def test_a_published_step_can_be_read() -> None:
    store = MemoryStore()
    verdict, manifest = publish(store, ready(store), clock=lambda: 12.5)
    assert verdict is Verdict.COMMITTED
    catalog = Catalog(store)
    assert catalog.steps() == [STEP]
    assert catalog.manifest(STEP) == manifest
    assert (manifest.committed_s, manifest.tensors, manifest.slices) == (12.5, 2, 3)
    sizes = [i.size for i in store.list(names.DATA_PREFIX) if i.key.endswith(".safetensors")]
    assert manifest.data_bytes == sum(sizes)


def test_sixteen_of_one_attempt_end_with_one_manifest() -> None:
    store = MemoryStore()
    checked = ready(store)
    verdicts = together(*[lambda: publish(store, checked)[0]] * 16)
    assert sorted(v.value for v in verdicts) == ["committed"] + ["same"] * 15
    assert manifests(store) == [names.manifest_key(STEP)]
    Catalog(store).entries(Catalog(store).manifest(STEP))


def test_two_attempts_race_and_all_know_who_won() -> None:
    store = MemoryStore()
    both = {attempt: ready(store, attempt) for attempt in ("one", "two")}
    order = ["one", "two"] * 8
    verdicts = together(*[lambda a=a: publish(store, both[a])[0] for a in order])
    winner = Catalog(store).manifest(STEP).attempt
    for attempt, verdict in zip(order, verdicts, strict=True):
        assert (verdict is Verdict.LOST) == (attempt != winner)
    assert verdicts.count(Verdict.COMMITTED) == 1
    assert len(manifests(store)) == 1


class Lossy(MemoryStore):
    """The reply to a create is lost; ``done`` says whether it was carried out before."""

    def __init__(self, *, done: bool) -> None:
        super().__init__()
        self.done = done

    def create(self, key: str, data: bytes) -> CreateOutcome:
        if not key.startswith(names.MANIFEST_PREFIX):
            return super().create(key, data)
        if self.done:
            super().create(key, data)
        return CreateOutcome.UNKNOWN


def test_an_unknown_outcome_is_settled_by_reading_back() -> None:
    store = Lossy(done=True)
    verdict, manifest = publish(store, ready(store))
    assert verdict is Verdict.COMMITTED
    assert Catalog(store).manifest(STEP) == manifest
    assert publish(store, ready(store, "two"))[0] is Verdict.LOST


def test_an_unknown_outcome_that_left_nothing_is_an_error_and_deletes_nothing() -> None:
    store = Lossy(done=False)
    checked = ready(store)
    before = {info.key for info in store.list("")}
    with pytest.raises(StoreError, match=r"reply to its creation was lost.*forebay commit"):
        publish(store, checked)
    assert {info.key for info in store.list("")} >= before
    assert manifests(store) == []
    store.done = True
    assert finish(store, STEP)[0] is Verdict.COMMITTED


def test_a_damaged_manifest_in_the_way_is_told() -> None:
    store = MemoryStore()
    checked = ready(store)
    store.put(names.manifest_key(STEP), b"rubbish")
    with pytest.raises(FormatError):
        publish(store, checked)


def test_the_manifest_comes_last() -> None:
    class Full(MemoryStore):
        refuse = ""

        def create(self, key: str, data: bytes) -> CreateOutcome:
            if self.refuse and key.endswith(self.refuse):
                raise FullError(f"{key}: no space")
            return super().create(key, data)

    for refuse in ("index.parquet", "state.msgpack.zst"):
        store = Full()
        checked = ready(store)
        store.refuse = refuse
        with pytest.raises(FullError):
            publish(store, checked)
        assert manifests(store) == []


def test_an_index_another_version_wrote_stands() -> None:
    store = MemoryStore()
    checked = ready(store)
    publish(store, checked)
    index = names.index_key(STEP, ATTEMPT)
    other = MemoryStore()
    ready(other)
    encoded = io.BytesIO()
    there = pq.read_table(io.BytesIO(store.get(index, max_bytes=1 << 20)))
    pq.write_table(there, encoded, compression="none", use_dictionary=["fqn", "dtype", "file"])
    other.put(index, encoded.getvalue())
    _, manifest = publish(other, checked)
    assert Catalog(other).checked(manifest.index, 1 << 20) == encoded.getvalue()
    assert manifest.index != publish(store, checked)[1].index
    assert list(Catalog(other).slices(manifest)) == list(Catalog(store).slices(manifest_of(store)))


@pytest.mark.parametrize("key", [names.index_key, names.state_key])
def test_what_says_something_else_is_not_vouched_for(key: Callable[[int, str], str]) -> None:
    store = MemoryStore()
    checked = ready(store)
    store.put(key(STEP, ATTEMPT), b"of nobody")
    with pytest.raises(DamagedError):
        publish(store, checked)
    assert manifests(store) == []


def test_commit_step_refuses_the_second_attempt() -> None:
    store = MemoryStore()
    for attempt in ("one", "two"):
        put_nodes(store, two_nodes(), attempt=attempt)
    assert commit_step(store, STEP, "one", nodes=2, timeout_s=0)[0] is Verdict.COMMITTED
    assert commit_step(store, STEP, "one", nodes=2, timeout_s=0)[0] is Verdict.SAME
    with pytest.raises(ConflictError, match="step 7 is already committed by attempt one"):
        commit_step(store, STEP, "two", nodes=2, timeout_s=0)
    with pytest.raises(DeadlineError):
        commit_step(store, STEP, "three", nodes=2, timeout_s=0)


def test_finish_an_empty_store_and_an_unknown_step() -> None:
    store = MemoryStore()
    with pytest.raises(NotFoundError, match="not a forebay run"):
        finish(store, STEP)
    put_nodes(store, two_nodes())
    with pytest.raises(NotFoundError, match="nothing was stored for step 8"):
        finish(store, 8)
    with pytest.raises(NotFoundError, match="nothing was stored for step 7"):
        finish(store, STEP, "other")


def test_finish_commits_what_is_complete_and_says_what_is_not() -> None:
    store, made = MemoryStore(), MemoryStore()
    records = put_nodes(made, two_nodes())
    for info in made.list(""):
        if info.key.endswith(".safetensors"):
            store.put(info.key, made.get(info.key, max_bytes=1 << 20))
    with pytest.raises(IncompleteError, match="attempt first: no node's record is there"):
        finish(store, STEP)
    put_record(store, records[0])
    with pytest.raises(IncompleteError, match="attempt first: no record of nodes 1 of 2"):
        finish(store, STEP)
    put_record(store, records[1])
    verdict, manifest = finish(store, STEP)
    assert (verdict, manifest.attempt) == (Verdict.COMMITTED, ATTEMPT)
    assert finish(store, STEP) == (Verdict.SAME, manifest)


def test_finish_asks_which_of_two_complete_attempts() -> None:
    store = MemoryStore()
    for attempt in ("one", "two"):
        put_nodes(store, two_nodes(), attempt=attempt)
    with pytest.raises(ConflictError, match="attempts one, two are complete: name one"):
        finish(store, STEP)
    assert finish(store, STEP, "two")[1].attempt == "two"
    assert finish(store, STEP)[1].attempt == "two"
    with pytest.raises(ConflictError, match="already committed by attempt two"):
        finish(store, STEP, "one")


def test_slices_on_a_disk_and_a_large_index_are_committed_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, spooled = MemoryStore(), MemoryStore()
    _, expected = publish(plain, ready(plain))
    monkeypatch.setattr(gather_module, "Spool", functools.partial(Spool, most_rows=1))
    monkeypatch.setattr(publish_module, "_LARGE_BYTES", 0)
    verdict, manifest = publish(spooled, ready(spooled))
    assert verdict is Verdict.COMMITTED
    assert (manifest.index, manifest.state) == (expected.index, expected.state)
    assert publish(spooled, ready(spooled))[0] is Verdict.SAME
