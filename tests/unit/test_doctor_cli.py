"""What is wrong with a command line is told before anything is measured."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli import app, doctor
from forebay.doctor.finding import Verdict
from forebay.errors import UsageError


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("s3://",), "expected s3://bucket/run"),
        (("s3://bucket/run?nonsense=1",), "unknown option nonsense"),
        (("s3://bucket/run?part_size=some",), "?part_size='some'"),
        (("s3://bucket/run?path_style=perhaps",), "?path_style='perhaps'"),
        (("ftp://x/y",), "unknown scheme 'ftp'"),
        (("",), "expected a directory or a URL"),
        (("file://elsewhere/run",), "expected file:///absolute/path"),
        (("--peer", "7300"), "--peer '7300': expected HOST:PORT"),
        (("--local", "/nowhere/at/all"), "--local /nowhere/at/all: expected a directory"),
        (("--seconds", "0"), "--seconds: expected more than 0"),
        (("--seconds", "soon"), "--seconds: duration: expected"),
        (("--size", "many"), "--size: size: expected"),
        (("--timeout", "0s"), "--timeout: expected more than 0"),
        (("--slow-below", "120%"), "--slow-below: fraction: expected"),
        (("--streams", "0"), "--streams: expected 1 to 64"),
        (("--streams", "65"), "--streams: expected 1 to 64"),
        (("--file", "/nowhere/at/all.yaml"), "--file /nowhere/at/all.yaml"),
        (("--cluster", "abacus"), "abacus"),
        (("--write", "/nowhere/at/all.yaml"), "/nowhere/at is no directory"),
        (("--listen", "here"), "--listen 'here': expected PORT or HOST:PORT"),
        (("--listen", "0.0.0.0:0"), "give --token"),
        (("--listen", "0", "--listen-for", "-1"), "--listen-for"),
    ],
)
def test_bad_input(words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_TOKEN", raising=False)
    done = CliRunner().invoke(app, ["doctor", *words])
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)
    assert "\n" not in str(done.exception)
    assert "memory" not in done.output


def test_without_a_plan_and_a_gpu_nothing_is_expected() -> None:
    plan = doctor._expectations(None, None, None, None, here=False)
    assert plan.expected == {}
    assert plan.arena_bytes is None


def test_expectations_are_the_plans(tmp_path: Path) -> None:
    plan = doctor._expectations(None, None, None, None, here=True)
    assert plan.expected["cluster.d2h"].value == 55e9
    assert "measured" in plan.expected["cluster.d2h"].source
    assert plan.arena_bytes is not None
    assert "storage.per_node" not in plan.expected  # nobody said what store it is
    file = tmp_path / "cluster.yaml"
    file.write_text("preset: 70b\ncluster: {nvme: {value: 11 GB/s, source: node 17}}\n")
    ours = doctor._expectations(None, "dgx-b200", None, file, here=False)
    assert ours.expected["cluster.nvme"].value == 11e9
    assert ours.expected["cluster.nvme"].source == "node 17"
    stores = doctor._expectations(None, None, "s3", None, here=False)
    assert "storage.per_node" in stores.expected
    assert "cluster.d2h" not in stores.expected
    assert all(name.startswith(("cluster.", "storage.")) for name in ours.expected)
    assert not any(isinstance(each.value, str) for each in ours.expected.values())


def test_a_disk_without_threads_is_a_failed_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    (found,) = doctor._local(tmp_path, {}, 0.01, 2**20)
    assert found.verdict is Verdict.FAILED
    assert "pids" in found.to_do
    assert list(tmp_path.iterdir()) == []
