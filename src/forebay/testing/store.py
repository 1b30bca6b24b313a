"""What every store must do, as tests: subclass ``StoreContract`` and give it a ``store`` fixture.

::

    class TestMine(StoreContract):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore(...)
"""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.errors import ConflictError, DamagedError, NotFoundError, StoreError, UsageError
from forebay.storage.pace import Pace
from forebay.storage.store import CreateOutcome, Store

LARGE_SIZES = (0, 1, 4095, 4096, 4097, 9 * 2**20 + 3)
BAD_KEYS = (
    *("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a/..", ".hidden"),
    *("a/.b", "a b", "a\n", "a\0", "a\\b", "ä", "a:b", "~/a", "a*"),
)


def _page(data: bytes) -> memoryview:
    """A copy in page-aligned memory, as images are."""
    page = mmap.mmap(-1, max(len(data), 1))
    page.write(data)
    return memoryview(page)[: len(data)]


def _pattern(nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


def _racing(store: Store, key: str, bodies: list[bytes]) -> list[CreateOutcome]:
    barrier = threading.Barrier(len(bodies))

    def one(body: bytes) -> CreateOutcome:
        barrier.wait()
        return store.create(key, body)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(one, bodies))


class StoreContract:
    """The tests; each takes an empty store."""

    def test_what_is_put_is_there(self, store: Store) -> None:
        """Put, get, head and the bound of get."""
        store.put("a/b", b"hello")
        assert store.get("a/b", max_bytes=5) == b"hello"
        info = store.head("a/b")
        assert info is not None
        assert (info.key, info.size) == ("a/b", 5)
        assert info.modified_s > 10**9
        with pytest.raises(StoreError, match="5 bytes, expected at most 4"):
            store.get("a/b", max_bytes=4)
        store.put("empty", b"")
        assert store.get("empty", max_bytes=0) == b""

    def test_what_is_not_there(self, store: Store) -> None:
        """No object, no prefix taken for one."""
        store.put("a/b", b"x")
        for key in ("nothing", "a", "a/c", "a/b/c"):
            assert store.head(key) is None
            with pytest.raises(NotFoundError, match=key):
                store.get(key, max_bytes=10)
            with pytest.raises(NotFoundError, match=key):
                store.read_into(key, 0, memoryview(bytearray(1)))
            assert store.delete(key) is False
        assert store.get("a/b", max_bytes=1) == b"x"

    def test_ranges(self, store: Store) -> None:
        """Any range that is there; a longer one is damage."""
        data = _pattern(10_000)
        store.put("k", data)
        for start, count in ((0, 10_000), (0, 0), (1, 4096), (9_999, 1), (10_000, 0)):
            assert store.get_range("k", start, count) == data[start : start + count]
        for start, count in ((0, 10_001), (9_999, 2), (20_000, 1)):
            with pytest.raises(DamagedError, match=r"expected at least .* found 10000"):
                store.get_range("k", start, count)

    def test_nothing_is_overwritten(self, store: Store) -> None:
        """The same bytes again are fine for put; other bytes are refused everywhere."""
        store.put("k", b"one")
        store.put("k", b"one")
        for other in (b"two", b"", b"one more", b"on"):
            with pytest.raises(ConflictError, match="k: exists"):
                store.put("k", other)
        with pytest.raises(ConflictError, match="k: exists"):
            store.put_large("k", _page(b"one"))
        assert store.create("k", b"two") is CreateOutcome.EXISTS
        assert store.get("k", max_bytes=9) == b"one"

    @pytest.mark.parametrize("size", LARGE_SIZES)
    @pytest.mark.parametrize("aligned", [True, False])
    def test_large_objects(self, store: Store, size: int, aligned: bool) -> None:
        """Any size, aligned or not, with every byte told of."""
        data = _pattern(size)
        told: list[int] = []
        view = _page(data) if aligned else memoryview(b"x" + data)[1:]
        store.put_large("d/large", view, on_progress=told.append)
        assert store.get("d/large", max_bytes=size) == data
        assert sum(told) == size
        assert [info.size for info in store.list("")] == [size]

    def test_a_paced_object_is_whole(self, store: Store) -> None:
        """A pace takes every byte and changes none."""
        data = _pattern(300_000)
        waits: list[float] = []
        pace = Pace(1e6, clock=lambda: 0.0, sleep=waits.append)
        store.put_large("k", _page(data), pace=pace)
        assert store.get("k", max_bytes=len(data)) == data
        assert max(waits) == pytest.approx((len(data) - pace.grain_bytes) / 1e6)

    def test_a_list_is_sorted_by_key(self, store: Store) -> None:
        """All below a prefix, in the order of their keys."""
        keys = ["a", "b/1", "b/10", "b/2/x", "b/2-y", "b.c", "c/d/e", "b0"]
        for key in keys:
            store.put(key, key.encode())
        assert [info.key for info in store.list("")] == sorted(keys)
        below = sorted(key for key in keys if key.startswith("b/"))
        assert [info.key for info in store.list("b/")] == below
        assert [(info.key, info.size) for info in store.list("c/")] == [("c/d/e", 5)]
        assert list(store.list("nothing/")) == []

    def test_a_deleted_object_is_gone_and_its_name_free(self, store: Store) -> None:
        """Delete once is True, again False."""
        store.put("a/b", b"x")
        store.put("a/c", b"y")
        assert store.delete("a/b") is True
        assert store.delete("a/b") is False
        assert store.head("a/b") is None
        assert [info.key for info in store.list("")] == ["a/c"]
        store.put("a/b", b"other")
        assert store.get("a/b", max_bytes=9) == b"other"

    def test_of_many_creators_one_wins(self, store: Store) -> None:
        """Sixteen threads, one COMMITTED, and its bytes stand."""
        assert store.capabilities.create_if_absent
        for turn in range(5):
            bodies = [b"%d" % number * 1000 for number in range(16)]
            outcomes = _racing(store, f"m/{turn}", bodies)
            assert outcomes.count(CreateOutcome.COMMITTED) == 1
            assert outcomes.count(CreateOutcome.EXISTS) == 15
            winner = bodies[outcomes.index(CreateOutcome.COMMITTED)]
            assert store.get(f"m/{turn}", max_bytes=10**5) == winner
        assert len(list(store.list(""))) == 5

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_bad_key_is_refused_everywhere(self, store: Store, key: str) -> None:
        """Before anything is read or written."""
        calls = (
            lambda: store.get(key, max_bytes=1),
            lambda: store.head(key),
            lambda: store.put(key, b""),
            lambda: store.put_large(key, memoryview(b"")),
            lambda: store.create(key, b""),
            lambda: store.delete(key),
            lambda: store.local_path(key),
            lambda: store.read_into(key, 0, memoryview(bytearray(1))),
        )
        for call in calls:
            with pytest.raises(UsageError, match="key "):
                call()
        if key not in ("", "a/"):  # both are good prefixes
            with pytest.raises(UsageError, match="key "):
                list(store.list(key + "/"))
        assert list(store.list("")) == []

    def test_a_local_path_holds_the_bytes(self, store: Store) -> None:
        """Where the store says that it has files."""
        store.put("a/b", b"hello")
        path = store.local_path("a/b")
        assert (path is not None) == store.capabilities.local_path
        if path is not None:
            assert path.read_bytes() == b"hello"
