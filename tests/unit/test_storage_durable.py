"""Writing files so that they appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.storage import direct, durable
from forebay.testing.store import page_aligned

MEGABYTE = 2**20


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def io_error(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Each fsync, link and unlink, in order, with the name it was for."""
    seen: list[tuple[str, str]] = []
    real_fsync, real_link, real_unlink = os.fsync, os.link, Path.unlink

    def fsync(fd: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        seen.append(("fsync", "hidden" if durable.is_unfinished(name) else name))
        real_fsync(fd)

    def link(source: Path, target: Path) -> None:
        seen.append(("link", target.name))
        real_link(source, target)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        seen.append(("unlink", "hidden" if durable.is_unfinished(path.name) else path.name))
        real_unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(Path, "unlink", unlink)
    return seen


@pytest.mark.parametrize("nbytes", [0, 10, 2 * MEGABYTE + 5])
def test_bytes_then_name_then_directory(
    tmp_path: Path, calls: list[tuple[str, str]], nbytes: int
) -> None:
    durable.write_new(tmp_path / "x", page_aligned(nbytes))
    assert calls == [
        ("fsync", "hidden"),
        ("link", "x"),
        ("unlink", "hidden"),
        ("fsync", tmp_path.name),
    ]


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    shown: list[list[str]] = []
    view = page_aligned(9 * MEGABYTE)
    durable.write_new(tmp_path / "x", view, on_progress=lambda _: shown.append(names_in(tmp_path)))
    assert len(shown) >= 3
    for names in shown:
        assert [durable.is_unfinished(name) for name in names] == [True]
    assert names_in(tmp_path) == ["x"]


@pytest.mark.parametrize("aligned", [True, False])
def test_large_writes_are_direct_but_for_the_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aligned: bool
) -> None:
    real_pwrite = os.pwrite
    seen: list[tuple[bool, int]] = []

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        seen.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), data.nbytes))
        return real_pwrite(fd, data, at)

    probe = os.open(tmp_path, os.O_RDONLY | os.O_TMPFILE | os.O_RDWR)
    try:
        if not direct.switch(probe, True):
            pytest.skip("the filesystem of the temporary directory has no O_DIRECT")
    finally:
        os.close(probe)
    monkeypatch.setattr(os, "pwrite", pwrite)
    view = page_aligned(4 * MEGABYTE + 4096 + 5 + 8)
    view = view[:-8] if aligned else view[8:]
    durable.write_new(tmp_path / "x", view)
    assert seen == [(True, 4 * MEGABYTE), (True, 4096), (False, 5)]
    assert (tmp_path / "x").read_bytes() == view


