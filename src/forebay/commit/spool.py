"""The slices of all records, some tensors at a time: in memory, or sorted on a disk.

FSDP alone over 16,384 ranks cuts the state of a 405B model into 58 million slices, 4.5 GB of
columns. Of so many a part is held at a time: what has come is sorted and written as a run, and a
part is read back as the same tensors of every run.
"""

from __future__ import annotations

import bisect
import io
import mmap
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from forebay.errors import FullError
from forebay.format.stored import NOBODY, Ints, Stored, Table, Tables, narrow

MOST_ROWS = 2**22  # held at a time: about 1 GB with all that is worked out from them

_INT, _LONG, _SEAL = (np.dtype(kind) for kind in ("<i4", "<i8", "u1"))
_BY_ROW = dict.fromkeys(("fqn", "owner", "dtype", "shape", "key", "rank"), _INT)
_BY_ROW |= {"start": _LONG, "digest": _SEAL}
_BY_NUMBER = {"offsets": _LONG, "sizes": _LONG}
_BY_BLOCK = {"blocks": _SEAL}
_KINDS = _BY_ROW | _BY_NUMBER | _BY_BLOCK
_WIDE = {"digest": (32,), "blocks": (32,)}


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Rows sorted by name: where each name's begin, and where each column lies in the file."""

    names: list[str]
    rows: Ints
    numbers: Ints
    blocks: Ints
    at: dict[str, int]


class Spool:
    """Slices taken in any order, given back with all of a tensor's in one part, sorted by name.

    ``each`` is applied to every part before it is given. More than ``most_rows`` go to a file
    without a name, in TMPDIR or /var/tmp: nothing is left of it when the process ends.
    """

    def __init__(self, each: Callable[[Table], Table], most_rows: int = MOST_ROWS) -> None:
        self._each = each
        self._most = most_rows
        self._tables = Tables()
        self._whole: Table | None = None
        self._runs: list[_Run] = []
        self._file: IO[bytes] | None = None
        self._common: set[str] = set()

    @property
    def common(self) -> set[str]:
        """Names of tensors that ranks hold in common and of which there is a slice."""
        return self._common

    @property
    def is_large(self) -> bool:
        """True when slices lie on a disk, and what is made of them should too."""
        return bool(self._runs)

    def add(self, table: Table) -> None:
        """Take the rows of a table, which is not needed any more. Raises FullError."""
        assert self._whole is None
        nobodys = np.unique(table.fqn[table.owner == NOBODY])
        self._common |= {table.fqns[number] for number in nobodys.tolist()}
        self._tables.add(table)
        if len(self._tables) >= self._most:
            self._write_run()

    def parts(self) -> Iterator[Table]:
        """All slices, at most about ``most_rows`` at a time; as often as wanted.

        Nothing can be added any more. Raises FullError.
        """
        if not self._runs:
            if self._whole is None:
                self._whole = self._each(self._tables.taken())
            yield self._whole
            return
        if len(self._tables):
            self._write_run()
        for first, last in self._ranges():
            yield self._each(self._part(first, last))

    def __len__(self) -> int:
        """Number of slices, once they are as ``each`` leaves them."""
        return sum(len(part) for part in self.parts())

    def __iter__(self) -> Iterator[Stored]:
        """Every slice as an object."""
        return (row for part in self.parts() for row in part)

    @contextmanager
    def sink(self) -> Iterator[IO[bytes]]:
        """Where what is made of all slices can be written: memory, or a file as theirs is."""
        if not self.is_large:
            yield io.BytesIO()
            return
        with _temporary() as file:
            try:
                yield file
            except OSError as error:
                raise _no_room(error, "cannot write the index") from error

    def _write_run(self) -> None:
        table = self._tables.taken()
        table = table.take(table.order)
        firsts = np.flatnonzero(np.diff(table.fqn, prepend=-1))
        rows = np.append(firsts, len(table))
        if self._file is None:
            self._file = _temporary()
            weakref.finalize(self, self._file.close)
        file = self._file
        at = {}
        try:
            for name, kind in _KINDS.items():
                at[name] = file.seek(0, os.SEEK_END)
                column = np.ascontiguousarray(getattr(table, name), kind)
                file.write(column.reshape(-1).view(np.uint8).data)
            file.flush()
        except OSError as error:
            raise _no_room(error, f"cannot take {len(table)} slices more") from error
        self._runs.append(
            _Run(
                names=[table.fqns[number] for number in table.fqn[firsts].tolist()],
                rows=rows,
                numbers=table.first[rows],
                blocks=table.first_block[rows],
                at=at,
            )
        )

    def _ranges(self) -> Iterator[tuple[str, str]]:
        """First and last name of each part: neighbours whose rows are as many as may be held."""
        counts: Counter[str] = Counter()
        for run in self._runs:
            counts.update(dict(zip(run.names, np.diff(run.rows).tolist(), strict=True)))
        names = sorted(counts)
        begin = held = 0
        for number, name in enumerate(names):
            if number > begin and held + counts[name] > self._most:
                yield names[begin], names[number - 1]
                begin, held = number, 0
            held += counts[name]
        yield names[begin], names[-1]

    def _part(self, first: str, last: str) -> Table:
        pieces: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _KINDS}
        for run in self._runs:
            low, high = bisect.bisect_left(run.names, first), bisect.bisect_right(run.names, last)
            for name in _KINDS:
                bounds = run.numbers if name in _BY_NUMBER else run.rows
                bounds = run.blocks if name in _BY_BLOCK else bounds
                pieces[name].append(self._read(run, name, int(bounds[low]), int(bounds[high])))
        columns = {name: np.concatenate(pieces.pop(name)) for name in _KINDS}
        return self._tables.named({n: c if n in _WIDE else narrow(c) for n, c in columns.items()})

    def _read(self, run: _Run, name: str, low: int, high: int) -> npt.NDArray[Any]:
        assert self._file is not None
        found = np.empty((high - low, *_WIDE.get(name, ())), _KINDS[name])
        each = found.itemsize * (32 if name in _WIDE else 1)
        self._file.seek(run.at[name] + low * each)
        self._file.readinto(found.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
        return found


def view(sink: IO[bytes]) -> memoryview:
    """What was written to a ``sink``; of a file, its pages. Valid as long as the sink is open."""
    if isinstance(sink, io.BytesIO):
        return memoryview(sink.getvalue())
    sink.flush()
    return memoryview(mmap.mmap(sink.fileno(), 0, access=mmap.ACCESS_READ))


def _place() -> str:
    """Not /tmp unasked: that is memory on many machines, and too much for it comes here."""
    disk = "/var/tmp"  # noqa: S108 - what is made in it has no name
    return os.environ.get("TMPDIR") or (disk if Path(disk).is_dir() else tempfile.gettempdir())


def _temporary() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=_place())
    except OSError as error:
        raise _no_room(error, "cannot make a file for slices") from error


def _no_room(error: OSError, what: str) -> FullError:
    return FullError(
        f"{_place()}: {what}: {error.strerror}: make room there or name another place in TMPDIR"
    )
