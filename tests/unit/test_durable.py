"""A file appears whole and flushed or not at all; the order of the calls is what promises it."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from forebay.storage import durable
from forebay.storage.durable import AppendFile, make_directories, remove, write_new


def page(data: bytes) -> memoryview:
    made = mmap.mmap(-1, max(len(data), 1))
    made.write(data)
    return memoryview(made)[: len(data)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Flushes, links and removals in the order they are made."""
    made: list[tuple[str, str]] = []

    def name(fd: int) -> str:
        return Path(f"/proc/self/fd/{fd}").readlink().name.partition(".x.")[0] or "hidden"

    def tell(what: str, place: Any) -> None:
        original = getattr(os, what)

        def told(*args: Any, **kwargs: Any) -> Any:
            made.append((what, place(*args)))
            return original(*args, **kwargs)

        monkeypatch.setattr(os, what, told)

    tell("fsync", name)
    tell("fdatasync", name)
    tell("link", lambda _, target: Path(target).name)
    return made


def test_flushed_then_named_then_the_name_flushed(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    write_new(tmp_path / "x", page(b"data" * 5000))
    assert calls == [("fsync", "hidden"), ("link", "x"), ("fsync", tmp_path.name)]
    assert (tmp_path / "x").read_bytes() == b"data" * 5000
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_new_directories_are_flushed_into_their_parents(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    make_directories(tmp_path / "a" / "b", tmp_path)
    assert calls == [("fsync", tmp_path.name), ("fsync", "a")]
    make_directories(tmp_path / "a" / "b", tmp_path)
    assert len(calls) == 2


def test_a_removal_is_flushed(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    (tmp_path / "f").write_bytes(b"")
    assert remove(tmp_path / "f") is True
    assert calls == [("fsync", tmp_path.name)]
    assert remove(tmp_path / "f") is False
    assert len(calls) == 1


def test_what_exists_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "x", page(b"new"))
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_without_hard_links_a_rename_that_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    write_new(tmp_path / "x", page(b"one"))
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "x", page(b"two"))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"one")]


@pytest.mark.parametrize("call", ["fsync", "pwrite", "link"])
@pytest.mark.parametrize("aligned", [True, False])
def test_after_a_failure_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, aligned: bool
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    data = b"data" * 5000
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="Input/output"):
        write_new(tmp_path / "x", page(data) if aligned else memoryview(data))
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("aligned", [True, False])
def test_short_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aligned: bool
) -> None:
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: original(fd, data[:4096], at))
    data = bytes(range(256)) * 100
    told: list[int] = []
    view = page(data) if aligned else memoryview(data)
    write_new(tmp_path / "x", view, on_progress=told.append)
    assert (tmp_path / "x").read_bytes() == data
    assert sum(told) == len(data)


def test_a_write_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="wrote nothing"):
        write_new(tmp_path / "x", memoryview(b"data"))


def test_appends_are_whole_and_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, str]]
) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: original(fd, data[:3]))
    file = AppendFile(tmp_path / "log")
    file.append(b"hello world")
    file.close()
    again = AppendFile(tmp_path / "log")
    again.append(b"!")
    again.close()
    assert (tmp_path / "log").read_bytes() == b"hello world!"
    assert calls == [("fsync", tmp_path.name), ("fdatasync", "log"), ("fdatasync", "log")]
    assert durable.HIDDEN == "."
