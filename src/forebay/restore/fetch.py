"""Read and verify: every byte against its digest before anyone uses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.errors import DamagedError, DeadlineError, NotFoundError, StoreError
from forebay.format.digests import BLOCK_BYTES, digest
from forebay.format.dtypes import element_type
from forebay.format.slices import Box
from forebay.restore.reads import Batch, Read, ReadPlan, dense_boxes
from forebay.restore.report import SourceShare
from forebay.restore.source import Source
from forebay.watch.events import emit

THREADS = 4
SCRATCH_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """One buffer a want, verified, and where the bytes came from."""

    buffers: list[memoryview]
    by_source: dict[str, SourceShare]
    bad_ranges: tuple[str, ...]
    bytes_needed: int
    bytes_read: int


class _Budget:
    """Bounds scratch memory in flight; one request larger than all of it may run alone."""

    def __init__(self, nbytes: int) -> None:
        self._limit = nbytes
        self._used = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> None:
        with self._changed:
            while self._used and self._used + nbytes > self._limit:
                self._changed.wait()
            self._used += nbytes

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()


@dataclass(slots=True)
class _Work:
    plan: ReadPlan
    sources: Sequence[Source]
    buffers: list[memoryview]
    budget: _Budget
    shares: dict[str, SourceShare] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, batch: Batch) -> None:
        """Fetch one batch: in place where it is exactly one buffer, else by way of scratch."""
        alone = batch.reads[0] if len(batch.reads) == 1 else None
        if alone is not None and alone.direct is not None:
            buffer = self.buffers[alone.direct]
            self._fill(batch, buffer)
            self._scatter(alone, buffer, in_place=alone.direct)
            return
        self.budget.take(batch.nbytes)
        try:
            scratch = memoryview(bytearray(batch.nbytes))
            self._fill(batch, scratch)
            for read in batch.reads:
                at = read.start - batch.start
                self._scatter(read, scratch[at : at + read.nbytes])
        finally:
            self.budget.give(batch.nbytes)

    def _fill(self, batch: Batch, into: memoryview) -> None:
        """Read from the nearest source whose bytes are right; the furthest is asked twice.

        Raises DamagedError where none has them, but what a tier that could not be asked said, where
        there is one: its bytes may be good.
        """
        told: list[str] = []
        unasked: StoreError | DeadlineError | None = None
        for source in (*self.sources, self.sources[-1]):  # a transfer too may go wrong
            began = time.perf_counter()
            try:
                source.read_into(batch.key, batch.start, into)
                for read in batch.reads:
                    at = read.start - batch.start
                    _verify(read, into[at : at + read.nbytes], source.name)
            except NotFoundError:
                told.append(f"{source.name}: not there")
                continue
            except (DamagedError, StoreError, DeadlineError) as error:
                if not isinstance(error, DamagedError):
                    unasked = error
                told.append(f"{source.name}: {error}")
                with self.lock:
                    self.bad.append(told[-1])
                emit("restore.bad_range", level=40, source=source.name, why=error)
                continue
            with self.lock:
                share = self.shares.setdefault(source.name, SourceShare())
                share.bytes += batch.nbytes
                share.reads += 1
                share.seconds += time.perf_counter() - began
            return
        if unasked is not None:
            raise type(unasked)(f"{unasked} (needed for {batch.key}; nothing was changed)")
        raise DamagedError(
            f"{batch.key}, bytes {batch.start} to {batch.start + batch.nbytes}: "
            f"no tier has them intact ({'; '.join(told)}); restore an older step"
        )

    def _scatter(self, read: Read, data: memoryview, in_place: int | None = None) -> None:
        """Copy the parts of a verified range that wants need into their buffers."""
        for piece in read.pieces:
            if piece.want == in_place:
                continue
            want = self.plan.wants[piece.want]
            item = element_type(want.dtype).item_bytes
            for at, box in dense_boxes(read.stored, read.start - read.stored.start, read.nbytes):
                common = box.meet(piece.box)
                if common is not None:
                    target = _region(self.buffers[piece.want], want.box, common, item)
                    dense = data[at : at + box.elements * item]
                    target[...] = _region(dense, box, common, item)


def _region(data: memoryview, outer: Box, inner: Box, item: int) -> np.ndarray[Any, Any]:
    """``inner`` as a view of the dense bytes of ``outer``; the last axis is the item's bytes."""
    dense = np.frombuffer(data, dtype=np.uint8).reshape(*outer.sizes, item)
    at = inner.relative_to(outer)
    return dense[tuple(slice(o, o + n) for o, n in zip(at.offsets, at.sizes, strict=True))]


def _verify(read: Read, data: memoryview, source: str) -> None:
    stored = read.stored
    if read.first_block is None:
        _compare(stored.digest, data, stored.key, read.start, source, str(stored.slice.key))
        return
    for number, at in enumerate(range(0, data.nbytes, BLOCK_BYTES)):
        expected = stored.blocks[read.first_block + number]
        block = data[at : at + BLOCK_BYTES]
        _compare(expected, block, stored.key, read.start + at, source, str(stored.slice.key))


def _compare(
    expected: bytes, data: memoryview, key: str, start: int, source: str, what: str
) -> None:
    found = digest(data)
    if found != expected:
        raise DamagedError(
            f"{source}/{key}: {what}, bytes {start} to {start + data.nbytes}: expected digest "
            f"{expected.hex()[:16]}, found {found.hex()[:16]}"
        )


def fetch(
    plan: ReadPlan,
    sources: Sequence[Source],
    *,
    allocate: Callable[[int], memoryview],
    threads: int = THREADS,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Fetched:
    """Fill a buffer for every want, from the first source that has each range intact.

    Memory: the wants' own size, plus ``scratch_bytes`` for ranges that are not exactly a want.
    Raises DamagedError naming object, range and what each source gave, when none has it intact.
    """
    buffers = [allocate(want.nbytes) for want in plan.wants]
    work = _Work(plan, sources, buffers, _Budget(scratch_bytes))
    with ThreadPoolExecutor(threads, thread_name_prefix="fetch") as pool:
        try:
            futures = [pool.submit(work.run, batch) for batch in plan.batches]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future in done:
                    future.result()
        finally:
            # What has not begun never begins: after a failure, or a Ctrl-C, nobody wants it.
            pool.shutdown(wait=False, cancel_futures=True)
    return Fetched(
        buffers=buffers,
        by_source=work.shares,
        bad_ranges=tuple(work.bad),
        bytes_needed=plan.bytes_needed,
        bytes_read=plan.bytes_read,
    )
