"""The log of an agent that nobody watches: it lies in shared memory, and a run may take months."""

from __future__ import annotations

import logging
import os
from pathlib import Path

LIMIT_BYTES = 2**20
KEPT_BYTES = 2**18


class BoundedLog(logging.Handler):
    """Appends lines to a file; beyond 1 MiB only the last 256 KiB stay, from a whole line on.

    ``fd`` is open for appending, and is what others in this process may write to as well.
    """

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__()
        self._path = path
        self._fd = fd

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            os.write(self._fd, (self.format(record) + "\n").encode(errors="replace"))
            if os.fstat(self._fd).st_size > LIMIT_BYTES:
                self._shorten()
        except OSError:
            pass  # shared memory is full, or the file is gone: the agent works on

    def _shorten(self) -> None:
        with self._path.open("rb") as file:
            file.seek(-KEPT_BYTES, os.SEEK_END)
            kept = file.read().partition(b"\n")[2]
        os.ftruncate(self._fd, 0)
        os.write(self._fd, kept)
