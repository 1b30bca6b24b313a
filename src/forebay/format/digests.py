"""BLAKE3 over bytes in memory. A slice above 64 MiB also has a digest for each 16 MiB block."""

from __future__ import annotations

from blake3 import blake3

BLOCK_BYTES = 16 * 2**20
BLOCKS_ABOVE_BYTES = 64 * 2**20


def digest(data: bytes | bytearray | memoryview, threads: int = 1) -> bytes:
    """BLAKE3 of ``data``, 32 bytes. The interpreter lock is released while it runs."""
    return blake3(data, max_threads=threads).digest()


def block_digests(data: bytes | bytearray | memoryview) -> list[bytes]:
    """A digest for each 16 MiB block of a slice above 64 MiB; empty for a smaller one."""
    view = memoryview(data)
    if view.nbytes <= BLOCKS_ABOVE_BYTES:
        return []
    return [digest(view[at : at + BLOCK_BYTES]) for at in range(0, view.nbytes, BLOCK_BYTES)]


def block_count(nbytes: int) -> int:
    """How many block digests a slice of ``nbytes`` carries."""
    return -(-nbytes // BLOCK_BYTES) if nbytes > BLOCKS_ABOVE_BYTES else 0
