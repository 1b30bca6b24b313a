"""A committer that comes behind a deletion: in any order of requests nothing half is left."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forebay.commit.catalog import Catalog
from forebay.commit.gather import Checked, gather
from forebay.commit.publish import finish, publish
from forebay.commit.reclaim import delete_step
from forebay.errors import IncompleteError, StoreError
from forebay.format import names
from forebay.storage.memory import MemoryStore
from forebay.storage.store import CreateOutcome, ObjectInfo
from tests.build import ATTEMPT, STEP, put_nodes, two_nodes

WAIT_S = 30.0
REQUESTS = 12  # more than a deletion or a commit makes


class TakingTurns(MemoryStore):
    """A store whose requests are let through one by one, each to the thread whose turn it is."""

    def __init__(self) -> None:
        super().__init__()
        self._change = threading.Condition()
        self._turn: Iterator[str] | None = None
        self._next = ""
        self._ended: set[str] = set()
        self._names: list[str] = []

    def play(self, order: list[tuple[str, int]], **work: Callable[[], Any]) -> dict[str, Any]:
        """Run each piece of work in a thread of its name: so many requests of one, then of another.

        Who has ended is passed over; when the order is used up each runs to its end in turn.
        Returns what each gave, or raised.
        """
        result: dict[str, Any] = {}
        turns = [name for name, count in order for _ in range(count)]
        self._turn, self._ended = iter(turns), set()
        self._names = list(work)
        with self._change:
            self._advance()

        def run(name: str) -> None:
            try:
                result[name] = work[name]()
            except Exception as error:
                result[name] = error
            with self._change:
                self._ended.add(name)
                if self._next == name:
                    self._advance()

        threads = [threading.Thread(target=run, args=(name,), name=name) for name in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        self._turn = None
        return result

    def _advance(self) -> None:
        assert self._turn is not None
        for name in self._turn:
            if name not in self._ended:
                self._next = name
                break
        else:
            self._next = next((name for name in self._names if name not in self._ended), "")
        self._change.notify_all()

    def _request(self, work: Callable[[], Any]) -> Any:
        if self._turn is None:
            return work()
        me = threading.current_thread().name
        with self._change:
            assert self._change.wait_for(lambda: self._next == me, WAIT_S)
            try:
                return work()
            finally:
                self._advance()

    def create(self, key: str, data: bytes) -> CreateOutcome:
        outcome: CreateOutcome = self._request(lambda: MemoryStore.create(self, key, data))
        return outcome

    def get(self, key: str, *, max_bytes: int) -> bytes:
        data: bytes = self._request(lambda: MemoryStore.get(self, key, max_bytes=max_bytes))
        return data

    def head(self, key: str) -> ObjectInfo | None:
        found: ObjectInfo | None = self._request(lambda: MemoryStore.head(self, key))
        return found

    def delete(self, key: str) -> bool:
        done: bool = self._request(lambda: MemoryStore.delete(self, key))
        return done


def late(store: MemoryStore) -> Checked:
    """A committer has read the records of a step that another then committed."""
    put_nodes(store, two_nodes())
    checked = gather(store, STEP, ATTEMPT, nodes=2, timeout_s=0)
    publish(store, checked)
    return checked


@pytest.mark.parametrize("second", range(9))
def test_no_order_of_a_deletion_and_a_late_commit_leaves_anything(second: int) -> None:
    ends = Counter[str]()
    for first, third in itertools.product(range(REQUESTS), repeat=2):
        store = TakingTurns()
        checked = late(store)
        order = [("delete", first), ("commit", second), ("delete", third)]
        result = store.play(
            order,
            commit=lambda store=store, checked=checked: publish(store, checked),
            delete=lambda store=store: delete_step(store, STEP),
        )
        assert isinstance(result["delete"], int), (order, result)
        ends[type(result["commit"]).__name__] += 1
        if isinstance(result["commit"], StoreError):  # between the two it is tried again
            assert "something deletes this step" in str(result["commit"])
        else:
            assert isinstance(result["commit"], tuple | IncompleteError), (order, result)
        assert Catalog(store).steps() == [], order
    print(f"orders: {sum(ends.values())}, violations: 0")
    assert ends["IncompleteError"] > 0
    assert second > 0 or ends["tuple"] > 0


def test_what_is_told_when_the_step_was_deleted_meanwhile() -> None:
    store = MemoryStore()
    checked = late(store)
    delete_step(store, STEP)
    with pytest.raises(IncompleteError, match="deleted while attempt") as caught:
        publish(store, checked)
    assert checked.refs[0].key in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Catalog(store).steps() == []


def test_the_manifest_of_another_attempt_is_left() -> None:
    """Somebody saved the step again: neither the late committer nor the deletion touches it."""

    class SavedAgain(MemoryStore):
        """At a deletion's last look, and at a late committer's, another attempt is in place."""

        armed = False

        def head(self, key: str) -> ObjectInfo | None:
            found = super().head(key)
            if self.armed and found is None:
                self.armed = False
                put_nodes(self, two_nodes(), attempt="again")
                self.delete(names.manifest_key(STEP))
                finish(self, STEP, "again")
            return found

    store = SavedAgain()
    checked = late(store)
    store.armed = True
    delete_step(store, STEP)
    assert Catalog(store).attempt_of(STEP) == "again"
    delete_step(store, STEP)
    store.armed = True
    with pytest.raises(IncompleteError):
        publish(store, checked)
    assert Catalog(store).attempt_of(STEP) == "again"
