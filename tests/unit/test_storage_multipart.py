"""The part loop, against parts in memory that fail, hang back and remember."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DeniedError, StoreError
from forebay.storage.multipart import MOST_PARTS, PART_BYTES, Gate, Upload, plan_parts
from forebay.storage.pace import Pace
from forebay.storage.patience import Patience

MIB = 2**20


class StopError(Exception):
    """What a caller raises to cut an upload off."""


class Memory:
    """Parts of one object. ``fail`` maps part numbers to errors that come first."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.uploads: dict[str, dict[int, tuple[str, int]]] = {}
        self.sent: list[int] = []
        self.fail: dict[int, list[Exception]] = {}
        self.lock = threading.Lock()
        self.side_by_side = self.most = 0

    def begin(self) -> str:
        name = f"upload-{len(self.uploads) + 1}"
        self.uploads[name] = {}
        return name

    def there(self, upload_id: str) -> Mapping[int, tuple[str, int]] | None:
        return self.uploads.get(upload_id)

    def put(
        self,
        upload_id: str,
        number: int,
        start: int,
        nbytes: int,
        *,
        sent: Callable[[int], None],
        gate: Gate,
    ) -> str:
        gate.enter()
        with self.lock:
            self.sent.append(number)
            self.side_by_side += 1
            self.most = max(self.most, self.side_by_side)
            errors = self.fail.get(number, [])
            error = errors.pop(0) if errors else None
        try:
            sent(nbytes // 2)
            if error is not None:
                raise error
            sent(nbytes - nbytes // 2)
        finally:
            with self.lock:
                self.side_by_side -= 1
            gate.leave()
        self.uploads[upload_id][number] = (f"tag-{number}", nbytes)
        return f"tag-{number}"


class Log:
    def __init__(self, known: tuple[str, int] | None = None) -> None:
        self._known = known
        self.noted: list[tuple[str, int]] = []
        self.told: list[str] = []

    def known(self) -> tuple[str, int] | None:
        return self._known

    def begun(self, upload_id: str, part_bytes: int) -> None:
        self.noted.append((upload_id, part_bytes))

    def trouble(self, why: str) -> None:
        self.told.append(why)


def upload_of(
    memory: Memory, told: Callable[[int], None] = lambda _: None, limit_s: float = 60.0
) -> Upload:
    return Upload(
        memory,
        plan_parts(len(memory.data), 10),
        what="object",
        pace=Pace(),
        told=told,
        patience=Patience(limit_s),
    )


def test_all_parts_go_once() -> None:
    memory, told = Memory(bytes(95)), list[int]()
    upload = upload_of(memory, told.append)
    log = Log()
    assert upload.run(log) == "upload-1"
    assert log.noted == [("upload-1", 10)]
    assert sorted(memory.sent) == list(range(1, 11))
    assert upload.tags == {n: f"tag-{n}" for n in range(1, 11)}
    assert sum(told) == 95
    assert memory.most <= 4


def test_a_part_that_fails_goes_to_the_end_of_the_list() -> None:
    memory, told = Memory(bytes(100)), list[int]()
    memory.fail = {2: [StoreError("x"), StoreError("y")]}
    upload, log = upload_of(memory, told.append), Log()
    upload.run(log)
    assert {"x", "y"} <= set(log.told)
    assert log.told[-1] == ""
    assert memory.sent.count(2) == 3
    assert memory.sent.index(2) < 6
    assert sum(told) == 100
    assert min(told) < 0


def test_what_has_arrived_is_not_sent_again() -> None:
    memory, told = Memory(bytes(95)), list[int]()
    memory.uploads["earlier"] = {
        **{n: (f"tag-{n}", 10) for n in (1, 3, 4)},
        5: ("tag-of-a-torn-part", 7),
        10: ("tag-10", 5),
    }
    upload = upload_of(memory, told.append)
    assert upload.run(Log(("earlier", 10))) == "earlier"
    assert sorted(memory.sent) == [2, 5, 6, 7, 8, 9]
    assert sum(told) == 95
    assert len(upload.tags) == 10


@pytest.mark.parametrize("known", [("gone", 10), ("earlier", 20)])
def test_an_upload_of_no_use_is_begun_anew(known: tuple[str, int]) -> None:
    memory = Memory(bytes(95))
    memory.uploads["earlier"] = {1: ("tag-1", 20)}
    log = Log(known)
    assert upload_of(memory).run(log) == "upload-2"
    assert log.noted == [("upload-2", 10)]
    assert sorted(memory.sent) == list(range(1, 11))


def test_a_refusal_ends_it_at_once() -> None:
    memory = Memory(bytes(100))
    memory.fail = {1: [DeniedError("keys")]}
    with pytest.raises(DeniedError):
        upload_of(memory).run(None)
    assert memory.sent.count(1) == 1


def test_nothing_comes_through_for_too_long() -> None:
    memory = Memory(bytes(20))
    memory.fail = {n: [StoreError(f"part {n}")] * 1000 for n in (1, 2)}
    with pytest.raises(StoreError, match="part"):
        upload_of(memory, limit_s=0.3).run(None)


def test_a_caller_that_raises_cuts_it_off() -> None:
    memory = Memory(bytes(1000))
    count = 0

    def told(nbytes: int) -> None:
        nonlocal count
        count += nbytes
        if count > 100:
            raise StopError

    with pytest.raises(StopError):
        upload_of(memory, told).run(None)
    assert len(memory.sent) < 100


@given(nbytes=st.integers(0, 10**14))
def test_parts_cover_the_object(nbytes: int) -> None:
    plan = plan_parts(nbytes)
    assert 1 <= plan.count <= MOST_PARTS
    assert plan.part_bytes >= PART_BYTES
    assert plan.part_bytes % MIB == 0
    last_start, last_bytes = plan.range_of(plan.count)
    assert last_start + last_bytes == nbytes
    assert 1 <= plan.lanes <= 4
    if plan.count > 1:
        assert plan.range_of(1) == (0, plan.part_bytes)
        assert last_bytes > 0


def test_the_reference_case() -> None:
    """405B x 16 bytes on 16,384 GPUs: 98,000 parts a checkpoint, as the design reckons."""
    rank_bytes = 405 * 10**9 * 16 // 16384
    assert plan_parts(rank_bytes).count == 6
    assert 6 * 16384 == 98304
