"""Reading images out of shared memory: only what is whole, and never what took its place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from forebay.errors import DamagedError, NotFoundError
from forebay.format import names
from forebay.format.slices import Box, TensorKey
from forebay.format.slot import WORD_BYTES, ArenaHead, Layout, SlotState, Stamp, Words, plan_arena
from forebay.restore.fetch import fetch
from forebay.restore.reads import Want, plan_reads
from forebay.restore.source import ArenaSource, StoreSource
from forebay.storage.memory import MemoryStore
from forebay.watch.events import Event, listen
from tests.build import Rank, image_of

ARRAY = np.arange(600, dtype=np.float32).reshape(30, 20)
KEY = names.shard_key(7, "first", 0, 0)


def image(value: int = 0) -> bytes:
    return image_of(0, Rank().part("t", ARRAY + value), KEY)[1]


class Arena:
    """An arena file as a trainer leaves it, open for changes behind a reader's back."""

    def __init__(self, directory: Path, *, rank: int = 0, generation: int = 0) -> None:
        self.path = directory / f"rank-{rank:05d}.{generation}.arena"
        self.rank = rank
        self.head: ArenaHead = plan_arena(
            slots=2, ticket_bytes=4096, image_bytes=len(image()), generation=generation
        )
        self.path.write_bytes(self.head.write().ljust(self.head.total_bytes, b"\0"))

    def write(self, at: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(data)

    def fill(
        self,
        slot: int,
        *,
        step: int = 7,
        attempt: str = "first",
        data: bytes = b"",
        image_bytes: int | None = None,
        fills: int = 1,
        state: SlotState = SlotState.STAGED,
    ) -> None:
        layout = msgspec.msgpack.encode(
            Layout(
                run="/r",
                rank=self.rank,
                world_size=1,
                node=0,
                nodes=1,
                node_ranks=(self.rank,),
                image_bytes=len(data) if image_bytes is None else image_bytes,
                header_bytes=4096,
                slices=[],
                witnesses=[],
                start_digests=[],
            )
        )
        stamp = msgspec.msgpack.encode(
            Stamp(
                step=step, attempt=attempt, staged_s=1, pause_s=1, durable=True, tree=b"", own=b""
            )
        )
        start = self.head.control_start(slot)
        self.write(self.head.image_start(slot), data)
        self.write(start + WORD_BYTES, layout + stamp)
        self.write(start, Words(state, fills, len(layout), len(stamp)).write())

    def set_state(self, slot: int, state: SlotState) -> None:
        self.write(self.head.control_start(slot), int(state).to_bytes(8, "little"))


def read(source: ArenaSource, nbytes: int, key: str = KEY, start: int = 0) -> bytes:
    into = bytearray(nbytes)
    source.read_into(key, start, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.STAGED, SlotState.DRAINING])
def test_an_image_is_read_whoever_owns_its_slot(tmp_path: Path, state: SlotState) -> None:
    data = image()
    Arena(tmp_path).fill(1, data=data, state=state)
    source = ArenaSource(tmp_path)
    assert read(source, len(data)) == data
    assert read(source, 10, start=4100) == data[4100:4110]
    with pytest.raises(DamagedError, match=r"expected at least \d+ bytes, found \d+"):
        read(source, 2, start=len(data) - 1)
    with pytest.raises(NotFoundError):
        read(source, 1, key=names.shard_key(8, "first", 0, 0))
    with pytest.raises(NotFoundError):
        read(source, 1, key=names.shard_key(7, "second", 0, 0))


