"""O_DIRECT: where memory, offset and filesystem allow it, bytes pass the page cache by.

Large transfers from staged memory then run at the disk's speed and push nothing out of the cache
that the training process wants there. Where it is refused, the same calls go through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import os

import numpy as np

ALIGN_BYTES = 4096
BLOCK_BYTES = 4 * 2**20
DIRECT_FROM_BYTES = 2**20
"""Smaller transfers gain nothing from it."""


def is_aligned(view: memoryview) -> bool:
    """Whether the memory starts at a page, as O_DIRECT wants it; ``view`` is not empty."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) % ALIGN_BYTES == 0


def switch(fd: int, on: bool) -> bool:
    """Turn O_DIRECT of a descriptor on or off; False where the filesystem has none."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def read_at(fd: int, start: int, into: memoryview) -> int:
    """Fill ``into`` from byte ``start``; how many bytes there were. Raises OSError.

    ``fd`` must belong to the caller alone: its O_DIRECT flag is changed.
    """
    whole = into.nbytes // ALIGN_BYTES * ALIGN_BYTES
    direct = (
        whole >= DIRECT_FROM_BYTES
        and start % ALIGN_BYTES == 0
        and is_aligned(into)
        and switch(fd, True)
    )
    done = 0
    while done < into.nbytes:
        if direct and (done >= whole or done % ALIGN_BYTES):
            switch(fd, False)
            direct = False
        part = into[done : min(done + BLOCK_BYTES, whole if direct else into.nbytes)]
        try:
            count = os.preadv(fd, [part], start + done)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            switch(fd, False)  # it took the flag and refuses the transfer
            direct = False
            continue
        if count == 0:
            break
        done += count
    return done
