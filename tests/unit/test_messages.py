"""What goes over the socket comes out as it was; frames that are none are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.format import messages
from forebay.format.messages import (
    AskSettled,
    AskStatus,
    Bye,
    Hello,
    Message,
    Phase,
    Progress,
    Refused,
    Ring,
    Skip,
    SnapshotStatus,
    StatusReply,
    Welcome,
    frame_bytes,
    job_directory,
    read_message,
    write_frame,
)

SNAPSHOT = SnapshotStatus(
    step=5,
    attempt="a",
    phase=Phase.SEALED,
    ranks=(0, 1),
    missing_ranks=(2,),
    nbytes=10,
    done_bytes=5,
    bytes_per_s=2.5,
    staged_s=1.0,
    local_s=2.0,
    durable_s=0.0,
)
EVERY: list[Any] = [
    Hello(protocol=1, run="/r", attempt="a", rank=3, pid=9, arenas=("x", "y")),
    Welcome(protocol=1, version="0.1", pid=4),
    Refused(kind="usage", text="no"),
    Ring(arena="x"),
    Skip(rank=1, step=2, attempt="a", reason="no free slot"),
    Bye(rank=1),
    AskStatus(),
    AskSettled(timeout_s=1.5),
    Progress(step=1, attempt="a", phase=Phase.FAILED, at_s=1.0, detail="why", kind="full"),
    StatusReply(
        pid=1,
        version="0.1",
        run="/r",
        node=0,
        trainers=(0,),
        settled=True,
        snapshots=[SNAPSHOT],
        committed=1,
        failed=0,
        skipped=2,
    ),
]


def test_every_message_is_tried() -> None:
    assert {type(message) for message in EVERY} == set(get_args(Message))


@pytest.mark.parametrize("message", EVERY, ids=lambda m: type(m).__name__)
def test_a_message_comes_back(message: Message) -> None:
    frame = write_frame(message)
    assert frame_bytes(frame[:4]) == len(frame) - 4
    found = read_message(frame[4:])
    assert type(found) is type(message)
    assert found == message


@pytest.mark.parametrize("message", EVERY, ids=lambda m: type(m).__name__)
def test_a_cut_message_is_refused(message: Message) -> None:
    body = write_frame(message)[4:]
    for cut in range(len(body)):
        with pytest.raises(FormatError, match=r"^message: "):
            read_message(body[:cut])


def test_an_oversized_message_is_neither_sent_nor_taken() -> None:
    with pytest.raises(FormatError, match="limit"):
        write_frame(Ring(arena="x" * messages.MAX_FRAME_BYTES))
    over = (messages.MAX_FRAME_BYTES + 1).to_bytes(4, "big")
    for head in (over, b"\xff" * 4, bytes(4), b"", b"\0\0\1"):
        with pytest.raises(FormatError, match="frame of"):
            frame_bytes(head)
    assert frame_bytes(messages.MAX_FRAME_BYTES.to_bytes(4, "big")) == messages.MAX_FRAME_BYTES


@given(st.binary(max_size=100))
def test_garbage_is_refused(body: bytes) -> None:
    with pytest.raises(FormatError, match=r"^message: "):
        read_message(body)


def test_deep_garbage_is_refused() -> None:
    for body in (b"\x91" * 100_000, b"\x82\xa4type\xa3bye\xa1z" + b"\x91" * 100_000 + b"\xc0"):
        with pytest.raises(FormatError):
            read_message(body)


def test_final_phases() -> None:
    assert {p.value for p in Phase} - {p.value for p in messages.FINAL_PHASES} == {
        "staged",
        "local",
        "uploading",
        "sealed",
    }


def test_two_jobs_never_share_a_directory() -> None:
    made = {job_directory(Path("/x"), run, node) for run in ("/a", "/b", "/a/b") for node in (0, 1)}
    assert len(made) == 6
    assert all(path.parent == Path("/x") for path in made)
