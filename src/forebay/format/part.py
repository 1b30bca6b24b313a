"""One range of a file, read at once; a reader that seeks finds nothing outside of it."""

from __future__ import annotations

import io
from typing import Any

from forebay.errors import FormatError


class Part(io.RawIOBase):
    """A file of which one range has been read; nothing else of it can be."""

    def __init__(self, file: Any, begin: int, end: int) -> None:
        size = file.seek(0, io.SEEK_END)
        file.seek(begin)
        self.data = memoryview(file.read(end - begin))
        if len(self.data) != end - begin:
            raise FormatError(f"index: {len(self.data)} bytes of {end - begin}")
        self._begin, self._size, self._at = begin, size, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset; returns it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` from the range, of which there is nothing outside."""
        low = self._at - self._begin
        found = self.data[low : low + len(buffer)] if low >= 0 else self.data[:0]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
