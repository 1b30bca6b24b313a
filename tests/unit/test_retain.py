"""What stays and what goes, and in which order it goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.commit.catalog import Catalog
from forebay.commit.publish import commit_step, finish
from forebay.commit.reclaim import Reclaimer, apply_keep, delete_step
from forebay.commit.retain import decide
from forebay.commit.verify import Finding, verify_step
from forebay.config import Keep
from forebay.errors import StoreError
from forebay.format import names
from forebay.storage.memory import MemoryStore
from tests.build import ATTEMPT, STEP, put_nodes, two_nodes


def kept(steps: list[int], keep: Keep) -> list[int]:
    return [d.step for d in decide(steps, keep) if d.keep]


def test_rules() -> None:
    steps = [40, 10, 20, 30, 50]
    assert kept(steps, Keep(last=2)) == [40, 50]
    assert kept(steps, Keep(last=1, every=20)) == [20, 40, 50]
    assert kept(steps, Keep(last=9)) == [10, 20, 30, 40, 50]
    assert kept([], Keep()) == []
    assert [d.why for d in decide([10, 15, 20], Keep(last=1, every=10))] == [
        "a multiple of 10",
        "not named by any rule",
        "one of the last 1",
    ]


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 50)))
def test_the_newest_stay_and_the_rule_is_exact(
    steps: list[int], last: int, every: int | None
) -> None:
    expected = set(sorted(set(steps))[-last:])
    expected |= {step for step in steps if every and step % every == 0}
    assert kept(steps, Keep(last=last, every=every)) == sorted(expected)


class Recording(MemoryStore):
    """Remembers what was deleted, and fails at the ``fail_at``-th delete."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[str] = []
        self.fail_at: int | None = None

    def delete(self, key: str) -> bool:
        if self.fail_at is not None and len(self.gone) == self.fail_at:
            raise KeyboardInterrupt
        self.gone.append(key)
        return super().delete(key)


def committed(*steps: int) -> Recording:
    store = Recording()
    for step in steps:
        put_nodes(store, two_nodes(), step=step)
        finish(store, step)
    return store


def test_the_manifest_goes_first_then_records_then_data() -> None:
    store = committed(STEP)
    foreign = f"{names.attempt_prefix(STEP, ATTEMPT)}notes.txt"
    store.put(foreign, b"mine")
    put_nodes(store, two_nodes(), step=STEP, attempt="other")
    before = {info.key for info in store.list("")}
    assert delete_step(store, STEP) == 7
    assert store.gone[0] == names.manifest_key(STEP)
    assert store.gone[1:3] == [names.record_key(STEP, ATTEMPT, node) for node in (0, 1)]
    assert all(key.startswith(names.attempt_prefix(STEP, ATTEMPT)) for key in store.gone[1:])
    left = {info.key for info in store.list("")}
    assert left == before - set(store.gone)
    assert foreign in left
    assert delete_step(store, STEP) == 0


@pytest.mark.parametrize("fail_at", range(7))
def test_killed_at_any_point_no_step_is_half_there(fail_at: int) -> None:
    store = committed(STEP)
    store.fail_at = fail_at
    with pytest.raises(KeyboardInterrupt):
        delete_step(store, STEP)
    catalog = Catalog(store)
    if fail_at == 0:
        assert len(list(catalog.slices(catalog.manifest(STEP)))) == 3
        assert all(store.head(ref.key) for ref in catalog.manifest(STEP).records)
    else:
        assert catalog.steps() == []


def test_of_a_damaged_manifest_only_the_manifest_goes() -> None:
    store = committed(STEP)
    store.delete(names.manifest_key(STEP))
    store.put(names.manifest_key(STEP), b"rubbish")
    store.gone.clear()
    assert delete_step(store, STEP) == 1
    assert store.gone == [names.manifest_key(STEP)]


def test_keep_is_applied() -> None:
    store = committed(10, 20, 30, 40)
    put_nodes(store, two_nodes(), step=5)  # not committed: not retention's business
    assert apply_keep(store, Keep(last=1, every=20)) == [10, 30]
    assert Catalog(store).steps() == [20, 40]
    assert [u.step for u in Catalog(store).unfinished()] == [5]
    assert apply_keep(store, Keep(last=1, every=20)) == []


def test_a_step_that_a_commit_is_at_work_on_is_left_for_another_time() -> None:
    store = MemoryStore()
    for step in (1, 2, 3):
        put_nodes(store, two_nodes(), step=step)
        finish(store, step)
    assert apply_keep(store, Keep(last=1), {1, 3}) == [2]
    assert Catalog(store).steps() == [1, 3]
    assert apply_keep(store, Keep(last=1)) == [1]


class Refusing(MemoryStore):
    """Refuses the n-th delete."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def delete(self, key: str) -> bool:
        self.left -= 1
        if self.left == 0:
            raise StoreError("refused")
        return super().delete(key)


@pytest.mark.parametrize("number", range(1, 8))
def test_a_delete_that_failed_half_way_goes_on_at_the_next(number: int) -> None:
    store = Refusing(number)
    for step in (1, 2):
        put_nodes(store, two_nodes(), step=step)
        commit_step(store, step, ATTEMPT, nodes=2, timeout_s=0)
    reclaimer = Reclaimer(store)
    with pytest.raises(StoreError):
        reclaimer.apply(Keep(last=1))
    assert Catalog(store).steps() == ([1, 2] if number == 1 else [2])
    reclaimer.apply(Keep(last=1))
    assert Catalog(store).steps() == [2]
    assert not list(store.list(names.attempt_prefix(1, ATTEMPT)))
    found = verify_step(Catalog(store), Catalog(store).manifest(2))
    assert not [one for one in found if isinstance(one, Finding)]
