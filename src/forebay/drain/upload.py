"""Copies an image from the local tier to the durable one, mapped, not read into memory."""

from __future__ import annotations

import contextlib
import mmap
import os
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
        mapping.madvise(mmap.MADV_DONTNEED, start, count)

    view = memoryview(mapping)
    try:
        write_image(durable, key, view, on_progress=on_progress, on_drop=drop, log=log)
    finally:
        with contextlib.suppress(BufferError):  # a request that hangs still holds a part of it
            view.release()
            mapping.close()
