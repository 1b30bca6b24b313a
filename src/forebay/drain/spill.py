"""Byte work of the drain: hash an image while it is hot, write it to a tier, settle a repeat."""

from __future__ import annotations

from collections.abc import Callable

from forebay.drain.job import Digests
from forebay.errors import ConflictError
from forebay.format.digests import block_digests, digest
from forebay.format.slot import Layout
from forebay.storage.multipart import UploadLog
from forebay.storage.store import OnDrop, Store

_COMPARE_BYTES = 4 * 2**20


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
    on_progress: Callable[[int], None],
    on_drop: OnDrop | None = None,
    log: UploadLog | None = None,
) -> None:
    """Write an image; durable on return. One that is there already, whole and equal, is the same.

    That happens when an agent died between the write and its note of it. Raises ConflictError when
    other bytes stand under the key, StoreError when the tier fails.
    """
    if _there(store, key, view):
        store.settle(key)
        on_progress(view.nbytes)
        return
    try:
        store.put_large(key, view, on_progress=on_progress, on_drop=on_drop, log=log)
    except ConflictError:
        if not _there(store, key, view):
            raise
        on_progress(view.nbytes)


def _there(store: Store, key: str, view: memoryview) -> bool:
    """True when the object has these bytes: by digest, since its size alone proves nothing."""
    info = store.head(key)
    if info is None or info.size != view.nbytes:
        return False
    buffer = memoryview(bytearray(min(_COMPARE_BYTES, view.nbytes)))
    for at in range(0, view.nbytes, _COMPARE_BYTES):
        part = view[at : at + _COMPARE_BYTES]
        store.read_into(key, at, buffer[: part.nbytes])
        if digest(buffer[: part.nbytes]) != digest(part):
            return False
    return True
