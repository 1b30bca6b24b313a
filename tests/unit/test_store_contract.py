"""The contract, kept by every store there is; and how a store is found by its URL."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import ConflictError, FullError, NotFoundError, StoreError, UsageError
from forebay.storage.address import open_store, resolve_url
from forebay.storage.directory import DirectoryStore
from forebay.storage.memory import MemoryStore
from forebay.storage.store import CreateOutcome, Store
from forebay.testing.faulty import FaultyStore
from forebay.testing.store import StoreContract


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestDirectory(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return DirectoryStore(tmp_path / "run")


class TestSharedMemory(StoreContract):
    """A filesystem without O_DIRECT."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="forebay-test-") as made:
            yield DirectoryStore(Path(made) / "run")


class TestFaulty(StoreContract):
    """Without a rule it is the store that it wraps."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        script = tmp_path / "faults.json"
        script.write_text("[]")
        return FaultyStore("faulty://", MemoryStore(), script)


class TestWithoutLinks(StoreContract):
    """A filesystem without hard links: renamed without replacing."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        def refuse(source: object, target: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr("os.link", refuse)
        return DirectoryStore(tmp_path / "run")


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_no_temporary_stays_and_none_is_listed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run")
    store.put("a/b", b"x")
    store.put_large("a/c", memoryview(b"y"))
    store.create("a/b", b"other")
    with pytest.raises(ConflictError):
        store.put("a/c", b"other")
    assert files(store.root) == ["a/b", "a/c"]
    (store.root / "a" / ".c.123.tmp").write_bytes(b"torn")
    (store.root / ".hidden").mkdir()
    (store.root / ".hidden" / "x").write_bytes(b"")
    assert [info.key for info in store.list("")] == ["a/b", "a/c"]


def test_a_delete_removes_the_directories_it_empties(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "run")
    store.put("a/b/c", b"x")
    store.put("a/d", b"x")
    store.delete("a/b/c")
    assert [p.name for p in (store.root / "a").iterdir()] == ["d"]
    store.delete("a/d")
    assert list(store.root.iterdir()) == []
    assert store.root.is_dir()


def test_links_are_not_followed_out_of_the_run(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store = DirectoryStore(tmp_path / "run")
    (store.root / "d").symlink_to(outside)
    (store.root / "f").symlink_to(outside / "secret")
    with pytest.raises(StoreError, match="link"):
        store.put("d/new", b"x")
    with pytest.raises(StoreError):
        store.get("f", max_bytes=10)
    assert store.head("f") is None
    assert list(store.list("")) == []
    assert files(outside) == ["secret"]


def test_a_store_wants_its_parent(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"its parent .*/no does not exist"):
        open_store(tmp_path / "no" / "run")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="is a file, expected a directory"):
        open_store(tmp_path / "file")
    with pytest.raises(StoreError, match="its parent"):
        open_store(tmp_path / "file" / "run")
    with pytest.raises(NotFoundError, match="does not exist"):
        open_store(tmp_path / "run", make=False)
    assert not (tmp_path / "run").exists()
    open_store(tmp_path / "run")
    assert isinstance(open_store(tmp_path / "run", make=False), DirectoryStore)


def test_urls_name_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for spelling in ("run", "./run/", f"{tmp_path}/x/../run", f"file://{tmp_path}/run"):
        assert resolve_url(spelling) == str(tmp_path / "run")
    assert resolve_url(f"file://localhost{tmp_path}/a%20b") == str(tmp_path / "a b")
    for bad in ("file://host/x", "file://"):
        with pytest.raises(UsageError, match="file:///absolute/path"):
            resolve_url(bad)


def test_a_memory_store_is_one_by_name() -> None:
    one = open_store("memory://unit-test")
    one.put("a", b"x")
    assert open_store("memory://unit-test").get("a", max_bytes=1) == b"x"
    assert open_store("memory://unit-test-2").head("a") is None


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_object_stores_are_refused_in_plain_words(scheme: str) -> None:
    with pytest.raises(UsageError, match="object stores are not in this version; use a directory"):
        open_store(f"{scheme}://bucket/run")


def test_an_unknown_scheme_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"unknown scheme 'ftp'.* known are .*file.*memory"):
        open_store("ftp://host/run")
    with pytest.raises(UsageError, match="script"):
        open_store("faulty+memory://x")


def mount(path: Path, options: str) -> None:
    """Mount a tmpfs, or skip where this is not permitted."""
    path.mkdir()
    tool = shutil.which("mount")
    if tool is None:
        pytest.skip("mount is not installed")
    done = subprocess.run(
        [tool, "-t", "tmpfs", "-o", options, "forebay-test", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    mount(path, "size=1m")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_told_and_nothing_half_is_left(small: Path) -> None:
    store = DirectoryStore(small / "run")
    store.put("a", b"x")
    big = memoryview(bytes(4 * 2**20))
    for call in (
        lambda: store.put_large("big", big),
        lambda: store.put("big", bytes(big)),
        lambda: store.create("big", bytes(big)),
    ):
        with pytest.raises(FullError, match=r"run/big: cannot be written: No space left"):
            call()
    assert files(small) == ["run/a"]
    assert store.create("big", b"fits") is CreateOutcome.COMMITTED


def test_a_read_only_disk_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ro"
    mount(path, "size=1m")
    try:
        store = DirectoryStore(path / "run")
        store.put("a", b"x")
        subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
        with pytest.raises(StoreError, match=r"run/b: cannot be written: Read-only"):
            store.put("b", b"x")
        with pytest.raises(StoreError, match=r"run/a: cannot be deleted: Read-only"):
            store.delete("a")
        with pytest.raises(StoreError, match=r"other: cannot be made: Read-only"):
            DirectoryStore(path / "other")
        assert store.get("a", max_bytes=1) == b"x"
    finally:
        subprocess.run(["umount", str(path)], check=True)
