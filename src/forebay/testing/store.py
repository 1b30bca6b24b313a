"""What every store must do, as tests that a store's own test class inherits.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore(...)

Each test gets a store of its own, empty. Needs pytest.
"""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.errors import ConflictError, DamagedError, NotFoundError, StoreError, UsageError
from forebay.storage.pace import Pace
from forebay.storage.store import CreateOutcome, Store

CREATORS = 16
DEADLINE_S = 60.0
BAD_KEYS = [
    "",
    "/",
    "/etc/passwd",
    "..",
    "../x",
    "a/../b",
    "a//b",
    "a/",
    "./a",
    "a/.b",
    ".a.tmp",
    "a b",
    "a\nb",
    "a\n",
    "a\0b",
    "a\\b",
    "a?b",
    "ä",
]
SIZES = [0, 1, 4095, 4096, 4097, 2**20 - 1, 2**20, 2**20 + 1, 9 * 2**20 + 3]


def page_aligned(nbytes: int) -> memoryview:
    """Writable memory that starts at a page, filled with a pattern that no block repeats."""
    view = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    for at in range(0, nbytes, 1024):
        part = view[at : at + 1024]
        part[:] = (at.to_bytes(8, "little") * 128)[: part.nbytes]
    return view


class StoreContract:
    """Inherit, give a fixture ``store``, and pytest does the rest."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store; to be overridden."""
        raise NotImplementedError("override the fixture `store`")

    def test_put_get_head(self, store: Store) -> None:
        """What was put is there, whole, with its size."""
        assert store.head("a/b") is None
        store.put("a/b", b"hello")
        assert store.get("a/b", max_bytes=5) == b"hello"
        info = store.head("a/b")
        assert info is not None
        assert (info.key, info.size) == ("a/b", 5)
        assert info.modified_s > 0

    def test_put_of_memory_is_a_copy(self, store: Store) -> None:
        """The caller may reuse its buffer once the call has returned."""
        small, large = bytearray(b"first"), page_aligned(5000)
        was = bytes(large)
        store.put("small", memoryview(small))
        store.put_large("large", large)
        small[:], large[:] = b"other", bytes(5000)
        assert store.get("small", max_bytes=5) == b"first"
        assert store.get("large", max_bytes=5000) == was

    def test_empty_object(self, store: Store) -> None:
        """No bytes are an object too."""
        store.put("empty", b"")
        assert store.get("empty", max_bytes=0) == b""
        assert store.get_range("empty", 0, 0) == b""
        info = store.head("empty")
        assert info is not None
        assert info.size == 0

    def test_get_refuses_what_is_too_large(self, store: Store) -> None:
        """A bound on what is read into memory."""
        store.put("a", b"12345")
        with pytest.raises(StoreError, match=r"a: 5 bytes, expected at most 4"):
            store.get("a", max_bytes=4)

    def test_missing_object(self, store: Store) -> None:
        """Each way to read says that there is no such object; delete says False."""
        store.put("a/b", b"x")
        for key in ("a/c", "a", "a/b/c", "z"):
            assert store.head(key) is None
            with pytest.raises(NotFoundError, match=key):
                store.get(key, max_bytes=10)
            with pytest.raises(NotFoundError, match=key):
                store.get_range(key, 0, 1)
        for key in ("a/c", "a/b/c", "z"):
            assert store.delete(key) is False
        assert store.get("a/b", max_bytes=1) == b"x"

    def test_ranges(self, store: Store) -> None:
        """Exactly the bytes asked for, at odd places too."""
        data = bytes(page_aligned(10_000))
        store.put("a", data)
        for start, nbytes in ((0, 10_000), (0, 1), (9_999, 1), (4095, 2), (4096, 4096), (17, 0)):
            assert store.get_range("a", start, nbytes) == data[start : start + nbytes]
        into = bytearray(b"-" * 12)
        store.read_into("a", 5000, memoryview(into)[2:10])
        assert bytes(into) == b"--" + data[5000:5008] + b"--"

    def test_range_into_wider_items(self, store: Store) -> None:
        """A target of 8-byte items is filled by bytes."""
        store.put("a", bytes(range(64)))
        into = memoryview(bytearray(32)).cast("q")
        store.read_into("a", 16, into)
        assert bytes(into) == bytes(range(16, 48))

    @pytest.mark.parametrize(("start", "nbytes"), [(0, 11), (10, 1), (5, 6), (4096, 4096)])
    def test_range_past_the_end(self, store: Store, start: int, nbytes: int) -> None:
        """A short object is damage: object, expected and found length are named."""
        store.put("a/short", b"0123456789")
        with pytest.raises(
            DamagedError, match=rf"a/short: expected at least {start + nbytes} bytes, found 10"
        ):
            store.get_range("a/short", start, nbytes)

    def test_negative_range(self, store: Store) -> None:
        """Never counted from the end."""
        store.put("a", b"0123456789")
        with pytest.raises(UsageError):
            store.get_range("a", -1, 1)

    def test_put_never_overwrites(self, store: Store) -> None:
        """Equal bytes again are fine; others are refused, and nothing changes."""
        store.put("a", b"first")
        store.put("a", b"first")
        for other in (b"other", b"", b"firs", b"first and much more"):
            with pytest.raises(ConflictError, match=r"a: exists with other bytes"):
                store.put("a", other)
        assert store.get("a", max_bytes=100) == b"first"

    def test_put_large_never_overwrites(self, store: Store) -> None:
        """Refused whatever the bytes are."""
        first = page_aligned(5000)
        store.put_large("a", first)
        for other in (page_aligned(5000), page_aligned(1)):
            with pytest.raises(ConflictError, match=r"a: exists"):
                store.put_large("a", other)
        assert store.get("a", max_bytes=5000) == bytes(first)

    @pytest.mark.parametrize("size", SIZES)
    def test_large_round_trip(self, store: Store, size: int) -> None:
        """Any length, from aligned, unaligned and read-only memory, back into any memory."""
        memory = page_aligned(size + 8)
        whole = bytes(memory)
        for name, view, expected in (
            ("aligned", memory[:size], whole[:size]),
            ("unaligned", memory[8:], whole[8:]),
            ("readonly", memory[:size].toreadonly(), whole[:size]),
        ):
            told: list[int] = []
            store.put_large(name, view, on_progress=told.append)
            assert sum(told) == size
            info = store.head(name)
            assert info is not None
            assert info.size == size
            for at in (0, 3):
                into = page_aligned(size + at)[at:]
                store.read_into(name, 0, into)
                assert into == expected
        if size > 3 * 4096:
            tail = page_aligned(size - 4096)
            store.read_into("aligned", 4096, tail)
            assert tail == whole[4096:size]

    def test_large_is_paced(self, store: Store) -> None:
        """Each byte is taken from the budget exactly once."""
        size = 9 * 2**20 + 3
        slept: list[float] = []
        store.pace = pace = Pace(2.0**26, clock=lambda: 0.0, sleep=slept.append)
        store.put_large("a", page_aligned(size))
        assert slept
        assert max(slept) == pytest.approx((size - pace.grain_bytes) / 2**26)

    def test_create(self, store: Store) -> None:
        """The first creates; later ones are told and change nothing."""
        assert store.create("m/1.json", b"mine") is CreateOutcome.COMMITTED
        assert store.create("m/1.json", b"mine") is CreateOutcome.EXISTS
        assert store.create("m/1.json", b"yours") is CreateOutcome.EXISTS
        assert store.get("m/1.json", max_bytes=10) == b"mine"

    @pytest.mark.parametrize("nbytes", [10, 2**20 + 1])
    def test_create_race(self, store: Store, nbytes: int) -> None:
        """Of many creators at once exactly one wins, and the object is what it wrote."""
        gate = threading.Barrier(CREATORS, timeout=DEADLINE_S)

        def attempt(number: int) -> CreateOutcome:
            data = bytes([number]) * nbytes
            gate.wait()
            return store.create("m/race", data)

        with ThreadPoolExecutor(CREATORS) as pool:
            outcomes = list(pool.map(attempt, range(CREATORS), timeout=DEADLINE_S))
        winners = [n for n, outcome in enumerate(outcomes) if outcome is CreateOutcome.COMMITTED]
        assert len(winners) == 1
        assert outcomes.count(CreateOutcome.EXISTS) == CREATORS - 1
        assert store.get("m/race", max_bytes=nbytes) == bytes([winners[0]]) * nbytes
        assert [info.key for info in store.list("")] == ["m/race"]

    def test_list(self, store: Store) -> None:
        """Recursive, sorted by whole keys, with sizes, below the prefix only."""
        keys = ["a-b", "a.b", "a/b", "a/b.c", "a/b-c/d", "a/bc/d", "a/b0/x", "aa/b", "b"]
        for key in keys:
            store.put(key, key.encode())
        listed = list(store.list(""))
        assert [info.key for info in listed] == sorted(keys)
        assert [info.size for info in listed] == [len(key) for key in sorted(keys)]
        assert [info.key for info in store.list("a/")] == [
            "a/b",
            "a/b-c/d",
            "a/b.c",
            "a/b0/x",
            "a/bc/d",
        ]
        assert [info.key for info in store.list("a/bc/")] == ["a/bc/d"]
        assert list(store.list("none/")) == []
        assert list(store.list("b/")) == []
        assert list(store.list("aa/b/")) == []

    def test_list_survives_deletes(self, store: Store) -> None:
        """What is deleted while a listing runs does no harm."""
        for number in range(10):
            store.put(f"d{number}/x", b"x")
        for info in store.list(""):
            for number in range(10):
                store.delete(f"d{number}/x")
            assert info.key.endswith("/x")
        assert list(store.list("")) == []

    def test_delete(self, store: Store) -> None:
        """Gone, alone, and the key may be written anew."""
        store.put("a/b", b"1")
        store.put("a/c", b"2")
        assert store.delete("a/b") is True
        assert store.delete("a/b") is False
        assert [info.key for info in store.list("")] == ["a/c"]
        store.put("a/b", b"other")
        assert store.get("a/b", max_bytes=5) == b"other"

    def test_deletes_do_not_disturb_writers(self, store: Store) -> None:
        """Writers and deleters of neighbouring objects at once: each sees its own."""

        def churn(worker: int) -> None:
            for number in range(20):
                key = f"same/place/{worker}-{number}"
                store.put(key, b"x")
                assert store.delete(key) is True

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(4), timeout=DEADLINE_S))
        assert list(store.list("")) == []

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys(self, store: Store, key: str) -> None:
        """No call takes a key that is empty, absolute, or leaves the run."""
        into = memoryview(bytearray(1))
        for call in (
            lambda: store.get(key, max_bytes=1),
            lambda: store.get_range(key, 0, 1),
            lambda: store.read_into(key, 0, into),
            lambda: store.head(key),
            lambda: store.put(key, b"x"),
            lambda: store.put_large(key, into),
            lambda: store.create(key, b"x"),
            lambda: store.delete(key),
            lambda: store.local_path(key),
        ):
            with pytest.raises(UsageError, match="key"):
                call()
        assert list(store.list("")) == []

    @pytest.mark.parametrize("prefix", ["a", "/", "../", "a//", "/a/", "a/../", "./"])
    def test_bad_prefixes(self, store: Store, prefix: str) -> None:
        """A prefix is a key and a slash, or empty."""
        with pytest.raises(UsageError):
            list(store.list(prefix))
        with pytest.raises(UsageError):
            store.sweep(prefix, older_than_s=0)

    def test_sweep_leaves_objects(self, store: Store) -> None:
        """Only what is unfinished may go."""
        store.put("a/b", b"x")
        assert store.sweep("", older_than_s=0) == 0
        assert store.get("a/b", max_bytes=1) == b"x"

    def test_local_path(self, store: Store) -> None:
        """A store that says it has files shows them; another says None."""
        store.put("a/b", b"bytes")
        path = store.local_path("a/b")
        assert (path is not None) is store.capabilities.local_path
        if path is not None:
            assert path.read_bytes() == b"bytes"
