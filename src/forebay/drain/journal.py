"""What an agent must remember past its own death: a file that only grows.

Frames are a 4-byte length, 8 bytes of BLAKE3, and one msgpack message. A torn tail, which a death
in the middle of an append leaves, ends the replay; whatever it said is done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from forebay.format.digests import digest
from forebay.format.messages import Phase
from forebay.format.slot import Layout, Stamp
from forebay.storage.durable import AppendFile, write_new

_CHECK_BYTES = 8


class Accepted(msgspec.Struct, tag="accepted", frozen=True, kw_only=True):
    """A staged slot was taken over, with its whole ticket."""

    arena: str
    slot: int
    layout: Layout
    stamp: Stamp


class Spilled(msgspec.Struct, tag="spilled", frozen=True, kw_only=True):
    """A rank's image is on the local tier, and its slot is free; ``digests`` as in job.Digests."""

    step: int
    attempt: str
    rank: int
    header: bytes
    slices: tuple[bytes, ...]
    blocks: tuple[tuple[bytes, ...], ...]
    witnesses: tuple[bytes, ...]


class Uploaded(Spilled, tag="uploaded", frozen=True, kw_only=True):
    """A rank's image is on the durable tier."""


class Ended(msgspec.Struct, tag="ended", frozen=True, kw_only=True):
    """A snapshot reached its end, or was sealed: nothing of it has to be drained again."""

    step: int
    attempt: str
    phase: Phase


Line: TypeAlias = Accepted | Spilled | Uploaded | Ended

_DECODER = msgspec.msgpack.Decoder(Line)


def _frame(line: Line) -> bytes:
    body = msgspec.msgpack.encode(line)
    return len(body).to_bytes(4, "big") + digest(body)[:_CHECK_BYTES] + body


def read_journal(data: bytes) -> Iterator[Line]:
    """Lines up to the first frame that is not whole."""
    at = 0
    while at + 4 + _CHECK_BYTES <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        start = at + 4 + _CHECK_BYTES
        body = data[start : start + length]
        if len(body) < length or digest(body)[:_CHECK_BYTES] != data[at + 4 : start]:
            return
        try:
            yield _DECODER.decode(body)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return
        at = start + length


class Journal:
    """The journal of one job on one node. Each line is durable when ``write`` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: AppendFile | None = None

    def replay(self) -> list[Line]:
        """Lines of an earlier agent; none when there was none."""
        try:
            return list(read_journal(self.path.read_bytes()))
        except FileNotFoundError:
            return []

    def restart(self, lines: Iterable[Line]) -> None:
        """Begin anew with only the lines that still matter, replacing the file in one step."""
        self.close()
        fresh = self.path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        write_new(fresh, memoryview(b"".join(map(_frame, lines))))
        fresh.replace(self.path)
        self._file = AppendFile(self.path)

    def write(self, line: Line) -> None:
        """Append one line. Raises OSError when the disk refuses; the agent then goes on without."""
        if self._file is None:
            self._file = AppendFile(self.path)
        self._file.append(_frame(line))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
