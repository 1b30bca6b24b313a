"""The store as the doctor sees it: clean behind itself, whatever the store does."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.doctor import store as doctor_store
from forebay.doctor.finding import Finding, Verdict
from forebay.errors import DeniedError, StoreError
from forebay.plan.figure import Figure
from forebay.storage import directory, durable
from forebay.storage.directory import DirectoryStore
from forebay.storage.memory import MemoryStore
from forebay.storage.store import CreateOutcome, ObjectInfo, Store

MIB = 2**20
NAMES = [
    *("store put rate", "store get rate", "store put latency", "store head latency"),
    *("store get latency", "store exclusive create"),
]


def silent(_: str) -> None:
    pass


def measure(url: str, **more: Any) -> list[Finding]:
    given = {"seconds": 0.02, "size_bytes": 2 * MIB, "objects": 3, "timeout_s": 20.0}
    return doctor_store.measure(url, more.pop("expected", {}), told=silent, **(given | more))


def serve(monkeypatch: pytest.MonkeyPatch, made: Store) -> None:
    """Have the doctor open ``made``, whatever the URL."""
    monkeypatch.setattr(doctor_store, "open_store", lambda *_, **__: made)


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_is_volatile", lambda _: False)  # it may be one in memory
    expected = {"storage.per_node": Figure(value=1.0, source="test")}
    found = measure(str(tmp_path), expected=expected)
    assert [each.name for each in found] == NAMES
    assert {each.field for each in found} == {"storage.per_node", "storage.per_node_read", ""}
    assert all(each.measured for each in found)
    verdicts = [each.verdict.value for each in found]
    assert verdicts == ["good", "measured", "measured", "measured", "measured", "good"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["memory://x", "directory"])
def test_memory_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(directory, "_is_volatile", lambda _: True)
    expected = {"storage.per_node": Figure(value=1.0, source="test")}
    found = measure(str(tmp_path) if url == "directory" else url, expected=expected)
    assert found[0].verdict is Verdict.OFF
    assert "is memory" in found[0].note
    assert ", durable" not in found[0].note
    assert "bucket" in found[0].to_do
    assert [each.name for each in found if not each.verdict.holds] == ["store put rate"]
    assert not any(each.field for each in found)


def test_what_a_killed_doctor_left_is_removed_after_a_day(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    ours = [f"probe/doctor-{number:016x}/put-1" for number in range(2)]
    others = ["probe/result.json", "probe/doctor-of-mine/put-1", f"data/{ours[0]}"]
    for key in (*ours, *others):
        store.put(key, b"x")
    for key in (ours[0], *others):
        os.utime(tmp_path / key, (1.0, 1.0))
    unfinished = tmp_path / ours[1].replace("put-1", f"{durable.HIDDEN}1.tmp")
    unfinished.touch()
    os.utime(unfinished, (1.0, 1.0))
    told: list[str] = []
    doctor_store.measure(
        str(tmp_path), {}, seconds=0.01, size_bytes=MIB, told=told.append, objects=2
    )
    assert sorted(each.key for each in store.list("")) == sorted([ours[1], *others])
    assert not unfinished.exists()
    assert any("1 objects of an earlier doctor" in line for line in told)


def test_a_store_that_may_not_be_listed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Secret(MemoryStore):
        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            raise DeniedError(f"{prefix}: 403")

    serve(monkeypatch, Secret())
    found = measure("memory://odd")
    assert all(each.measured for each in found)


def test_a_directory_that_was_not_there_is_gone_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_is_volatile", lambda _: False)
    found = measure(str(tmp_path / "run"))
    assert all(each.verdict.holds for each in found)
    assert list(tmp_path.iterdir()) == []


def test_what_else_is_in_the_run_stays(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("probe/result.json", b"{}")
    store.put("manifests/000000000001.json", b"{}")
    measure(str(tmp_path))
    assert [each.key for each in store.list("")] == [
        "manifests/000000000001.json",
        "probe/result.json",
    ]


def test_a_store_that_cannot_be_opened(tmp_path: Path) -> None:
    (found,) = measure(str(tmp_path / "no" / "such" / "place"))
    assert found.verdict is Verdict.FAILED
    assert "does not exist: make it" in found.note
    assert found.to_do == ""  # there are no keys and no network


def test_an_unknown_scheme_says_what_is_known() -> None:
    (found,) = measure("ftp://host/run")
    assert "known are" in found.note
    assert found.to_do == ""


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "free space there"),
        (errno.EROFS, "mount it for writing"),
        (errno.EACCES, "allow writing there"),
    ],
)
def test_a_directory_that_takes_nothing_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def write_new(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable, "write_new", write_new)
    found = measure(str(tmp_path))
    assert {each.verdict for each in found} == {Verdict.FAILED}
    assert says in found[0].note
    assert {each.note for each in found[1:]} == {"not measured: see store put rate"}
    assert not any(each.to_do for each in found)


class Odd(MemoryStore):
    """A store in memory with trouble made on purpose."""

    def __init__(self, trouble: str) -> None:
        super().__init__("memory://odd")
        self.trouble = trouble
        self.freed = threading.Event()
        self.large = 0

    def put_large(self, key: str, view: memoryview, **more: Any) -> None:
        self.large += 1
        if self.trouble == "hangs" and self.large > 4:
            self.freed.wait(30)
        if self.trouble == "fails" and self.large > 4:
            raise StoreError(f"{key}: the server answered 500")
        if self.trouble == "denies":
            raise DeniedError(f"{key}: 403")
        super().put_large(key, view, **more)

    def create(self, key: str, data: bytes) -> CreateOutcome:
        if self.trouble == "creates twice":
            self.delete(key)
        return super().create(key, data)


def test_a_create_that_is_not_exclusive_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Odd("creates twice")
    serve(monkeypatch, odd)
    found = measure("memory://odd")
    last = found[-1]
    assert last.verdict is Verdict.OFF
    assert "single-writer" in last.to_do
    assert list(odd.list("")) == []


def test_one_line_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Odd("fails")
    serve(monkeypatch, odd)
    found = measure("memory://odd")
    assert [each.name for each in found if each.verdict is Verdict.FAILED] == NAMES[:2]
    assert "answered 500" in found[0].note
    assert "network" in found[0].to_do
    assert (found[1].note, found[1].to_do) == ("not measured: see store put rate", "")
    assert list(odd.list("")) == []


def test_a_store_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Odd("hangs")
    serve(monkeypatch, odd)
    try:
        found = measure("memory://odd", timeout_s=0.3)
    finally:
        odd.freed.set()
    assert {each.verdict for each in found} == {Verdict.FAILED}
    assert "objects at once: no answer within 300 ms" in found[0].note
    assert {each.note for each in found[1:]} == {"not measured: see store put rate"}
    ended = threading.Event()
    for _ in range(200):  # what ends after all takes its object away
        if not list(odd.list("")) and not any(t.name == "doctor" for t in threading.enumerate()):
            return
        ended.wait(0.05)
    pytest.fail(f"left behind: {list(odd.list(''))}")


def test_a_store_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Odd("denies")
    serve(monkeypatch, odd)
    found = measure("memory://odd")
    assert {each.verdict for each in found} == {Verdict.FAILED}
    assert odd.large == 3  # one wave
    assert "403" in found[0].note
    assert {each.note for each in found[1:]} == {"not measured: see store put rate"}
    assert not any(each.to_do for each in found)  # the refusal says what to do


def test_an_interrupt_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Odd("")

    def told(line: str) -> None:
        if "head latency" in line:
            raise KeyboardInterrupt

    serve(monkeypatch, odd)
    with pytest.raises(KeyboardInterrupt):
        doctor_store.measure("memory://odd", {}, seconds=0.01, size_bytes=MIB, told=told)
    assert odd.large > 0
    assert list(odd.list("")) == []
