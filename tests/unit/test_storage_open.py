"""URLs: which store they open, and one clear line where they open none."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.storage import address as contract
from forebay.storage.address import open_store, resolve_url
from forebay.storage.directory import DirectoryStore
from forebay.storage.memory import MemoryStore


def register(monkeypatch: pytest.MonkeyPatch, **targets: str) -> list[str]:
    """Make ``targets`` the installed entry points; returns the groups asked for."""
    asked: list[str] = []

    def points(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint(name, value, group) for name, value in targets.items()]

    monkeypatch.setattr(contract, "entry_points", points)
    return asked


def open_third_party(url: str) -> MemoryStore:
    return MemoryStore(url)


def open_nothing(url: str) -> None:
    return None


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "FILE://{}"])
def test_directory(tmp_path: Path, form: str) -> None:
    store = open_store(form.format(tmp_path / "run"))
    assert isinstance(store, DirectoryStore)
    assert store.url == str(tmp_path / "run")


def test_path_object_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store(Path("run")).url == open_store("./x/../run/").url == str(tmp_path / "run")


def test_percent_signs(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/a%20b").url == f"{tmp_path}/a b"
    assert open_store(f"{tmp_path}/a%20b").url == f"{tmp_path}/a%20b"


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert resolve_url("~/run") == "/home/somebody/run"


def test_memory_is_one_store_a_name() -> None:
    first = open_store("memory://test-open-a")
    assert isinstance(first, MemoryStore)
    assert open_store("memory://test-open-a") is first
    assert open_store("memory://test-open-b") is not first


@pytest.mark.parametrize("scheme", ["third", "third+file"])
def test_entry_point(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    asked = register(monkeypatch, third=f"{__name__}:open_third_party")
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.value.rpartition(":")[2]])
    assert open_store(f"{scheme}://x?y=z").url == f"{scheme}://x?y=z"
    assert asked == ["forebay.stores"]


def test_entry_point_that_gives_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, third=f"{__name__}:open_nothing")
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.value.rpartition(":")[2]])
    with pytest.raises(UsageError, match="open_nothing gave no Store"):
        open_store("third://x")


def test_faulty_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, faulty="forebay.testing.faulty:open_faulty")
    (tmp_path / "p.json").write_text("[]")
    store = open_store(f"faulty+file://{tmp_path}/run?script={tmp_path}/p.json")
    store.put("a", b"x")
    assert (tmp_path / "run/a").read_bytes() == b"x"


@pytest.mark.parametrize("url", ["ftp://host/run", "fiel:///run", "hdfs+x://a"])
def test_unknown_scheme(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    register(monkeypatch, third="a:b")
    with pytest.raises(UsageError) as caught:
        open_store(url)
    said = str(caught.value)
    assert f"unknown scheme {url.partition(':')[0]!r}" in said
    assert "known are a directory, az, file, gs, memory, s3, third" in said
    assert "\n" not in said


@pytest.mark.parametrize("url", ["", "a\0b", "file://", "file://otherhost/run", "file://run"])
def test_no_url_at_all(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"store: .*expected"):
        open_store(url)
    assert list(tmp_path.iterdir()) == []
