"""A store that lets several creators win is found out, whatever way it does so."""

from __future__ import annotations

import threading

import msgspec
import pytest

from forebay.errors import DeniedError, StoreError
from forebay.format.names import PROBE_RESULT_KEY, probe_key
from forebay.storage.memory import MemoryStore
from forebay.storage.probe import Finding, probe, require_exclusive
from forebay.storage.store import CreateOutcome


class Overwriting(MemoryStore):
    """Every create wins, and replaces what was there."""

    def create(self, key: str, data: bytes) -> CreateOutcome:
        super().delete(key)
        return super().create(key, data)


class Lying(MemoryStore):
    """Keeps the first, and tells everybody that they won."""

    def create(self, key: str, data: bytes) -> CreateOutcome:
        super().create(key, data)
        return CreateOutcome.COMMITTED


class Racy(MemoryStore):
    """Right when asked twice, wrong when asked by many at once."""

    def create(self, key: str, data: bytes) -> CreateOutcome:
        outcome = super().create(key, data)
        return CreateOutcome.COMMITTED if key.endswith("-race") else outcome


def require(store: MemoryStore, *, single_writer: bool = False) -> Finding:
    return require_exclusive(store, PROBE_RESULT_KEY, probe_key, single_writer=single_writer)


def test_a_good_store() -> None:
    store = MemoryStore()
    finding = probe(store, probe_key)
    assert finding.exclusive
    assert (finding.winners, finding.creators, finding.again) == (1, 16, "exists")
    assert "exactly one won" in str(finding)
    assert list(store.list("")) == []


def test_without_threads_nobody_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, [3]

    def refuse(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("forebay.storage.probe._START_S", None)  # the three would wait for ever
    store = MemoryStore()
    with pytest.raises(RuntimeError, match="new thread"):
        probe(store, probe_key)
    assert list(store.list("")) == []


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Overwriting, "told 'committed' and replaced it, and 16 of 16 creators"),
        (Lying, "told 'committed', and 16 of 16 creators"),
        (Racy, "told 'exists', and 16 of 16 creators"),
    ],
)
def test_bad_stores_are_refused_or_used_by_one_writer(kind: type[MemoryStore], says: str) -> None:
    store = kind()
    with pytest.raises(StoreError, match=r"commit_mode='single-writer'") as caught:
        require(store)
    assert says in str(caught.value)
    assert not require(store, single_writer=True).exclusive


def test_the_finding_is_kept_and_believed_for_this_store_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore("memory://one")
    first = require(store)
    assert require(store) == first
    moved = MemoryStore("memory://two")
    moved.put(PROBE_RESULT_KEY, store.get(PROBE_RESULT_KEY, max_bytes=4096))
    assert require(moved).url == "memory://two"
    kept = msgspec.json.decode(moved.get(PROBE_RESULT_KEY, max_bytes=4096), type=Finding)
    assert kept.url == "memory://two"


def test_a_bad_finding_is_asked_again() -> None:
    bad = Lying("memory://x")
    require(bad, single_writer=True)
    good = MemoryStore("memory://x")
    good.put(PROBE_RESULT_KEY, bad.get(PROBE_RESULT_KEY, max_bytes=4096))
    assert require(good).exclusive


def test_a_lost_reply_is_no_answer_and_asked_again() -> None:
    class Forgetful(MemoryStore):
        lost = 1

        def create(self, key: str, data: bytes) -> CreateOutcome:
            outcome = super().create(key, data)
            if self.lost:
                self.lost -= 1
                return CreateOutcome.UNKNOWN
            return outcome

    assert require(Forgetful()).exclusive


def test_a_store_that_refuses_is_told_as_it_is() -> None:
    class Closed(MemoryStore):
        def create(self, key: str, data: bytes) -> CreateOutcome:
            raise DeniedError("wrong keys")

    with pytest.raises(DeniedError, match="wrong keys"):
        require(Closed())
