"""Copies an image from the local tier to the durable one, mapped, not read into memory."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable

from forebay.drain.spill import write_image
from forebay.errors import StoreError
from forebay.storage.multipart import UploadLog
from forebay.storage.store import Store


def upload_file(
    local: Store,
    durable: Store,
    key: str,
    nbytes: int,
    *,
    on_progress: Callable[[int], None],
    log: UploadLog | None = None,
) -> None:
    """Write the image under the same key; durable on return.

    Pages that were read are dropped, so that the agent stays small whatever the image's size.
    Raises StoreError when the local file is gone or cut, and as ``write_image``.
    """
    path = local.local_path(key)
    assert path is not None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd).st_size
            if found != nbytes:
                raise StoreError(
                    f"{path}: expected {nbytes} bytes on the local tier, found {found}"
                )
            mapping = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read back from the local tier: {error}") from error

    def drop(start: int, count: int) -> None:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if start + count > first:
            mapping.madvise(mmap.MADV_DONTNEED, first, start + count - first)

    view = memoryview(mapping)
    try:
        write_image(durable, key, view, on_progress=on_progress, on_drop=drop, log=log)
    finally:
        with contextlib.suppress(BufferError):
            view.release()
        _HELD.close(mapping)


class _Held:
    """Mappings that could not be closed when their upload ended. Used by any thread.

    A request that hangs, or the traceback of one that failed, still holds a part; an image that is
    mapped keeps its blocks on the disk, deleted or not.
    """

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._collected_s = 0.0

    def close(self, *more: mmap.mmap) -> None:
        """Close these, and those of before; what is still held is kept for the next time."""
        with self._lock:
            kept = []
            for one in (*self._mappings, *more):
                try:
                    one.close()
                except BufferError:
                    kept.append(one)
            self._mappings = kept

    def look(self) -> None:
        """Try again, every few seconds, whatever cycles of dead objects hold them."""
        if self._mappings and time.monotonic() - self._collected_s > _COLLECT_S:
            self._collected_s = time.monotonic()
            gc.collect()
            self.close()


_COLLECT_S = 5.0
_HELD = _Held()
close_what_was_held = _HELD.look
