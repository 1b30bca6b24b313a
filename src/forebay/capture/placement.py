"""Which elements of a sharded tensor this rank holds, and which part of a replica it writes.

Pure arithmetic on sizes; nothing here talks to another rank.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from forebay.format.slices import Box

Run: TypeAlias = "tuple[int, int]"  # (start, count) of indices along one dimension

SMALL_BYTES = 64 * 2**10
PART_BYTES = 256 * 2**10


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh dimension that shards tensor dimension ``dim``: this rank is ``index`` of ``parts``.

    ``stride`` above 1 is torch's strided shard: the dimension had first been cut into that many
    pieces by mesh dimensions further right, and each piece is cut again.
    """

    dim: int
    parts: int
    index: int
    stride: int = 1


def _chunk(count: int, parts: int, index: int) -> Run:
    """Part ``index`` of ``count`` things as torch.chunk cuts: ceiling-sized, the last short."""
    size = -(-count // parts)
    start = min(size * index, count)
    return start, min(start + size, count) - start


def _take(runs: Sequence[Run], start: int, count: int) -> list[Run]:
    """The elements ``start .. start+count`` of what the runs enumerate."""
    taken: list[Run] = []
    for run_start, run_count in runs:
        if count <= 0:
            break
        if start >= run_count:
            start -= run_count
            continue
        length = min(run_count - start, count)
        taken.append((run_start + start, length))
        start, count = 0, count - length
    return taken


def held_runs(size: int, splits: Sequence[Split]) -> list[Run]:
    """Global indices along a dimension of ``size`` that remain after the splits, left to right."""
    runs: list[Run] = [(0, size)] if size else []
    for split in splits:
        total = sum(count for _, count in runs)
        kept: list[Run] = []
        for piece in range(split.stride):
            piece_start, piece_count = _chunk(total, split.stride, piece)
            start, count = _chunk(piece_count, split.parts, split.index)
            kept.extend(_take(runs, piece_start + start, count))
        runs = _joined(kept)
    return runs


def _joined(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, count in runs:
        if count and joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        elif count:
            joined.append((start, count))
    return joined


def held_boxes(shape: Sequence[int], splits: Sequence[Split]) -> list[tuple[Box, Box]]:
    """Boxes this rank holds, each as ``(global box, box in the local tensor)``."""
    by_dim = [
        _with_local(held_runs(n, [s for s in splits if s.dim == d])) for d, n in enumerate(shape)
    ]
    return [
        (
            Box(tuple(r[0] for r in runs), tuple(r[2] for r in runs)),
            Box(tuple(r[1] for r in runs), tuple(r[2] for r in runs)),
        )
        for runs in itertools.product(*by_dim)
    ]


def _with_local(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Each run as (global start, start in the local tensor, count)."""
    starts = itertools.accumulate((count for _, count in runs), initial=0)
    return [(start, local, count) for (start, count), local in zip(runs, starts, strict=False)]


def local_shape(shape: Sequence[int], splits: Sequence[Split]) -> tuple[int, ...]:
    """Shape of the local tensor that the splits leave."""
    return tuple(
        sum(count for _, count in held_runs(n, [s for s in splits if s.dim == d]))
        for d, n in enumerate(shape)
    )


def written_part(name: str, box: Box, item_bytes: int, holders: int, index: int) -> list[Box]:
    """Boxes of ``box`` that holder ``index`` of ``holders`` equal copies writes.

    Small ones go whole to the holder that the name's hash picks; large ones are cut along their
    longest dimension into parts of at least 256 KiB, dealt out from that holder on. The rule looks
    at one tensor alone, so what else a holder has does not matter.
    """
    if holders == 1:
        return [box]
    nbytes = box.elements * item_bytes
    first = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % holders
    turn = (index - first) % holders
    if nbytes <= SMALL_BYTES or not box.sizes:
        return [box] if turn == 0 else []
    axis = max(range(len(box.sizes)), key=lambda d: (box.sizes[d], -d))
    parts = max(1, min(holders, nbytes // PART_BYTES, box.sizes[axis]))
    if turn >= parts:
        return []
    low, high = box.sizes[axis] * turn // parts, box.sizes[axis] * (turn + 1) // parts
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[axis] += low
    sizes[axis] = high - low
    return [Box(tuple(offsets), tuple(sizes))]
