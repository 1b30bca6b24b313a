"""The arena file: sizes, words and tickets; nonsense is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.format.slot import (
    WORD_BYTES,
    Layout,
    SliceRow,
    SlotState,
    Stamp,
    StartDigest,
    WitnessRow,
    Words,
    plan_arena,
    read_head,
    read_ticket,
    read_words,
)


@given(st.integers(1, 64), st.integers(0, 10**6), st.integers(0, 10**12), st.integers(0, 2**63))
def test_a_planned_arena_holds_what_was_asked(
    slots: int, ticket: int, image: int, generation: int
) -> None:
    head = plan_arena(slots=slots, ticket_bytes=ticket, image_bytes=image, generation=generation)
    assert head.control_bytes >= WORD_BYTES + ticket
    assert head.image_bytes >= image
    at = 4096
    for slot in range(slots):
        assert head.control_start(slot) == at
        assert head.image_start(slot) % 4096 == 0
        at = head.image_start(slot) + head.image_bytes
    assert head.total_bytes == at
    page = head.write()
    assert len(page) == 4096
    assert read_head(page, head.total_bytes, "x") == head


HEAD = plan_arena(slots=2, ticket_bytes=1000, image_bytes=5000, generation=3)


@pytest.mark.parametrize("size", [0, 4096, HEAD.total_bytes - 1, HEAD.total_bytes + 1])
def test_a_cut_arena_is_refused(size: int) -> None:
    with pytest.raises(FormatError, match=f"^x: {size} bytes"):
        read_head(HEAD.write(), size, "x")


def test_a_short_page_is_refused() -> None:
    for cut in range(40):
        with pytest.raises(FormatError, match="too short"):
            read_head(HEAD.write()[:cut], cut, "x")


@pytest.mark.parametrize("at", range(24))
def test_a_damaged_head_is_refused(at: int) -> None:
    page = bytearray(HEAD.write())
    page[at] ^= 0xFF
    with pytest.raises(FormatError, match=r"^x: "):
        read_head(bytes(page), HEAD.total_bytes, "x")


@given(st.binary(min_size=40, max_size=64))
def test_random_pages_are_refused(page: bytes) -> None:
    with pytest.raises(FormatError):
        read_head(page, HEAD.total_bytes, "x")


@pytest.mark.parametrize("state", SlotState)
def test_words_come_back(state: SlotState) -> None:
    words = Words(state, 2**60, 100, 200)
    assert read_words(words.write().ljust(WORD_BYTES, b"\0"), HEAD, "x") == words


@pytest.mark.parametrize(
    ("state", "layout", "stamp"), [(4, 0, 0), (2**63, 0, 0), (2, 4096, 0), (2, 0, 2**63)]
)
def test_words_that_make_no_sense_are_refused(state: int, layout: int, stamp: int) -> None:
    data = b"".join(n.to_bytes(8, "little") for n in (state, 1, layout, stamp))
    with pytest.raises(FormatError, match="make no sense"):
        read_words(data, HEAD, "x")


LAYOUT = Layout(
    run="/run",
    rank=1,
    world_size=2,
    node=0,
    nodes=1,
    node_ranks=(0, 1),
    image_bytes=4100,
    header_bytes=4096,
    slices=[SliceRow("w", None, "uint8", (4,), (0,), (4,), 4096, 4)],
    witnesses=[WitnessRow("full", "b", (0,), (2,), 8192, 2)],
    start_digests=[StartDigest("c", (0,), (2,), "00")],
)
STAMP = Stamp(step=5, attempt="a", staged_s=1.0, pause_s=0.1, durable=True, tree=b"t", own=b"o")


def ticket(layout: bytes, stamp: bytes) -> tuple[bytes, Words]:
    words = Words(SlotState.STAGED, 1, len(layout), len(stamp))
    return words.write().ljust(WORD_BYTES, b"\0") + layout + stamp + b"rest", words


def test_a_ticket_comes_back() -> None:
    control, words = ticket(msgspec.msgpack.encode(LAYOUT), msgspec.msgpack.encode(STAMP))
    assert read_ticket(control, words, "x") == (LAYOUT, STAMP)
    assert read_ticket(memoryview(control), words, "x") == (LAYOUT, STAMP)
    for change in ({"layout_bytes": words.layout_bytes - 1}, {"stamp_bytes": 0}):
        fields: dict[str, Any] = change
        with pytest.raises(FormatError, match="not a ticket"):
            read_ticket(control, replace(words, **fields), "x")


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_garbage_is_no_ticket(layout: bytes, stamp: bytes) -> None:
    control, words = ticket(layout, stamp)
    with pytest.raises(FormatError, match=r"^x: "):
        read_ticket(control, words, "x")


def test_deep_garbage_is_no_ticket() -> None:
    deep = b"\x81\xa1z" + b"\x91" * 50_000 + b"\xc0"
    control, words = ticket(deep, deep)
    with pytest.raises(FormatError):
        read_ticket(control, words, "x")
