"""Fetch against numpy: any cut stored, any box wanted, any one copy damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import DamagedError, MismatchError
from forebay.format import digests
from forebay.format.slices import Box, TensorKey
from forebay.format.stored import Stored
from forebay.restore import fetch as fetch_module
from forebay.restore import reads
from forebay.restore.fetch import Fetched, fetch
from forebay.restore.reads import Want, plan_reads
from forebay.restore.source import StoreSource
from forebay.storage.memory import MemoryStore
from tests.build import Rank, cut, image_of

DTYPES = ["uint8", "int16", "float32", "complex128"]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    count = int(np.prod(shape))
    kind = draw(st.sampled_from(DTYPES))
    return (np.arange(count) * 37 % 251).astype(kind).reshape(shape)


@st.composite
def partitions(draw: st.DrawFn, box: Box) -> list[Box]:
    """Disjoint boxes that cover: cut in two again and again."""
    axes = [d for d, n in enumerate(box.sizes) if n > 1]
    if not axes or draw(st.integers(0, 2)) == 0:
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, box.sizes[axis] - 1))
    low, high = list(box.sizes), list(box.sizes)
    low[axis], high[axis] = at, box.sizes[axis] - at
    moved = list(box.offsets)
    moved[axis] += at
    return draw(partitions(Box(box.offsets, tuple(low)))) + draw(
        partitions(Box(tuple(moved), tuple(high)))
    )


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets, sizes = [], []
    for n in shape:
        low = draw(st.integers(0, n - 1))
        offsets.append(low)
        sizes.append(draw(st.integers(1, n - low)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, np.ndarray[Any, Any]], dict[int, Rank], list[Want]]:
    """Arrays, what up to three ranks store of them, and what is wanted back."""
    held = {f"t{n}": a for n, a in enumerate(draw(st.lists(arrays(), min_size=1, max_size=3)))}
    ranks = {rank: Rank() for rank in range(draw(st.integers(1, 3)))}
    wants = []
    for name, array in held.items():
        for box in draw(partitions(Box.whole(array.shape))):
            ranks[draw(st.sampled_from(sorted(ranks)))].part(name, array, box)
        wanted = draw(st.lists(boxes(array.shape), min_size=1, max_size=3))
        wants += [Want(TensorKey(name), array.dtype.name, array.shape, box) for box in wanted]
    return held, ranks, wants


def put(ranks: dict[int, Rank], *stores: MemoryStore) -> list[Stored]:
    found = []
    for rank, made in ranks.items():
        _, file, stored = image_of(rank, made, f"rank-{rank}")
        for store in stores:
            store.put(f"rank-{rank}", file)
        found += stored
    return found


def damage(store: MemoryStore, key: str, at: int) -> None:
    data = bytearray(store.get(key, max_bytes=1 << 30))
    data[at] ^= 0x10
    store.delete(key)
    store.put(key, bytes(data))


def truncate(store: MemoryStore, key: str, size: int) -> None:
    data = store.get(key, max_bytes=1 << 30)
    store.delete(key)
    store.put(key, data[:size])


def get(wants: list[Want], stored: list[Stored], *stores: MemoryStore, **options: Any) -> Fetched:
    sources = [StoreSource(name, s) for name, s in zip(("local", "durable"), stores, strict=False)]
    return fetch(
        plan_reads(wants, stored),
        sources,
        allocate=lambda n: memoryview(bytearray(n)),
        threads=2,
        **options,
    )


def check(found: Fetched, wants: list[Want], held: dict[str, np.ndarray[Any, Any]]) -> None:
    for buffer, wanted in zip(found.buffers, wants, strict=True):
        assert bytes(buffer) == cut(held[wanted.key.fqn], wanted.box)


@given(cases())
def test_what_is_fetched_is_what_numpy_cuts(case: Any) -> None:
    held, ranks, wants = case
    store = MemoryStore()
    found = get(wants, put(ranks, store), store)
    check(found, wants, held)
    assert found.bad_ranges == ()
    assert found.bytes_needed == sum(map(len, found.buffers))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (digests, reads, fetch_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    monkeypatch.setattr(digests, "BLOCKS_ABOVE_BYTES", 48)
    monkeypatch.setattr(reads, "GAP_BYTES", 0)


fixed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.usefixtures("small_blocks")
@fixed
@given(cases())
def test_partial_reads_by_blocks_are_the_same(case: Any) -> None:
    held, ranks, wants = case
    store = MemoryStore()
    check(get(wants, put(ranks, store), store), wants, held)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_are_really_read_alone_and_checked() -> None:
    array = np.arange(64, dtype=np.int16).reshape(16, 4)  # 128 bytes, a block is two rows
    store = MemoryStore()
    stored = put({0: Rank().part("t", array)}, store)
    wants = [Want(TensorKey("t"), "int16", (16, 4), Box((3, 1), (2, 2)))]
    found = get(wants, stored, store)
    check(found, wants, {"t": array})
    assert found.bytes_read == 32
    damage(store, "rank-0", stored[0].start + 127)  # outside the blocks that are read
    check(get(wants, stored, store), wants, {"t": array})
    damage(store, "rank-0", stored[0].start + 35)
    with pytest.raises(DamagedError, match="no tier has them intact"):
        get(wants, stored, store)


@given(cases(), st.data())
def test_a_flipped_bit_is_seen_and_the_next_source_used(case: Any, data: st.DataObject) -> None:
    held, ranks, wants = case
    near, far = MemoryStore(), MemoryStore()
    stored = put(ranks, near, far)
    needed = [r.stored for b in plan_reads(wants, stored).batches for r in b.reads]
    victim = data.draw(st.sampled_from(needed))
    at = victim.start + data.draw(st.integers(0, victim.nbytes - 1))
    damage(near, victim.key, at)
    found = get(wants, stored, near, far)
    check(found, wants, held)
    assert len(found.bad_ranges) == 1
    assert found.bad_ranges[0].startswith("local: ")
    assert str(victim.slice.key) in found.bad_ranges[0]
    assert found.by_source["durable"].reads == 1
    damage(far, victim.key, at)
    with pytest.raises(DamagedError, match=f"{victim.key}.*no tier.*local: .*durable: ") as told:
        get(wants, stored, near, far)
    assert "expected digest" in str(told.value)


def one() -> tuple[MemoryStore, list[Stored], list[Want], np.ndarray[Any, Any]]:
    array = np.arange(32, dtype=np.float32).reshape(8, 4)
    store = MemoryStore()
    stored = put({0: Rank().part("t", array)}, store)
    return store, stored, [Want(TensorKey("t"), "float32", (8, 4), Box.whole((8, 4)))], array


def test_a_truncated_object_is_damaged() -> None:
    store, stored, wants, array = one()
    other = MemoryStore()
    put({0: Rank().part("t", array)}, other)
    truncate(store, "rank-0", stored[0].start + 100)
    with pytest.raises(DamagedError, match=r"expected at least \d+ bytes, found \d+"):
        get(wants, stored, store)
    found = get(wants, stored, store, other)
    check(found, wants, {"t": array})
    assert len(found.bad_ranges) == 1


def test_a_tier_that_lacks_the_object_is_passed_by_silently() -> None:
    store, stored, wants, array = one()
    found = get(wants, stored, MemoryStore(), store)
    check(found, wants, {"t": array})
    assert found.bad_ranges == ()
    assert list(found.by_source) == ["durable"]
    with pytest.raises(DamagedError, match="local: not there; durable: not there"):
        get(wants, stored, MemoryStore(), MemoryStore())


def test_scratch_smaller_than_any_range_still_works() -> None:
    array = np.arange(4096, dtype=np.uint8).reshape(64, 64)
    ranks = {0: Rank()}
    for row in range(64):
        ranks[0].part("t", array, Box((row, 0), (1, 64)))
    store = MemoryStore()
    stored = put(ranks, store)
    wants = [Want(TensorKey("t"), "uint8", (64, 64), Box((0, 3), (64, 9)))]
    check(get(wants, stored, store, scratch_bytes=1), wants, {"t": array})


def test_a_bug_in_a_source_is_not_hidden() -> None:
    _, stored, wants, _ = one()

    class Broken:
        name = "broken"

        def read_into(self, key: str, start: int, into: memoryview) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fetch(plan_reads(wants, stored), [Broken()], allocate=lambda n: memoryview(bytearray(n)))


def test_a_hole_is_named_before_anything_is_read() -> None:
    _, stored, wants, array = one()
    with pytest.raises(MismatchError, match="elements of box"):
        plan_reads(wants, [])
    assert array.size == 32
    assert stored
