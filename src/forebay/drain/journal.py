"""What an agent must remember past its own death: a file that grows, and is written anew at times.

Frames are a 4-byte length, 8 bytes of BLAKE3, and one msgpack message. A torn tail, which a death
in the middle of an append leaves, ends the replay; whatever it said is done again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from forebay.errors import UsageError
from forebay.format.digests import digest
from forebay.format.messages import FINAL_PHASES, Phase
from forebay.format.slot import Layout, Stamp
from forebay.private import read_own
from forebay.storage.durable import AppendFile, sync_directory, write_new
from forebay.watch.events import emit

REMEMBERED = 64
"""How many snapshots that ended are known, so that none of them begins anew."""
COMPACT_BYTES = 256 * 2**10
_GROWTH = 4
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


class Began(msgspec.Struct, tag="began", frozen=True, kw_only=True):
    """The durable tier opened an upload for a rank's image: its parts may come in several lives."""

    step: int
    attempt: str
    rank: int
    upload_id: str
    part_bytes: int


class Ended(msgspec.Struct, tag="ended", frozen=True, kw_only=True):
    """A snapshot reached its end, or was sealed: nothing of it has to be drained again."""

    step: int
    attempt: str
    phase: Phase
    at_s: float
    node_ranks: tuple[int, ...] = ()
    kind: str = ""
    detail: str = ""


Line: TypeAlias = Accepted | Spilled | Uploaded | Began | Ended


def key_of(line: Line) -> tuple[int, str]:
    """Step and attempt of the snapshot a line tells of."""
    if isinstance(line, Accepted):
        return line.stamp.step, line.stamp.attempt
    return line.step, line.attempt


def still_matter(lines: Sequence[Line]) -> list[Line]:
    """All lines of what is unfinished, and the last ends, so that nothing ended begins anew."""
    last = {key_of(line): line.phase for line in lines if isinstance(line, Ended)}
    ends = [line for line in lines if isinstance(line, Ended) and line.phase in FINAL_PHASES]
    unfinished = [line for line in lines if last.get(key_of(line)) not in FINAL_PHASES]
    return [*ends[-REMEMBERED:], *unfinished]


_DECODER = msgspec.msgpack.Decoder(Line)


def _frame(line: Line) -> bytes:
    body = msgspec.msgpack.encode(line)
    return len(body).to_bytes(4, "big") + digest(body)[:_CHECK_BYTES] + body


def read_journal(data: bytes) -> Iterator[tuple[Line, int]]:
    """Lines, each with where it ends, up to the first frame that is not whole."""
    at = 0
    while at + 4 + _CHECK_BYTES <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        start = at + 4 + _CHECK_BYTES
        body = data[start : start + length]
        if len(body) < length or digest(body)[:_CHECK_BYTES] != data[at + 4 : start]:
            return
        try:
            line = _DECODER.decode(body)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            return
        at = start + length
        yield line, at


class Journal:
    """The journal of one job on one node. Each line is durable when ``write`` returns.

    Lines may come from any thread. At four times what mattered at its last beginning, and not below
    256 KiB, the file is begun anew with what matters: a run may save for months.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: AppendFile | None = None
        self._ours: os.stat_result | None = None
        self._good_bytes = 0
        self._compact_bytes = COMPACT_BYTES
        self._lock = threading.Lock()

    def replay(self) -> list[Line]:
        """Lines of an earlier agent; none when there was none."""
        found: list[tuple[Line, int]] = []
        try:
            found = list(read_journal(read_own(self.path, sys.maxsize)))
        except FileNotFoundError:
            pass
        except UsageError as error:  # `restart` puts one of ours in its place
            emit("journal.refused", level=40, why=error)
        self._good_bytes = found[-1][1] if found else 0
        return [line for line, _ in found]

    def restart(self, lines: Iterable[Line]) -> None:
        """Begin anew with only the lines that still matter, replacing the file in one step."""
        with self._lock:
            self._restart(lines)

    def _restart(self, lines: Iterable[Line]) -> None:
        self.close()
        data = b"".join(map(_frame, lines))
        fresh = self.path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        write_new(fresh, memoryview(data))
        made = fresh.stat()
        if made.st_nlink > 1:  # `replay` would refuse it as planted
            raise OSError(errno.EIO, "its hidden name cannot be taken away", str(fresh))
        fresh.replace(self.path)
        self._ours = made
        self._good_bytes = len(data)  # at once: what is appended stands behind these bytes
        self._compact_bytes = max(COMPACT_BYTES, _GROWTH * len(data))
        sync_directory(self.path.parent)

    def write(self, line: Line) -> None:
        """Append one line. Raises OSError when the disk refuses; a later line may still be kept."""
        frame = _frame(line)
        with self._lock:
            if self._file is None:
                fresh = AppendFile(self.path)
                try:
                    self._require_ours(fresh)
                    # What a failed append left would hide every line behind it.
                    os.truncate(self.path, self._good_bytes)
                except OSError:
                    fresh.close()
                    raise
                self._file = fresh
            try:
                self._file.append(frame)
            except OSError:
                self.close()
                raise
            self._good_bytes += len(frame)
            if self._good_bytes > self._compact_bytes:
                self._compact()

    def _require_ours(self, opened: AppendFile) -> None:
        """Raise OSError when another agent's journal has the name by now.

        A file that is new because the name was removed, or that was cut, is taken as it is.
        """
        found = opened.stat()
        other = self._ours is not None and not os.path.samestat(found, self._ours)
        if other and found.st_size:
            raise OSError(errno.ESTALE, "another journal is there", str(self.path))
        self._ours = found
        if found.st_size < self._good_bytes:
            ends = [end for _, end in read_journal(self.path.read_bytes())]
            self._good_bytes = ends[-1] if ends else 0

    def _compact(self) -> None:
        """Begin anew with what matters. The line that was just written is durable either way."""
        assert self._file is not None
        self._compact_bytes = _GROWTH * self._good_bytes  # where the disk refuses: not at each line
        with contextlib.suppress(OSError):
            if not os.path.samestat(self._file.stat(), self.path.stat()):
                return  # another agent has the name
            lines = [line for line, _ in read_journal(self.path.read_bytes())]
            self._restart(still_matter(lines))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def journal_path(job_directory: Path, home: Path | None) -> Path:
    """The journal lies on the local tier where there is one: it then survives a reboot."""
    return (job_directory if home is None else home) / "journal"
