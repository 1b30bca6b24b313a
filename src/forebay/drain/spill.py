"""Byte work of the drain: hash an image while it is hot, write it to a tier, settle a repeat."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from forebay.drain.job import Digests
from forebay.errors import ConflictError, StoreError
from forebay.format.digests import block_digests, digest
from forebay.format.slot import Layout
from forebay.storage.pace import Pace
from forebay.storage.store import Store

_COMPARE_BYTES = 16 * 2**20


def hash_slot(image: memoryview, layout: Layout) -> Digests:
    """Digests of header, slices, blocks and witnesses of a staged slot."""
    slices, blocks = [], []
    for row in layout.slices:
        view = image[row.start : row.start + row.nbytes]
        slices.append(digest(view))
        blocks.append(tuple(block_digests(view)))
    return Digests(
        header=digest(image[: layout.header_bytes]),
        slices=tuple(slices),
        blocks=tuple(blocks),
        witnesses=tuple(digest(image[w.start : w.start + w.nbytes]) for w in layout.witnesses),
    )


def write_image(
    store: Store,
    key: str,
    view: memoryview,
    *,
    on_progress: Callable[[int], None] | None = None,
    pace: Pace | None = None,
) -> None:
    """Write an image; durable on return. One that is there already, whole and equal, is the same.

    That happens when an agent died between the write and its note of it. Raises ConflictError when
    other bytes stand under the key, StoreError when the tier fails.
    """
    try:
        store.put_large(key, view, on_progress=on_progress, pace=pace)
    except ConflictError:
        if not _equal(store, key, view):
            raise
        if on_progress is not None:
            on_progress(view.nbytes)


def _equal(store: Store, key: str, view: memoryview) -> bool:
    info = store.head(key)
    if info is None or info.size != view.nbytes:
        return False
    buffer = memoryview(bytearray(_COMPARE_BYTES))
    for at in range(0, view.nbytes, _COMPARE_BYTES):
        part = view[at : at + _COMPARE_BYTES]
        store.read_into(key, at, buffer[: part.nbytes])
        if buffer[: part.nbytes] != part:
            return False
    return True


def upload_file(
    local: Store,
    durable: Store,
    key: str,
    nbytes: int,
    *,
    on_progress: Callable[[int], None],
    pace: Pace,
) -> None:
    """Copy an image from the local tier to the durable one, mapped, not read into memory.

    Raises StoreError when the local file is gone or cut.
    """
    path = local.local_path(key)
    assert path is not None
    try:
        with path.open("r+b") as file:
            if file.seek(0, 2) != nbytes:
                raise StoreError(f"{path}: expected {nbytes} bytes on the local tier")
            mapping = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read back from the local tier: {error}") from error
    view = memoryview(mapping)
    try:
        write_image(durable, key, view, on_progress=on_progress, pace=pace)
    finally:
        view.release()
        mapping.close()
