"""The demo's text: the Python standard library's own sources, one memory-mapped file of bytes."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forebay.errors import NotFoundError

TEXT_BYTES = 8_000_000
LEAST_BYTES = 500_000
_NOT_OURS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def standard_library() -> Path:
    """Directory that holds the sources of this interpreter's standard library."""
    return Path(sysconfig.get_paths().get("stdlib") or Path(os.__file__).parent)


def _sources(root: Path) -> Iterator[Path]:
    """Python files below ``root`` in the order of their names, the same at every call."""
    for folder, below, files in os.walk(root):
        below[:] = sorted(set(below) - _NOT_OURS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def write_text(target: Path, *, limit_bytes: int = TEXT_BYTES, root: Path | None = None) -> int:
    """Write the sources one after the other to ``target``; returns how many bytes, <= the limit.

    Raises NotFoundError where the interpreter comes without its sources.
    """
    root = root or standard_library()
    written = 0
    with target.open("wb") as file:
        for path in _sources(root):
            written += file.write(path.read_bytes()[: limit_bytes - written])
            if written >= limit_bytes:
                break
    if written < min(LEAST_BYTES, limit_bytes):
        raise NotFoundError(
            f"demo: {root} holds {written} bytes of Python sources, expected at least "
            f"{LEAST_BYTES}: use a Python that has its standard library as files"
        )
    return written


def open_text(path: Path) -> npt.NDArray[np.uint8]:
    """The text as a read-only memory-mapped array of uint8."""
    return np.memmap(path, dtype=np.uint8, mode="r")


class Windows:
    """Windows of ``context`` + 1 bytes, every ``world_size``-th one from ``rank`` on.

    Item: a pair of int64 arrays of ``context`` elements, the bytes and the bytes after them.
    """

    def __init__(
        self, text: npt.NDArray[np.uint8], *, context: int, rank: int, world_size: int
    ) -> None:
        self._text = text
        self._context = context
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context // self._world_size

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = (index * self._world_size + self._rank) * self._context
        window = self._text[start : start + self._context + 1].astype(np.int64)
        return window[:-1], window[1:]
