"""The store that fails on purpose does so when, where and as its script says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import FullError, StoreError, UsageError
from forebay.storage.store import CreateOutcome, Store
from forebay.testing import faulty
from forebay.testing.faulty import open_faulty
from forebay.testing.store import page_aligned

Script = Callable[..., None]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(*rules: dict[str, Any]) -> None:
        new = tmp_path / "new.json"
        new.write_text(json.dumps(rules))
        new.replace(tmp_path / "faults.json")

    write()
    return write


@pytest.fixture
def store(tmp_path: Path, script: Script) -> Store:
    return open_faulty(f"faulty+file://{tmp_path}/run?script={tmp_path}/faults.json")


def test_switched_on_and_off_while_open(store: Store, script: Script) -> None:
    store.put("a", b"x")
    script({"op": "put", "do": "enospc"})
    for _ in range(2):
        with pytest.raises(FullError, match="run/b: No space left on device"):
            store.put("b", b"x")
    script()
    store.put("b", b"x")
    script({"op": "put", "do": "eio", "message": "the disk is on fire"})
    with pytest.raises(StoreError, match="run/c: the disk is on fire"):
        store.put("c", b"x")
    assert [info.key for info in store.list("")] == ["a", "b"]


def test_after_and_times_and_match(store: Store, script: Script) -> None:
    script({"op": "put", "match": "rank-0+1", "do": "eio", "after": 2, "times": 2})
    failed = []
    for number in range(5):
        store.put(f"{number}/rank-00000", b"x")
        try:
            store.put(f"{number}/rank-00001", b"x")
        except StoreError:
            failed.append(number)
    assert failed == [1, 2]
    assert store.create("6/rank-00001", b"x") is CreateOutcome.COMMITTED


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("get", lambda s: s.get("a", max_bytes=1)),
        ("read_into", lambda s: s.get_range("a", 0, 1)),
        ("head", lambda s: s.head("a")),
        ("list", lambda s: list(s.list(""))),
        ("delete", lambda s: s.delete("a")),
        ("put", lambda s: s.put("b", b"x")),
        ("put_large", lambda s: s.put_large("b", page_aligned(1))),
        ("create", lambda s: s.create("b", b"x")),
    ],
)
def test_each_operation(
    store: Store, script: Script, tmp_path: Path, op: str, call: Callable[[Store], Any]
) -> None:
    store.put("a", b"x")
    script({"op": op, "do": "eio"})
    with pytest.raises(StoreError, match="Input/output error"):
        call(store)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["a"]


def test_lost_reply_of_a_create(store: Store, script: Script) -> None:
    script({"op": "create", "do": "lost_reply", "times": 1})
    assert store.create("m/1", b"mine") is CreateOutcome.UNKNOWN
    assert store.get("m/1", max_bytes=4) == b"mine"
    assert store.create("m/1", b"mine") is CreateOutcome.EXISTS


def test_lost_reply_of_a_put(store: Store, script: Script) -> None:
    script({"op": "put", "do": "lost_reply"})
    with pytest.raises(StoreError, match="the reply was lost"):
        store.put("a", b"x")
    assert store.get("a", max_bytes=1) == b"x"


def test_partial_leaves_nothing_visible(store: Store, script: Script) -> None:
    script({"op": "put_large", "do": "partial", "at_bytes": 100_000})
    told: list[int] = []
    with pytest.raises(StoreError, match="cut off at 100000 bytes"):
        store.put_large("a", page_aligned(200_000), on_progress=told.append)
    assert sum(told) == 100_000
    assert store.head("a") is None
    assert list(store.list("")) == []


def test_delay_waits_then_does_it(
    store: Store, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faulty.time, "sleep", slept.append)
    script({"op": "put", "do": "delay", "seconds": 60})
    store.put("a", b"x")
    assert slept == [60]
    assert store.get("a", max_bytes=1) == b"x"


def test_kill(store: Store, script: Script, tmp_path: Path) -> None:
    script({"op": "create", "do": "kill", "after": 2})
    code = (
        "import sys\n"
        "from forebay.testing.faulty import open_faulty\n"
        "store = open_faulty(sys.argv[1])\n"
        "store.create('a', b'x')\n"
        "store.create('b', b'x')\n"
    )
    command = [sys.executable, "-c", code, store.url]
    ended = subprocess.run(command, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["a"]


def test_script_that_goes_away(store: Store, script: Script, tmp_path: Path) -> None:
    script({"op": "put", "do": "eio"})
    with pytest.raises(StoreError):
        store.put("a", b"x")
    (tmp_path / "faults.json").unlink()
    store.put("a", b"x")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '[{"op": "putt", "do": "eio"}]',
        '[{"op": "put", "do": "explode"}]',
        '[{"op": "put", "do": "partial"}]',
        '[{"op": "put", "do": "eio", "match": "("}]',
        '[{"op": "put", "do": "eio", "tiems": 1}]',
    ],
)
def test_script_that_makes_no_sense(store: Store, tmp_path: Path, text: str) -> None:
    (tmp_path / "faults.json").write_text(text)
    with pytest.raises(UsageError, match=r"faults\.json: not a list of faults"):
        store.put("a", b"x")


def test_url_without_a_script(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected \?script="):
        open_faulty(f"faulty+file://{tmp_path}/run")
    with pytest.raises(UsageError, match=r"the script .*none\.json does not exist"):
        open_faulty(f"faulty+file://{tmp_path}/run?script={tmp_path}/none.json")
    assert list(tmp_path.iterdir()) == []