def test_a_slot_that_is_being_filled_or_never_was_offers_nothing(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    arena.fill(0, data=image(), state=SlotState.FILLING)
    arena.fill(1, data=image(), fills=0, state=SlotState.FREE)
    with pytest.raises(NotFoundError):
        read(ArenaSource(tmp_path), 1)


def test_a_slot_filled_again_is_noticed_before_and_after(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    arena.fill(0, data=image(), state=SlotState.FREE)
    source = ArenaSource(tmp_path)
    read(source, 8)
    arena.set_state(0, SlotState.FILLING)
    with pytest.raises(NotFoundError, match="filled again"):
        read(source, 8)
    arena.fill(0, step=8, data=image(1), fills=2)
    with pytest.raises(NotFoundError, match="filled again"):
        read(source, 8)


def test_a_slot_filled_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    arena.fill(0, data=image(), state=SlotState.FREE)
    source = ArenaSource(tmp_path)

    class Racing:
        """As a buffer does, and a save begins at the moment of the copy."""

        nbytes = 8
        written = b""

        def __setitem__(self, where: slice, data: memoryview) -> None:
            self.written = bytes(data)
            arena.set_state(0, SlotState.FILLING)

    racing: Any = Racing()
    with pytest.raises(NotFoundError, match="filled again"):
        source.read_into(KEY, 0, racing)
    assert racing.written == image()[:8]


def refused(directory: Path) -> tuple[ArenaSource, list[str]]:
    events: list[Event] = []
    stop = listen(events.append)
    try:
        source = ArenaSource(directory)
    finally:
        stop()
    assert {e.name for e in events} <= {"arena.refused"}
    return source, [str(e.fields["why"]) for e in events]


@pytest.mark.parametrize(
    "harm",
    [
        lambda a: a.path.write_bytes(b""),
        lambda a: a.path.write_bytes(b"x" * 5000),
        lambda a: os.truncate(a.path, a.head.total_bytes - 1),
        lambda a: a.write(a.head.control_start(0), b"\xff" * 8),
        lambda a: a.write(a.head.control_start(0) + WORD_BYTES, b"\xc1" * 64),
        lambda a: a.fill(0, data=image(), attempt="../up"),
        lambda a: a.fill(0, data=image(), step=-1),
        lambda a: a.fill(0, data=image(), image_bytes=1 << 40),
        lambda a: a.fill(0, data=image(), image_bytes=-1),
        lambda a: a.path.write_bytes(
            ArenaHead(slots=1, control_bytes=0, image_bytes=0, generation=0).write()
        ),
    ],
    ids=[
        "empty",
        "another file",
        "cut",
        "state",
        "ticket",
        "attempt",
        "step",
        "image too long",
        "image negative",
        "no room for words",
    ],
)
def test_an_arena_that_makes_no_sense_is_passed_over_and_told(tmp_path: Path, harm: Any) -> None:
    good, bad = Arena(tmp_path, rank=0), Arena(tmp_path, rank=1)
    data = image()
    good.fill(0, data=data)
    bad.fill(0, data=data)
    harm(bad)
    source, told = refused(tmp_path)
    assert len(told) == 1
    assert read(source, len(data)) == data
    with pytest.raises(NotFoundError):
        read(source, 1, key=names.shard_key(7, "first", 0, 1))


def test_a_bad_slot_does_not_hide_the_good_one(tmp_path: Path) -> None:
    arena = Arena(tmp_path)
    data = image()
    arena.fill(0, step=6, data=data)
    arena.write(arena.head.control_start(0) + WORD_BYTES, b"\xc1" * 64)
    arena.fill(1, data=data)
    source, told = refused(tmp_path)
    assert len(told) == 1
    assert read(source, len(data)) == data


def test_a_link_a_pipe_and_no_directory_are_no_arenas(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    arena = Arena(there)
    arena.fill(0, data=image())
    (here / arena.path.name).symlink_to(arena.path)
    os.mkfifo(here / "rank-00001.0.arena")
    source, told = refused(here)
    assert len(told) == 2
    with pytest.raises(NotFoundError):
        read(source, 1)
    assert refused(tmp_path / "nowhere")[1] == []


def test_a_torn_image_in_memory_is_seen_and_the_next_tier_used(tmp_path: Path) -> None:
    _, file, stored = image_of(0, Rank().part("t", ARRAY), KEY)
    arena = Arena(tmp_path)
    arena.fill(0, data=file, state=SlotState.FREE)
    store = MemoryStore()
    store.put(KEY, file)
    wants = [Want(TensorKey("t"), "float32", ARRAY.shape, Box((3, 4), (20, 9)))]

    def get() -> Any:
        sources = [ArenaSource(tmp_path), StoreSource("durable", store)]
        plan = plan_reads(wants, stored)
        return fetch(plan, sources, allocate=lambda n: memoryview(bytearray(n)))

    expected = ARRAY[3:23, 4:13].tobytes()
    found = get()
    assert bytes(found.buffers[0]) == expected
    assert list(found.by_source) == ["memory"]
    # A trainer died while it filled the slot: half of the image is another step's.
    arena.write(arena.head.image_start(0) + stored[0].start, image(1)[stored[0].start :][:1000])
    found = get()
    assert bytes(found.buffers[0]) == expected
    assert list(found.by_source) == ["durable"]
    assert len(found.bad_ranges) == 1