def test_filesystem_that_refuses_direct_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag is taken, the write refused: some network filesystems do so."""
    real_pwrite, real_preadv = os.pwrite, os.preadv
    refused: list[int] = []

    def refuse(fd: int, at: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        refuse(fd, at)
        return real_pwrite(fd, data, at)

    def preadv(fd: int, into: list[memoryview], at: int) -> int:
        refuse(fd, at)
        return real_preadv(fd, into, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "preadv", preadv)
    view, told = page_aligned(5 * MEGABYTE + 3), list[int]()
    durable.write_new(tmp_path / "x", view, on_progress=told.append)
    assert sum(told) == view.nbytes
    into = page_aligned(view.nbytes)
    into[:] = bytes(view.nbytes)
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    try:
        assert direct.read_at(fd, 0, into) == view.nbytes
    finally:
        os.close(fd)
    assert into == view
    assert set(refused) <= {0}


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: real_pwrite(fd, data[: data.nbytes // 2 + 1], at)
    )
    view = page_aligned(2 * MEGABYTE + 77)
    durable.write_new(tmp_path / "x", view)
    assert (tmp_path / "x").read_bytes() == view


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = page_aligned(2 * MEGABYTE + 77)
    (tmp_path / "x").write_bytes(view)
    real_preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, into, at: real_preadv(fd, [into[0][: into[0].nbytes // 2 + 1]], at)
    )
    into = page_aligned(view.nbytes)
    into[:] = bytes(view.nbytes)
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    try:
        assert direct.read_at(fd, 0, into) == view.nbytes
    finally:
        os.close(fd)
    assert into == view


def test_an_existing_name_is_kept(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"first")
    with pytest.raises(FileExistsError):
        durable.write_new(tmp_path / "x", memoryview(b"second"))
    assert names_in(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"first"


def test_a_failed_flush_condemns_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []

    def fail(fd: int) -> None:
        flushed.append(fd)
        io_error()

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        durable.write_new(tmp_path / "x", page_aligned(2 * MEGABYTE))
    assert len(flushed) == 1
    assert names_in(tmp_path) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        durable.write_new(tmp_path / "x", page_aligned(9 * MEGABYTE), on_progress=stop)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_filesystem_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    durable.write_new(tmp_path / "x", memoryview(b"first"))
    with pytest.raises(FileExistsError):
        durable.write_new(tmp_path / "x", memoryview(b"second"))
    assert names_in(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"first"


def test_a_link_whose_reply_was_lost_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_link = os.link

    def link(source: Path, target: Path) -> None:
        real_link(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", link)
    durable.write_new(tmp_path / "x", memoryview(b"mine"))
    assert names_in(tmp_path) == ["x"]


def test_killed_writer_leaves_only_a_hidden_file(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from forebay.storage import durable\n"
        "view = memoryview(bytes(9 * 2**20))\n"
        "kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "durable.write_new(Path(sys.argv[1]) / 'x', view, on_progress=kill)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert durable.is_unfinished(left.name)
    assert not durable.remove_unfinished(left, older_than_s=3600)
    assert durable.remove_unfinished(left, older_than_s=0)
    assert not durable.remove_unfinished(left, older_than_s=0)


def test_each_new_directory_is_flushed_into_its_parent(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    settled = set[Path]()
    (tmp_path / "a").mkdir()  # by somebody who has perhaps not flushed it
    durable.make_directories(tmp_path / "a/b/c", tmp_path, settled)
    assert calls == [("fsync", tmp_path.name), ("fsync", "a"), ("fsync", "b")]
    assert (tmp_path / "a/b/c").is_dir()
    calls.clear()
    durable.make_directories(tmp_path / "a/b/d", tmp_path, settled)
    assert calls == [("fsync", "b")]
    durable.make_directories(tmp_path / "a/b/d", tmp_path, settled)
    assert calls == [("fsync", "b")]
    (tmp_path / "a/b/d").rmdir()
    durable.make_directories(tmp_path / "a/b/d", tmp_path, settled)
    assert calls == [("fsync", "b")] * 2


def test_remove(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    (tmp_path / "x").write_bytes(b"")
    assert durable.remove(tmp_path / "x") is True
    assert calls == [("unlink", "x"), ("fsync", tmp_path.name)]
    assert durable.remove(tmp_path / "x") is False
    assert durable.remove(tmp_path / "none/x") is False


class TestAppendFile:
    def test_appends_are_flushed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, sizes = tmp_path / "journal", list[int]()
        real = os.fdatasync

        def fdatasync(fd: int) -> None:
            real(fd)
            sizes.append(os.fstat(fd).st_size)

        monkeypatch.setattr(os, "fdatasync", fdatasync)
        for part in (b"one", b"two"):
            file = durable.AppendFile(path)
            file.append(part)
            file.append(part)
            file.close()
        assert path.read_bytes() == b"oneonetwotwo"
        assert sizes == [3, 6, 9, 12]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_its_name_is_flushed_whoever_made_it(
        self, tmp_path: Path, calls: list[tuple[str, str]]
    ) -> None:
        (tmp_path / "journal").write_bytes(b"")
        durable.AppendFile(tmp_path / "journal").close()
        assert calls == [("fsync", tmp_path.name)]

    @pytest.mark.parametrize("call", ["fdatasync", "write"])
    def test_a_failure_condemns_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        file = durable.AppendFile(tmp_path / "journal")
        with monkeypatch.context() as broken:
            broken.setattr(os, call, io_error)
            with pytest.raises(OSError, match="Input/output error"):
                file.append(b"one")
        with pytest.raises(OSError, match="begin a new file"):
            file.append(b"two")
        file.close()
        assert b"two" not in (tmp_path / "journal").read_bytes()
