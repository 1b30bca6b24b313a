"""Several processes of a node that want the same bytes: one of them reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.errors import NotFoundError, StoreError
from forebay.storage.memory import MemoryStore
from forebay.storage.read_once import ReadOnce
from tests.disks import small_disk

DATA = bytes(range(256)) * 100


class Counting(MemoryStore):
    """Says how often it was read; each read takes a moment."""

    def __init__(self, nap_s: float = 0.05) -> None:
        super().__init__()
        self.reads = 0
        self._nap_s = nap_s
        self._counting = threading.Lock()
        self.put("data/one", DATA)

    def _slow(self) -> None:
        with self._counting:
            self.reads += 1
        time.sleep(self._nap_s)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self._slow()
        return super().get(key, max_bytes=max_bytes)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self._slow()
        super().read_into(key, start, into)


def test_one_of_eight_reads(tmp_path: Path) -> None:
    store = Counting()
    ranks = [ReadOnce(store, tmp_path / "shared") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda rank: rank.get("data/one", max_bytes=1 << 20), ranks)) == {DATA}
        assert store.reads == 1
        ranges = pool.map(lambda rank: rank.get_range("data/one", 7, 1000), ranks)
        assert set(ranges) == {DATA[7:1007]}
    assert store.reads == 2
    assert ranks[0].head("data/one") == store.head("data/one")
    assert [info.key for info in ranks[0].list("data/")] == ["data/one"]
    ranks[0].clear()
    assert not (tmp_path / "shared").exists()
    assert ReadOnce(store, tmp_path / "shared").get("data/one", max_bytes=1 << 20) == DATA
    assert store.reads == 3


def test_what_is_asked_for_again_comes_from_the_store(tmp_path: Path) -> None:
    """Its first bytes were found damaged."""
    store = Counting(0.0)
    one, other = ReadOnce(store, tmp_path / "s"), ReadOnce(store, tmp_path / "s")
    for expected in (1, 2, 3):
        one.get("data/one", max_bytes=1 << 20)
        assert store.reads == expected
    other.get("data/one", max_bytes=1 << 20)
    assert store.reads == 3


def test_an_error_is_the_asker_s_own(tmp_path: Path) -> None:
    store = Counting(0.0)
    for _ in range(2):
        with pytest.raises(NotFoundError):
            ReadOnce(store, tmp_path / "s").get("data/none", max_bytes=10)
    with pytest.raises(StoreError, match="at most 10"):
        ReadOnce(store, tmp_path / "s").get("data/one", max_bytes=10)
    with pytest.raises(NotImplementedError, match="opened to read"):
        ReadOnce(store, tmp_path / "s").put("data/two", b"")


HOLDER = """
import sys, time
from pathlib import Path
from forebay.storage.memory import MemoryStore
from forebay.storage.read_once import ReadOnce
class Stuck(MemoryStore):
    def get(self, key, *, max_bytes):
        print("reading", flush=True)
        time.sleep(3600)
ReadOnce(Stuck(), Path(sys.argv[1])).get("data/one", max_bytes=1 << 20)
"""


def test_one_that_dies_in_its_read_is_followed_by_the_next(tmp_path: Path) -> None:
    store = Counting(0.0)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "reading\n"
        impatient = ReadOnce(store, tmp_path / "s", patience_s=0.05)
        assert impatient.get("data/one", max_bytes=1 << 20) == DATA  # reads for itself
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(ReadOnce(store, tmp_path / "s").get, "data/one", max_bytes=1 << 20)
            time.sleep(0.1)
            assert not waits.done()
            os.kill(holder.pid, signal.SIGKILL)
            assert waits.result(60) == DATA
    assert store.reads == 2


def test_without_room_everybody_reads(tmp_path: Path) -> None:
    store = Counting(0.0)
    store.put("data/large", bytes(4 << 20))
    with small_disk(tmp_path / "disk", "1m") as disk:
        for _ in range(2):
            rank = ReadOnce(store, disk / "s")
            assert len(rank.get("data/large", max_bytes=1 << 30)) == 4 << 20
        assert [path.suffix for path in (disk / "s").iterdir()] == [".lock"]
    assert store.reads == 2
    nowhere = ReadOnce(store, tmp_path / "none" / "such")
    assert nowhere.get("data/one", max_bytes=1 << 20) == DATA
