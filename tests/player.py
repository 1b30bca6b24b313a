"""A stand-in for a trainer rank: arena, lock and socket by the format alone, without torch."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import time
from pathlib import Path

import msgspec

from forebay.capture.arena import claim_arena, drop_drained, make_arena
from forebay.drain.wire import short_path
from forebay.format import tree
from forebay.format.messages import (
    AGENT_SOCKET,
    FINAL_PHASES,
    PROTOCOL,
    Bye,
    Hello,
    Message,
    Phase,
    Progress,
    Ring,
    Skip,
    frame_bytes,
    read_message,
    write_frame,
)
from forebay.format.shard import plan_image, round_up
from forebay.format.slices import Box, Slice, TensorKey
from forebay.format.slot import (
    WORD_BYTES,
    Layout,
    SliceRow,
    SlotState,
    Stamp,
    StartDigest,
    WitnessRow,
    Words,
    read_words,
)

ATTEMPT = "a1"
TIMEOUT_S = 60.0


class Player:
    """One rank of ``world`` on one node; tensor ``model/w`` of bytes is divided among all ranks.

    ``nbytes`` 0 makes a rank that stores nothing. Every rank witnesses the replicated ``step``.
    ``claim`` takes the arena that a dead rank of that name has left, as a trainer does.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        rank: int = 0,
        world: int = 1,
        *,
        nbytes: int = 100_000,
        total_bytes: int | None = None,
        node: int = 0,
        nodes: int = 1,
        node_ranks: tuple[int, ...] | None = None,
        slots: int = 2,
        generation: int = 0,
        claim: bool = False,
    ) -> None:
        self.directory = directory
        self.run = run
        self.rank = rank
        self.socket: socket.socket | None = None
        self.heard: list[Progress] = []
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(directory / f"rank-{rank:05d}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.total_bytes = nbytes * world if total_bytes is None else total_bytes
        pieces = []
        if nbytes:
            box = Box((rank * nbytes,), (nbytes,))
            pieces = [Slice(TensorKey("model/w"), "uint8", (self.total_bytes,), box)]
        self.image = plan_image(pieces, {})
        witness_start = round_up(self.image.total_bytes)
        self.layout = Layout(
            run=run,
            rank=rank,
            world_size=world,
            node=node,
            nodes=nodes,
            node_ranks=node_ranks or tuple(range(world)),
            image_bytes=self.image.total_bytes if pieces else 0,
            header_bytes=len(self.image.header),
            slices=[
                SliceRow(
                    p.slice.key.fqn,
                    None,
                    p.slice.dtype,
                    p.slice.shape,
                    p.slice.box.offsets,
                    p.slice.box.sizes,
                    p.start,
                    p.nbytes,
                )
                for p in self.image.placed
            ],
            witnesses=[WitnessRow("full", "model/seen", (0,), (8,), witness_start, 8)],
            start_digests=[StartDigest("model/big", (0,), (4,), "ab" * 32)],
        )
        self._witness_start = witness_start
        size = {"slots": slots, "ticket_bytes": 32_768, "image_bytes": witness_start + 4096}
        if claim:
            held, others = claim_arena(directory, rank, **size)
            drop_drained(others)
        else:
            held = make_arena(directory, rank, generation=generation, **size)
        self.head, self.map, self.arena = held.head, held.mapping, held.path.name

    def data(self, step: int) -> bytes:
        """The bytes of this rank's slice at ``step``."""
        nbytes = sum(placed.nbytes for placed in self.image.placed)
        return random.Random(step * 1000 + self.rank).randbytes(nbytes)

    def words(self, slot: int) -> Words:
        start = self.head.control_start(slot)
        return read_words(self.map[start : start + WORD_BYTES], self.head, self.arena)

    def state(self, slot: int) -> SlotState:
        return self.words(slot).state

    def free_slots(self) -> list[int]:
        return [s for s in range(self.head.slots) if self.state(s) is SlotState.FREE]

    def fill(
        self,
        step: int,
        *,
        attempt: str = ATTEMPT,
        durable: bool = True,
        witness: bytes = b"the same",
        slot: int | None = None,
    ) -> int:
        """Put a snapshot into a free slot and mark it STAGED; rings nobody."""
        slot = self.free_slots()[0] if slot is None else slot
        start, image = self.head.control_start(slot), self.head.image_start(slot)
        fills = self.words(slot).fills + 1
        self.map[image : image + len(self.image.header)] = self.image.header
        data = self.data(step)
        if data:
            at = image + self.image.placed[0].start
            self.map[at : at + len(data)] = data
        at = image + self._witness_start
        self.map[at : at + 8] = witness
        entries: list[tree.Entry] = [
            tree.Container("", "dict", 2),
            tree.Container("model", "dict", 1),
            tree.Tensor("model/w", "model/w", "uint8", (self.total_bytes,), "cpu", True),
            tree.Value("step", tree.encode_value(step, "step")),
        ]
        layout = msgspec.msgpack.encode(self.layout)
        stamp = msgspec.msgpack.encode(
            Stamp(
                step=step,
                attempt=attempt,
                staged_s=time.time(),
                pause_s=0.001,
                durable=durable,
                tree=tree.write_tree(entries),
                own=tree.write_tree([]),
            )
        )
        at = start + WORD_BYTES
        self.map[at : at + len(layout) + len(stamp)] = layout + stamp
        words = Words(SlotState.STAGED, fills, len(layout), len(stamp)).write()
        self.map[start + 8 : start + len(words)] = words[8:]
        self.map[start : start + 8] = words[:8]
        return slot

    def connect(self, attempt: str = ATTEMPT, run: str | None = None) -> Message:
        """Say Hello; returns the answer."""
        if self.socket is not None:
            self.socket.close()
        self.socket = connected(self.directory)
        self.send(
            Hello(
                protocol=PROTOCOL,
                run=run or self.run,
                attempt=attempt,
                rank=self.rank,
                pid=os.getpid(),
                arenas=(self.arena,),
            )
        )
        return self.receive()

    def send(self, message: Message) -> None:
        assert self.socket is not None
        self.socket.sendall(write_frame(message))

    def receive(self) -> Message:
        assert self.socket is not None
        return receive(self.socket)

    def save(self, step: int, **options: object) -> int:
        """Fill a slot and ring."""
        slot = self.fill(step, **options)  # type: ignore[arg-type]
        self.send(Ring(arena=self.arena))
        return slot

    def skip(self, step: int, attempt: str = ATTEMPT) -> None:
        self.send(Skip(rank=self.rank, step=step, attempt=attempt, reason="no free slot"))

    def wait(self, step: int, *phases: Phase) -> Progress:
        """What the agent said when ``step`` came to one of ``phases``, or to any end."""
        wanted = set(phases) | FINAL_PHASES
        while True:
            for said in self.heard:
                if said.step == step and said.phase in wanted:
                    return said
            message = self.receive()
            if isinstance(message, Progress):
                self.heard.append(message)

    def bye(self) -> None:
        """Leave as a trainer that ends well."""
        self.send(Bye(rank=self.rank))
        self.die()

    def die(self) -> None:
        """Be gone as after SIGKILL: connection and lock end, the arena stays."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def connected(directory: Path) -> socket.socket:
    """A connection to the agent of a job."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(TIMEOUT_S)
    try:
        with short_path(directory / AGENT_SOCKET) as name:
            made.connect(name)
    except OSError:
        made.close()
        raise
    return made


def receive(wire: socket.socket) -> Message:
    """The next message. Raises ConnectionResetError at the end of the connection."""
    return read_message(_exactly(wire, frame_bytes(_exactly(wire, 4))))


def _exactly(wire: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = wire.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError
        data += chunk
    return data
