"""Gives what this rank read to the others that want it, and takes what they read for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from forebay.errors import DamagedError, ForebayError
from forebay.format.digests import digest
from forebay.restore.replicas import Division
from forebay.restore.report import SourceShare

_SEAL_BYTES = 32


class Peers(Protocol):
    """The other ranks of the job. All of them call each of these, or none."""

    def are_there(self) -> bool:
        """True when this rank can speak with others."""

    def attempt(self, step: Callable[[], None]) -> ForebayError | None:
        """Do something on all ranks: the first failure that one of them has, on each."""

    def agreed_buckets(self, marks: Mapping[int, int]) -> set[int]:
        """Buckets whose mark is the same on every rank."""

    def any_of(self, marks: bytes) -> bytes:
        """Byte by byte the largest over all ranks."""

    def swap(self, said: Mapping[int, bytes]) -> dict[int, bytes]:
        """To each of some ranks its word, and from each as many bytes."""

    def pass_on(
        self,
        given: Sequence[tuple[int, memoryview]],
        taken: Sequence[tuple[int, memoryview]],
    ) -> None:
        """Send bytes to ranks, and fill memory with what ranks send."""

    def broadcast(self, view: memoryview, reader: int) -> None:
        """Fill memory with a rank's bytes, on every rank."""


def pass_on(
    division: Division, buffers: Sequence[memoryview], peers: Peers, rank: int
) -> SourceShare:
    """Fill the buffers of what other ranks read; what came from them. Collective.

    Every piece travels with a digest of it. Raises DamagedError when one is not what was sent.
    """
    began, share = time.perf_counter(), SourceShare()
    sealed = {number: _sealed(buffers[number]) for _, number in division.given}
    expected = [memoryview(bytearray(_SEAL_BYTES)) for _ in division.taken]
    given = [part for peer, n in division.given for part in ((peer, sealed[n]), (peer, buffers[n]))]
    taken = [
        part
        for (peer, n), seal in zip(division.taken, expected, strict=True)
        for part in ((peer, seal), (peer, buffers[n]))
    ]
    if given or taken:
        peers.pass_on(given, taken)
    for (peer, number), seal in zip(division.taken, expected, strict=True):
        _check(buffers[number], seal, peer)
        share.bytes += buffers[number].nbytes
        share.reads += 1
    for reader, numbers in division.broadcasts:
        whole = memoryview(bytearray(b"".join(buffers[number] for number in numbers)))
        seal = _sealed(whole)
        peers.broadcast(seal, reader)
        peers.broadcast(whole, reader)
        if reader != rank:
            _check(whole, seal, reader)
            at = 0
            for number in numbers:
                buffers[number][:] = whole[at : at + buffers[number].nbytes]
                at += buffers[number].nbytes
            share.bytes += whole.nbytes
            share.reads += 1
    for first, number in division.copies:
        buffers[number][:] = buffers[first]
    share.seconds = time.perf_counter() - began
    return share


def _sealed(data: memoryview) -> memoryview:
    return memoryview(bytearray(digest(data)))


def _check(data: memoryview, seal: memoryview, peer: int) -> None:
    if digest(data) != bytes(seal):
        raise DamagedError(f"restore: what rank {peer} read came with another digest: try again")
