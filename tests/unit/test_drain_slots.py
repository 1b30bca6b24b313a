"""The agent's view of arenas: what it takes, what it refuses, whom it takes for alive."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forebay.drain.slots import Slots, check_ticket
from forebay.errors import FormatError, StoreError
from forebay.format.slot import SlotState
from forebay.locks import lock_owner
from tests.player import Player


@pytest.fixture
def player(tmp_path: Path) -> Iterator[Player]:
    made = Player(tmp_path, "/run")
    yield made
    made.die()


def opened(directory: Path) -> Slots:
    made = Slots(directory)
    made.refresh()
    return made


def test_a_staged_slot_is_found_once_and_again_when_refilled(
    tmp_path: Path, player: Player
) -> None:
    slots = opened(tmp_path)
    assert slots.occupied() == []
    player.fill(3)
    (ticket,) = slots.occupied()
    assert (ticket.stamp.step, ticket.layout, ticket.slot) == (3, player.layout, 0)
    hold = slots.take(ticket)
    assert player.state(0) is SlotState.DRAINING
    assert slots.occupied() == []
    slots.release(ticket.arena, ticket.slot, hold)
    assert player.state(0) is SlotState.FREE
    player.fill(4)
    assert [t.stamp.step for t in slots.occupied()] == [4]
    slots.close()


def test_the_oldest_snapshot_comes_first(tmp_path: Path, player: Player) -> None:
    player.fill(1, slot=1)
    player.fill(2, slot=0)
    assert [t.stamp.step for t in opened(tmp_path).occupied()] == [1, 2]


def test_a_slot_that_drains_by_nobody_is_found(tmp_path: Path, player: Player) -> None:
    player.fill(1)
    first = opened(tmp_path)
    first.take(first.occupied()[0])
    first.close()
    (ticket,) = opened(tmp_path).occupied()
    assert ticket.state is SlotState.DRAINING


def test_the_image_is_the_slots_own_memory(tmp_path: Path, player: Player) -> None:
    player.fill(1)
    slots = opened(tmp_path)
    hold = slots.take(slots.occupied()[0])
    image = slots.image(player.arena, 0, hold)
    assert bytes(image[: len(player.image.header)]) == player.image.header
    with pytest.raises(StoreError, match="gone"):
        slots.image("rank-00099.0.arena", 0, hold)
    image.release()


def test_a_damaged_ticket_is_refused_and_its_slot_given_back(
    tmp_path: Path, player: Player
) -> None:
    player.fill(1)
    at = player.head.control_start(0) + 64
    player.map[at : at + 8] = b"\xff" * 8
    assert opened(tmp_path).occupied() == []
    assert player.state(0) is SlotState.FREE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_bytes", 10**9),
        ("header_bytes", 10**9),
        ("rank", 7),
        ("node", 3),
    ],
)
def test_a_ticket_that_leaves_its_slot_is_refused(player: Player, field: str, value: int) -> None:
    player.fill(1)
    slots = opened(player.directory)
    (ticket,) = slots.occupied()
    check_ticket(ticket.layout, ticket.stamp, player.head, "here")
    bad = msgspec.structs.replace(ticket.layout, **{field: value})
    with pytest.raises(FormatError, match=r"^here: "):
        check_ticket(bad, ticket.stamp, player.head, "here")


def test_rows_and_names_outside_are_refused(player: Player) -> None:
    player.fill(1)
    (ticket,) = opened(player.directory).occupied()
    replace = msgspec.structs.replace
    row = replace(ticket.layout.slices[0], start=ticket.layout.image_bytes)
    with pytest.raises(FormatError, match="outside its image"):
        check_ticket(replace(ticket.layout, slices=[row]), ticket.stamp, player.head, "x")
    seen = replace(ticket.layout.witnesses[0], start=player.head.image_bytes)
    with pytest.raises(FormatError, match="outside its slot"):
        check_ticket(replace(ticket.layout, witnesses=[seen]), ticket.stamp, player.head, "x")
    with pytest.raises(FormatError, match="attempt"):
        check_ticket(ticket.layout, replace(ticket.stamp, attempt="../x"), player.head, "x")


def test_files_that_are_no_arenas_are_passed_over(tmp_path: Path, player: Player) -> None:
    (tmp_path / "rank-00007.0.arena").write_bytes(b"short")
    (tmp_path / "rank-00008.0.arena").symlink_to(tmp_path / player.arena)
    player.fill(1)
    assert [t.arena for t in opened(tmp_path).occupied()] == [player.arena]


def test_an_arena_that_cannot_be_mapped_for_a_while_is_tried_again(
    tmp_path: Path, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    player.fill(1)
    told: list[str] = []
    monkeypatch.setattr("forebay.drain.slots.emit", lambda name, **_: told.append(name))
    with monkeypatch.context() as patch:
        patch.setattr("forebay.drain.slots.mmap.mmap", no_memory)
        slots = opened(tmp_path)
        slots.refresh()
        assert slots.occupied() == []
    assert told == ["arena.refused"]
    slots.refresh()
    assert [t.stamp.step for t in slots.occupied()] == [1]
    slots.close()


def test_an_arena_replaced_under_its_name_is_mapped_anew(tmp_path: Path, player: Player) -> None:
    slots = opened(tmp_path)
    player.fill(1)
    hold = slots.take(slots.occupied()[0])
    (tmp_path / player.arena).unlink()
    player.die()
    again = Player(tmp_path, "/run")
    again.fill(1)
    slots.refresh()
    assert [t.slot for t in slots.occupied()] == [0]
    now = slots.take(slots.occupied()[0])
    with pytest.raises(StoreError, match="gone"):
        slots.image(player.arena, 0, hold)  # those bytes are another snapshot's
    slots.release(player.arena, 0, hold)
    assert again.state(0) is SlotState.DRAINING
    slots.release(player.arena, 0, now)
    assert again.state(0) is SlotState.FREE
    again.die()


def test_the_owner_of_a_lock_is_told_and_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.lock"
    assert lock_owner(path) is None
    path.touch()
    assert lock_owner(path) is None
    code = (
        "import fcntl,os,sys; fd=os.open(sys.argv[1],os.O_RDWR); "
        "fcntl.lockf(fd,fcntl.LOCK_EX); print('held',flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert lock_owner(path) == holder.pid != os.getpid()
        holder.communicate()
    assert lock_owner(path) is None
