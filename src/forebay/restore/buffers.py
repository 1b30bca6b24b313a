"""Host memory that a restore reads into, handed out as it is touched."""

from __future__ import annotations

import mmap

SMALL_BYTES = 2**20
SLAB_BYTES = 2**25
_ALIGN_BYTES = 64  # of the widest vector that numpy or torch uses


class Buffers:
    """Gives memory for each want: a mapping of its own, or, below 1 MiB, a part of a shared one.

    A process may have 65,530 mappings, and a rank more tensors. For one thread.
    """

    def __init__(self) -> None:
        self._slab = memoryview(b"")
        self._at = 0

    def take(self, nbytes: int) -> memoryview:
        """Writable memory of zeros; at a page where it is large."""
        if nbytes >= SMALL_BYTES:
            return memoryview(mmap.mmap(-1, nbytes))
        if not self._slab.nbytes or self._at + nbytes > self._slab.nbytes:
            self._slab, self._at = memoryview(mmap.mmap(-1, SLAB_BYTES)), 0
        start = self._at
        self._at += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._slab[start : start + nbytes]
