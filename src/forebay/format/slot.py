"""The shape of an arena file: where a slot's words, ticket and image lie. Pure arithmetic.

    page 0                      the arena's own words (ArenaHead)
    slot k at head + k*stride   control area: four words, then the layout, then the stamp
                                image area, page aligned: the image, then witness bytes

One writer a word: the trainer moves FREE -> FILLING -> STAGED, the agent on to DRAINING and FREE.
A word is 8 bytes, aligned, little-endian. The ticket is complete before STAGED is written. A FREE
slot keeps its stamp and image until it is filled again: a restart may restore from it.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import msgspec

from forebay.errors import FormatError
from forebay.format.shard import PAGE_BYTES, round_up

MAGIC = b"FBARENA1"
_HEAD = struct.Struct("<8sIIQQQ")
_WORDS = struct.Struct("<QQQQ")
WORD_BYTES = 64


class SlotState(enum.IntEnum):
    """Who owns the slot: nobody, the trainer, the ticket's reader, the agent."""

    FREE = 0
    FILLING = 1
    STAGED = 2
    DRAINING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaHead:
    """Sizes in bytes: each slot has ``control_bytes`` and then ``image_bytes`` of capacity."""

    slots: int
    control_bytes: int
    image_bytes: int
    generation: int

    @property
    def stride(self) -> int:
        """Distance from one slot to the next."""
        return self.control_bytes + self.image_bytes

    @property
    def total_bytes(self) -> int:
        """Size of the arena file."""
        return PAGE_BYTES + self.slots * self.stride

    def control_start(self, slot: int) -> int:
        """Where the words of a slot begin."""
        return PAGE_BYTES + slot * self.stride

    def image_start(self, slot: int) -> int:
        """Where the image of a slot begins; page aligned."""
        return self.control_start(slot) + self.control_bytes

    def write(self) -> bytes:
        """Page 0."""
        packed = _HEAD.pack(
            MAGIC, 1, self.slots, self.control_bytes, self.image_bytes, self.generation
        )
        return packed.ljust(PAGE_BYTES, b"\0")


def plan_arena(*, slots: int, ticket_bytes: int, image_bytes: int, generation: int) -> ArenaHead:
    """An arena whose slots hold tickets and images of at least these sizes."""
    return ArenaHead(
        slots=slots,
        control_bytes=round_up(WORD_BYTES + ticket_bytes),
        image_bytes=max(PAGE_BYTES, round_up(image_bytes)),
        generation=generation,
    )


def read_head(page: bytes | memoryview, file_bytes: int, name: str) -> ArenaHead:
    """Parse page 0. Raises FormatError when it is no arena or the file is cut."""
    if len(page) < _HEAD.size:
        raise FormatError(f"{name}: {file_bytes} bytes, too short for an arena")
    magic, version, slots, control, image, generation = _HEAD.unpack_from(page)
    head = ArenaHead(slots=slots, control_bytes=control, image_bytes=image, generation=generation)
    if magic != MAGIC or version != 1 or not 1 <= slots <= 64:
        raise FormatError(f"{name}: not an arena of version 1")
    if control < PAGE_BYTES or image < PAGE_BYTES:
        raise FormatError(f"{name}: slots of {control} and {image} bytes are none")
    if control % PAGE_BYTES or image % PAGE_BYTES or head.total_bytes != file_bytes:
        raise FormatError(f"{name}: {file_bytes} bytes, its head asks for {head.total_bytes}")
    return head


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a slot: its state, a count of its fills, and the sizes of its ticket's parts."""

    state: SlotState
    fills: int
    layout_bytes: int
    stamp_bytes: int

    def write(self) -> bytes:
        """The four words as they lie in the control area."""
        return _WORDS.pack(self.state, self.fills, self.layout_bytes, self.stamp_bytes)


def read_words(control: bytes | memoryview, head: ArenaHead, name: str) -> Words:
    """Parse the words at the start of a control area. Raises FormatError."""
    if len(control) < _WORDS.size:
        raise FormatError(f"{name}: slot words cut at {len(control)} bytes")
    state, fills, layout_bytes, stamp_bytes = _WORDS.unpack_from(control)
    if state > SlotState.DRAINING or WORD_BYTES + layout_bytes + stamp_bytes > head.control_bytes:
        raise FormatError(
            f"{name}: slot words {state}, {layout_bytes}, {stamp_bytes} make no sense"
        )
    return Words(SlotState(state), fills, layout_bytes, stamp_bytes)


class SliceRow(msgspec.Struct, frozen=True, array_like=True):
    """A slice in the image: FQN, owner rank when per rank, dtype, global shape, box, byte range."""

    fqn: str
    owner: int | None
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    nbytes: int


class WitnessRow(msgspec.Struct, frozen=True, array_like=True):
    """Bytes in the slot to be digested and compared with other ranks' (see record.Witness)."""

    scope: str
    fqn: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    nbytes: int


class StartDigest(msgspec.Struct, frozen=True, array_like=True):
    """Digest (hex) of a replicated item taken in full when the attempt began."""

    fqn: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    digest: str


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a ticket that stays from save to save; written when the slot is prepared."""

    run: str
    rank: int
    world_size: int
    node: int
    nodes: int
    node_ranks: tuple[int, ...]
    image_bytes: int
    header_bytes: int
    slices: list[SliceRow]
    witnesses: list[WitnessRow]
    start_digests: list[StartDigest]


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a ticket that each save writes anew; ``tree`` and ``own`` are write_tree bytes.

    ``staged_s`` is Unix time when the copy ended, ``since_boot_s`` by the clock that nobody sets,
    0.0 where it was not taken; ``pause_s`` is how long the copy took. ``durable`` says
    whether this snapshot goes to the durable tier or stays near.
    """

    step: int
    attempt: str
    staged_s: float
    pause_s: float
    durable: bool
    tree: bytes
    own: bytes
    since_boot_s: float = 0.0

    def before(self, other: Stamp) -> bool:
        """Whether it was made before another one of the same start on the same node."""
        if self.since_boot_s and other.since_boot_s:
            return self.since_boot_s < other.since_boot_s
        return self.staged_s < other.staged_s


def read_ticket(control: bytes | memoryview, words: Words, name: str) -> tuple[Layout, Stamp]:
    """Layout and stamp from a control area. Raises FormatError."""
    middle = WORD_BYTES + words.layout_bytes
    try:
        layout = msgspec.msgpack.decode(control[WORD_BYTES:middle], type=Layout)
        stamp = msgspec.msgpack.decode(control[middle : middle + words.stamp_bytes], type=Stamp)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"{name}: not a ticket: {error}") from None
    return layout, stamp
