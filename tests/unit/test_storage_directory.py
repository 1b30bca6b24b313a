"""What is particular to a directory: links, strangers, leftovers, a full or refusing disk."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from forebay.errors import ConflictError, DamagedError, FullError, NotFoundError, StoreError
from forebay.storage import durable
from forebay.storage.address import open_store
from forebay.storage.directory import DirectoryStore
from forebay.storage.store import CreateOutcome
from forebay.testing.store import page_aligned
from tests import disks

MEGABYTE = 2**20


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "disk", "8m") as path:
        yield path


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


class TestOpening:
    def test_makes_the_run_and_flushes_its_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[Path] = []
        monkeypatch.setattr(durable, "sync_directory", synced.append)
        DirectoryStore(tmp_path / "run")
        assert (tmp_path / "run").is_dir()
        assert synced == [tmp_path]

    def test_missing_parent_is_a_typo(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError) as caught:
            open_store(tmp_path / "chekpoints" / "deep" / "run")
        assert f"{tmp_path}/chekpoints does not exist" in one_line(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_a_file_is_no_run(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_bytes(b"")
        with pytest.raises(StoreError, match="run: is a file, expected a directory"):
            open_store(tmp_path / "run")
        with pytest.raises(StoreError, match=rf"{tmp_path}/run is no directory"):
            open_store(tmp_path / "run" / "below")

    def test_for_reading_it_must_be_there(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="run: does not exist"):
            open_store(tmp_path / "run", make=False)
        assert list(tmp_path.iterdir()) == []

    def test_unwritable(self, small_disk: Path) -> None:
        (small_disk / "there").mkdir()
        remount = ["mount", "-o", "remount,ro", str(small_disk)]
        subprocess.run(remount, timeout=30, check=True)
        with pytest.raises(StoreError) as caught:
            open_store(small_disk / "run")
        said = one_line(caught.value)
        assert f"{small_disk}/run: cannot be used: Read-only file system: mount it for" in said
        with pytest.raises(StoreError, match="there: is not writable: allow writing there"):
            open_store(small_disk / "there")
        assert list(open_store(small_disk / "there", make=False).list("")) == []

    def test_no_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path, **_: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr(Path, "stat", refuse)
        with pytest.raises(StoreError, match="run: cannot be used: Permission denied: allow"):
            open_store(tmp_path / "run")

    def test_a_tmpfs_does_not_survive_a_power_cut(self, small_disk: Path) -> None:
        assert open_store(small_disk / "run").capabilities.durable is False

    def test_the_run_itself_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "true").mkdir()
        (tmp_path / "run").symlink_to("true")
        store = open_store(tmp_path / "run")
        store.put("a/b", b"x")
        assert store.get("a/b", max_bytes=1) == b"x"
        assert (tmp_path / "true/a/b").read_bytes() == b"x"


class TestLinks:
    """Nothing outside of the run is read, listed, changed or deleted through a link in it."""

    CALLS: ClassVar[dict[str, Callable[[DirectoryStore, str], Any]]] = {
        "get": lambda s, k: s.get(k, max_bytes=100),
        "get_range": lambda s, k: s.get_range(k, 0, 1),
        "put": lambda s, k: s.put(k, b"secret"),
        "put_large": lambda s, k: s.put_large(k, page_aligned(1)),
        "create": lambda s, k: s.create(k, b"x"),
        "head": lambda s, k: s.head(k),
        "delete": lambda s, k: s.delete(k),
        "list": lambda s, k: list(s.list(k.rpartition("/")[0] + "/")),
        "sweep": lambda s, k: s.sweep(k.rpartition("/")[0] + "/", older_than_s=0),
    }

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Iterator[Path]:
        outside = tmp_path / "run-outside"  # begins as the run's own name does
        (outside / "deep").mkdir(parents=True)
        (outside / "file").write_bytes(b"secret")
        (outside / "deep" / ".x.1.tmp").write_bytes(b"")
        before = sorted(outside.rglob("*"))
        yield outside
        assert sorted(outside.rglob("*")) == before
        assert (outside / "file").read_bytes() == b"secret"

    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    @pytest.mark.parametrize("key", ["link/file", "link/new", "link/deep/new"])
    def test_linked_directory(
        self, store: DirectoryStore, outside: Path, key: str, call: Callable[..., Any]
    ) -> None:
        (store.root / "link").symlink_to(outside)
        with pytest.raises(StoreError, match=r"a link leads out of .*run: remove it"):
            call(store, key)

    def test_linked_file(self, store: DirectoryStore, outside: Path) -> None:
        (store.root / "link").symlink_to(outside / "file")
        with pytest.raises(StoreError, match=r"link: cannot be opened: .*: a link stands there"):
            store.get("link", max_bytes=100)
        with pytest.raises(ConflictError):
            store.put("link", b"secret")
        assert store.create("link", b"x") is CreateOutcome.EXISTS
        assert store.head("link") is None
        assert store.delete("link") is True
        assert not os.path.lexists(store.root / "link")

    def test_listing_passes_links_by(self, store: DirectoryStore, outside: Path) -> None:
        store.put("a/b", b"x")
        (store.root / "a" / "dir").symlink_to(outside)
        (store.root / "a" / "file").symlink_to(outside / "file")
        assert [info.key for info in store.list("")] == ["a/b"]
        assert store.sweep("", older_than_s=0) == 0

    def test_loop(self, store: DirectoryStore) -> None:
        (store.root / "loop").symlink_to("loop")
        with pytest.raises(StoreError, match="loop"):
            store.get("loop/x", max_bytes=1)


class TestStrangers:
    def test_what_is_no_object_is_none(self, store: DirectoryStore) -> None:
        (store.root / "dir").mkdir()
        os.mkfifo(store.root / "pipe")  # reading one would wait for ever
        for key in ("dir", "pipe"):
            assert store.head(key) is None
            with pytest.raises(NotFoundError, match=f"{key}: is no file"):
                store.get(key, max_bytes=100)
            with pytest.raises(ConflictError):
                store.put(key, b"")
        assert list(store.list("")) == []

    def test_listed_names_are_keys(self, store: DirectoryStore) -> None:
        store.put("a/b", b"x")
        for name in ("with space", ".hidden", "ünder", "x~"):
            (store.root / "a" / name).write_bytes(b"")
        (store.root / "lost+found").mkdir()
        (store.root / "lost+found" / "f").write_bytes(b"")
        Path(os.fsdecode(os.fsencode(store.root) + b"/\xff")).write_bytes(b"")
        assert [info.key for info in store.list("")] == ["a/b"]

    def test_a_file_where_a_directory_belongs(self, store: DirectoryStore) -> None:
        store.put("a", b"x")
        with pytest.raises(StoreError, match="a part of the path is a file"):
            store.put("a/b", b"x")
        assert store.get("a", max_bytes=1) == b"x"

    def test_delete_leaves_no_empty_directories_but_strangers(self, store: DirectoryStore) -> None:
        store.put("a/b/c", b"x")
        store.put("a/stays", b"x")
        store.put("z/x", b"x")
        (store.root / "z" / "a note").write_bytes(b"")
        assert store.delete("a/b/c")
        assert store.delete("z/x")
        assert names_in(store.root) == ["a", "z"]
        assert names_in(store.root / "a") == ["stays"]
        assert names_in(store.root / "z") == ["a note"]


class TestUnfinished:
    def test_hidden_then_swept_once_old(self, store: DirectoryStore) -> None:
        store.put("data/1/kept", b"x")
        for at in ("data/1", "data/2"):
            left = store.root / at / ".rank-00000.safetensors.0123456789ab.tmp"
            left.parent.mkdir(exist_ok=True)
            left.write_bytes(b"half")
        (store.root / "data/1/.note").write_bytes(b"a stranger's")
        assert [info.key for info in store.list("")] == ["data/1/kept"]
        assert store.sweep("data/", older_than_s=3600) == 0
        os.utime(left, (0, 0))
        assert store.sweep("data/", older_than_s=3600) == 1
        assert not (store.root / "data/2").exists()
        assert store.sweep("none/", older_than_s=0) == 0
        assert store.sweep("", older_than_s=0) == 1
        assert names_in(store.root / "data/1") == [".note", "kept"]


class TestFailures:
    def test_full_disk(self, small_disk: Path) -> None:
        store = open_store(small_disk / "run")
        store.put("data/first", b"x" * MEGABYTE)
        for size in (16 * MEGABYTE, 16 * MEGABYTE + 5):
            for view in (page_aligned(size), page_aligned(size + 8)[8:]):
                with pytest.raises(FullError) as caught:
                    store.put_large("data/second", view)
                said = one_line(caught.value)
                assert f"{small_disk}/run/data/second: cannot be written: No space left" in said
                assert "free space there" in said
        with pytest.raises(FullError):
            store.create("manifests/1.json", bytes(16 * MEGABYTE))
        assert [info.key for info in store.list("")] == ["data/first"]
        assert names_in(small_disk / "run/data") == ["first"]
        store.put_large("data/second", page_aligned(2 * MEGABYTE))  # the space came back
        assert store.get("data/first", max_bytes=MEGABYTE) == b"x" * MEGABYTE

    @pytest.mark.parametrize(
        ("number", "kind", "said"),
        [
            (errno.EDQUOT, FullError, "free space there"),
            (errno.ENOSPC, FullError, "free space there"),
            (errno.EIO, StoreError, "see the kernel's log"),
            (errno.EROFS, StoreError, "mount it for writing"),
        ],
    )
    def test_system_errors(
        self,
        store: DirectoryStore,
        monkeypatch: pytest.MonkeyPatch,
        number: int,
        kind: type[StoreError],
        said: str,
    ) -> None:
        def fail(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pwrite", fail)
        with pytest.raises(kind, match=f"a/b: cannot be written: .*{said}") as caught:
            store.put("a/b", b"x")
        assert type(caught.value) is kind
        assert isinstance(caught.value.__cause__, OSError)
        monkeypatch.undo()
        assert list(store.list("")) == []
        monkeypatch.setattr(os, "preadv", fail)
        store.put("a/b", b"x")
        with pytest.raises(StoreError, match="a/b: cannot be read"):
            store.get_range("a/b", 0, 1)

    def test_existing_is_reported_only_once_durable(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its creator may have linked the name and not yet flushed the directory."""
        store.create("m/1.json", b"x")
        synced: list[Path] = []
        monkeypatch.setattr(durable, "sync_directory", synced.append)
        assert store.create("m/1.json", b"x") is CreateOutcome.EXISTS
        assert synced == [store.root / "m"]

    def test_existing_costs_no_writing(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("a", b"x")
        monkeypatch.setattr(durable, "write_new", lambda *_, **__: pytest.fail("it wrote"))
        with pytest.raises(ConflictError):
            store.put_large("a", page_aligned(MEGABYTE))

    def test_a_deleted_directory_is_made_again(
        self, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A delete may take the empty directory away just before the file is opened in it."""
        real, times = durable.write_new, [0]

        def after_a_delete(path: Path, view: memoryview, **options: Any) -> None:
            times[0] += 1
            if times[0] == 1:
                path.parent.rmdir()
            real(path, view, **options)

        monkeypatch.setattr(durable, "write_new", after_a_delete)
        assert store.create("manifests/1.json", b"x") is CreateOutcome.COMMITTED
        assert times == [2]
        assert store.get("manifests/1.json", max_bytes=1) == b"x"

    def test_cut_file(self, store: DirectoryStore) -> None:
        store.put_large("a/b", page_aligned(3 * MEGABYTE))
        os.truncate(store.root / "a/b", 2 * MEGABYTE + 100)
        into = page_aligned(3 * MEGABYTE)
        with pytest.raises(
            DamagedError, match=r"a/b: expected at least 3145728 bytes, found 2097252: use another"
        ):
            store.read_into("a/b", 0, into)
