"""The journal: what comes back, from a whole file and from a torn one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.drain import journal as journal_module
from forebay.drain.journal import Ended, Journal, Line, Spilled, Uploaded, journal_path
from forebay.format.messages import Phase


def lines() -> list[Line]:
    digests = {"header": b"h", "slices": (b"s", b"t"), "blocks": ((), (b"b",)), "witnesses": ()}
    return [
        Spilled(step=1, attempt="a", rank=0, **digests),  # type: ignore[arg-type]
        Uploaded(step=1, attempt="a", rank=0, **digests),  # type: ignore[arg-type]
        Ended(step=1, attempt="a", phase=Phase.COMMITTED, at_s=1.5, node_ranks=(0, 1)),
    ]


def written(path: Path) -> Journal:
    made = Journal(path)
    assert made.replay() == []
    for line in lines():
        made.write(line)
    made.close()
    return made


def test_lines_come_back_as_they_were(tmp_path: Path) -> None:
    written(tmp_path / "journal")
    assert Journal(tmp_path / "journal").replay() == lines()
    assert [type(line) for line in Journal(tmp_path / "journal").replay()] == [
        Spilled,
        Uploaded,
        Ended,
    ]


def test_cut_at_every_byte_gives_a_prefix_and_takes_new_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    whole = path.read_bytes()
    seen = set()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        torn = Journal(path)
        found = torn.replay()
        assert found == lines()[: len(found)]
        seen.add(len(found))
        torn.write(lines()[2])
        torn.close()
        assert Journal(path).replay() == [*found, lines()[2]]
    assert seen == {0, 1, 2}


def test_a_flipped_bit_ends_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    data = bytearray(path.read_bytes())
    first = 12 + int.from_bytes(data[:4], "big")
    data[first + 20] ^= 1
    path.write_bytes(data)
    assert Journal(path).replay() == lines()[:1]


def test_restart_keeps_only_what_is_given(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = written(path)
    journal.restart(lines()[2:])
    journal.write(lines()[0])
    journal.close()
    assert Journal(path).replay() == [lines()[2], lines()[0]]
    assert [p.name for p in tmp_path.iterdir()] == ["journal"]


def test_a_failed_append_hides_no_later_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write(lines()[0])

    def torn(self: object, data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.AppendFile, "append", torn)
        with pytest.raises(OSError, match="No space"):
            journal.write(lines()[1])
    journal.write(lines()[2])
    journal.close()
    assert Journal(path).replay() == [lines()[0], lines()[2]]


def test_it_lies_on_the_local_tier_where_there_is_one(tmp_path: Path) -> None:
    assert journal_path(tmp_path / "job", None) == tmp_path / "job" / "journal"
    assert journal_path(tmp_path / "job", tmp_path / "home") == tmp_path / "home" / "journal"


def test_a_hidden_name_that_stays_makes_no_journal_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    written(path)
    unlink = os.unlink

    def refuse(name: str | Path, **more: object) -> None:
        if ".journal.new" in str(name):
            raise OSError(5, "refused")
        unlink(name, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr("os.unlink", refuse)
        again = Journal(path)
        with pytest.raises(OSError, match="hidden name"):
            again.restart(again.replay()[:1])
    again.write(lines()[0])
    again.close()
    assert Journal(path).replay() == [*lines(), lines()[0]]


def test_a_torn_tail_that_cannot_be_cut_hides_no_later_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    written(path)
    path.write_bytes(path.read_bytes()[:-3])
    torn = Journal(path)
    assert torn.replay() == lines()[:2]
    with monkeypatch.context() as patched:
        patched.setattr("os.truncate", lambda *_: (_ for _ in ()).throw(OSError(5, "refused")))
        with pytest.raises(OSError, match="refused"):
            torn.write(lines()[0])
    torn.write(lines()[2])
    torn.close()
    assert Journal(path).replay() == lines()


def test_a_journal_stays_small_and_forgets_nothing_that_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 20_000)
    path = tmp_path / "journal"
    journal, open_line = Journal(path), lines()[0]
    journal.write(open_line)
    most = 0
    for step in range(2, 600):
        digests = {"header": b"h" * 32, "slices": (b"s" * 32,), "blocks": ((),), "witnesses": ()}
        journal.write(Uploaded(step=step, attempt="a", rank=0, **digests))  # type: ignore[arg-type]
        journal.write(Ended(step=step, attempt="a", phase=Phase.COMMITTED, at_s=1.0))
        most = max(most, path.stat().st_size)
    journal.close()
    assert 15_000 < most < 40_000
    found = Journal(path).replay()
    assert open_line in found
    ended = [line.step for line in found if isinstance(line, Ended)]
    assert ended[-64:] == list(range(536, 600))
    assert len(found) < 600


def test_a_compaction_that_the_disk_refuses_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 100)
    path = tmp_path / "journal"
    journal = Journal(path)
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "write_new", full)
        for line in lines():
            journal.write(line)
    journal.write(lines()[1])
    journal.close()
    assert Journal(path).replay() == [*lines(), lines()[1]]
    monkeypatch.setattr(journal_module, "sync_directory", full)  # the new file is in place already
    again = Journal(path)
    again.replay()
    with pytest.raises(OSError, match="No space"):
        again.restart(lines()[:1])
    monkeypatch.undo()
    again.write(lines()[2])
    again.close()
    assert Journal(path).replay() == [lines()[0], lines()[2]]


def test_a_journal_of_another_agent_under_the_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    old, new = Journal(path), Journal(path)
    old.restart(lines())
    path.unlink()
    old.write(lines()[0])  # the name is free: it begins there
    assert Journal(path).replay() == lines()[:1]
    new.restart([lines()[1]])
    old.write(lines()[0])
    old.close()
    with pytest.raises(OSError, match="another journal"):
        old.write(lines()[0])
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 300)
    third = Journal(path)
    third.restart([])
    third.write(lines()[0])
    new.restart([lines()[1]])
    for _ in range(20):
        third.write(lines()[0])
    assert Journal(path).replay() == [lines()[1]]
