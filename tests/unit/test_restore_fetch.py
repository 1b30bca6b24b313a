"""Fetch under stress: blocks and spans, bounded memory, and an end that does not drag on."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import DamagedError, DeadlineError, NotFoundError
from forebay.format import digests
from forebay.format.digests import block_digests, digest
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.stored import Stored
from forebay.restore import fetch as fetch_module
from forebay.restore import reads
from forebay.restore.fetch import Fetched, fetch
from forebay.restore.reads import Want, plan_reads
from forebay.restore.source import StoreSource
from forebay.storage.memory import MemoryStore
from forebay.watch.events import Event, listen
from tests.build import Rank, cut
from tests.unit.test_fetch import cases, check, damage, get, put, truncate

fixed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
MIB = 2**20


@pytest.fixture
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (digests, reads, fetch_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    monkeypatch.setattr(digests, "BLOCKS_ABOVE_BYTES", 32)
    monkeypatch.setattr(reads, "SPAN_BYTES", 32)
    monkeypatch.setattr(reads, "GAP_BYTES", 8)


@pytest.mark.usefixtures("small_spans")
@fixed
@given(cases())
def test_reads_in_spans_are_what_numpy_cuts(case: Any) -> None:
    held, ranks, wants = case
    store = MemoryStore()
    check(get(wants, put(ranks, store), store), wants, held)


@pytest.mark.usefixtures("small_spans")
@fixed
@given(cases(), st.data())
def test_a_bit_flipped_in_any_block_that_is_read_is_seen(case: Any, data: st.DataObject) -> None:
    held, ranks, wants = case
    near, far = MemoryStore(), MemoryStore()
    stored = put(ranks, near, far)
    read = data.draw(
        st.sampled_from([r for b in plan_reads(wants, stored).batches for r in b.reads])
    )
    at = read.start + data.draw(st.integers(0, read.nbytes - 1))
    damage(near, read.stored.key, at)
    found = get(wants, stored, near, far)
    check(found, wants, held)
    assert len(found.bad_ranges) == 1
    damage(far, read.stored.key, at)
    with pytest.raises(DamagedError, match=r"expected digest [0-9a-f]+, found [0-9a-f]+"):
        get(wants, stored, near, far)


@pytest.mark.usefixtures("small_spans")
@fixed
@given(cases(), st.data())
def test_an_object_cut_within_what_is_read_is_seen(case: Any, data: st.DataObject) -> None:
    held, ranks, wants = case
    near, far = MemoryStore(), MemoryStore()
    stored = put(ranks, near, far)
    batch = data.draw(st.sampled_from(plan_reads(wants, stored).batches))
    truncate(near, batch.key, batch.start + data.draw(st.integers(0, batch.nbytes - 1)))
    with pytest.raises(DamagedError, match=r"expected at least \d+ bytes, found \d+"):
        get(wants, stored, near)
    found = get(wants, stored, near, far)
    check(found, wants, held)
    assert found.bad_ranges


class Array:
    """A source of one large array; counts what it is asked for."""

    name = "array"

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._bytes = memoryview(array).cast("B")
        self.read = 0

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        if key != "f":
            raise NotFoundError(key)
        into[:] = self._bytes[start : start + into.nbytes]
        self.read += into.nbytes


@pytest.mark.parametrize(
    "box",
    [Box((0, 0), (40_960, 512)), Box((12_345, 0), (20_000, 1024)), Box((0, 1), (81_920, 100))],
    ids=["half of the columns", "rows from within a block", "a column of all blocks"],
)
def test_part_of_a_slice_with_real_blocks_takes_no_more_memory_than_said(box: Box) -> None:
    array = np.resize(np.arange(251, dtype=np.uint8), (81_920, 1024))  # 80 MiB: five blocks
    data = memoryview(array).cast("B")
    piece = Slice(TensorKey("t"), "uint8", array.shape, Box.whole(array.shape))
    there = Stored(piece, "f", 0, digest(data), tuple(block_digests(data)), 0)
    wanted = Want(piece.key, "uint8", array.shape, box)
    source = Array(array)
    tracemalloc.start()
    try:
        plan = plan_reads([wanted], [there])
        found = fetch(
            plan, [source], allocate=lambda n: memoryview(bytearray(n)), scratch_bytes=64 * MIB
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bytes(found.buffers[0]) == cut(array, box)
    assert source.read == found.bytes_read == found.by_source["array"].bytes
    assert peak <= wanted.nbytes + 64 * MIB + 4 * MIB


def rows(count: int, width: int) -> tuple[np.ndarray[Any, Any], list[Stored], list[Want]]:
    """An array in rows far apart in an object, and a want that needs a part of each."""
    array = np.resize(np.arange(251, dtype=np.uint8), (count, width))
    stored = []
    for row in range(count):
        piece = Slice(TensorKey("t"), "uint8", array.shape, Box((row, 0), (1, width)))
        stored.append(Stored(piece, "f", row * width, digest(array[row].tobytes()), (), 0))
    return array, stored, [Want(TensorKey("t"), "uint8", array.shape, Box((0, 1), (count, 7)))]


def test_scratch_in_flight_stays_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "BATCH_BYTES", 1024)
    array, stored, wants = rows(64, 1024)
    inner = Array(array)
    # Two at a time fit; each waits inside for its fellow, so more than two would be seen together.
    pair, lock, inside, seen = threading.Barrier(2, timeout=60), threading.Lock(), [0], [0]

    class Counting:
        name = "counting"

        def read_into(self, key: str, start: int, into: memoryview) -> None:
            with lock:
                inside[0] += into.nbytes
                seen[0] = max(seen[0], inside[0])
            pair.wait()
            inner.read_into(key, start, into)
            with lock:
                inside[0] -= into.nbytes

    plan = plan_reads(wants, stored)
    assert len(plan.batches) == 64
    found = fetch(
        plan,
        [Counting()],
        allocate=lambda n: memoryview(bytearray(n)),
        threads=8,
        scratch_bytes=2048 + 100,
    )
    assert seen[0] == 2048
    assert bytes(found.buffers[0]) == cut(array, wants[0].box)


@pytest.mark.parametrize("error", [DamagedError("cut"), ZeroDivisionError("bug")])
def test_a_failure_ends_the_fetch_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(reads, "BATCH_BYTES", 1024)
    array, stored, wants = rows(32, 1024)
    inner, ended, asked = Array(array), threading.Event(), []

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            ended.set()
            super().shutdown(wait=wait)

    class Failing:
        """The second range fails; all others wait until nothing more is begun."""

        name = "failing"

        def read_into(self, key: str, start: int, into: memoryview) -> None:
            asked.append(start)
            if start == 1024:
                raise error
            assert ended.wait(timeout=60), "the failure was not noticed while others were read"
            inner.read_into(key, start, into)

    monkeypatch.setattr(fetch_module, "ThreadPoolExecutor", Pool)
    with pytest.raises(type(error)):
        fetch(
            plan_reads(wants, stored),
            [Failing()],
            allocate=lambda n: memoryview(bytearray(n)),
            threads=2,
        )
    assert {0, 1024} <= set(asked) <= {0, 1024, 2048}


def test_a_source_that_hangs_up_is_passed_over_and_told_once() -> None:
    array = np.arange(32, dtype=np.float32).reshape(8, 4)
    store = MemoryStore()
    stored = put({0: Rank().part("t", array)}, store)
    wants = [Want(TensorKey("t"), "float32", (8, 4), Box.whole((8, 4)))]

    class Hung:
        name = "local"

        def read_into(self, key: str, start: int, into: memoryview) -> None:
            into[:4] = b"\xff" * 4
            raise DeadlineError("no answer in 30 s")

    events: list[Event] = []
    stop = listen(events.append)
    try:
        found = fetch(
            plan_reads(wants, stored),
            [Hung(), StoreSource("durable", store)],
            allocate=lambda n: memoryview(bytearray(n)),
        )
    finally:
        stop()
    check(found, wants, {"t": array})
    assert [e.name for e in events] == ["restore.bad_range"]
    assert events[0].fields["source"] == "local"
    assert found.bad_ranges == ("local: no answer in 30 s",)


def test_nothing_is_given_back_when_one_of_many_is_damaged() -> None:
    array = np.arange(64, dtype=np.int16).reshape(16, 4)
    store = MemoryStore()
    ranks = {rank: Rank().part(f"t{rank}", array) for rank in range(4)}
    stored = put(ranks, store)
    wants = [Want(TensorKey(f"t{n}"), "int16", (16, 4), Box.whole((16, 4))) for n in range(4)]
    victim = next(s for s in stored if s.slice.key.fqn == "t2")
    damage(store, victim.key, victim.start + victim.nbytes - 1)
    given: Fetched | None = None
    with pytest.raises(DamagedError) as told:
        given = get(wants, stored, store)
    assert given is None
    text = str(told.value)
    assert f"{victim.key}, bytes {victim.start} to {victim.start + victim.nbytes}" in text
    assert "local: " in text
    assert "\n" not in text
