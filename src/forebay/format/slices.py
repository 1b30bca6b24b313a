"""A slice of a tensor: which tensor, and which box of its global shape.

Shapes, offsets and sizes count elements. A 0-dim tensor is one box with no dimensions and one
element. All arithmetic here is exact and free of I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forebay.format.dtypes import element_type

MAX_DIMS = 1024
MAX_ELEMENTS = 2**63 - 1


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """An axis-aligned box: ``offsets[d] <= index[d] < offsets[d] + sizes[d]``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers all of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        """How many elements lie inside; 1 for a box without dimensions."""
        return math.prod(self.sizes)

    def meet(self, other: Box) -> Box | None:
        """The common box, or None where the two share no element."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if high <= low:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    def relative_to(self, outer: Box) -> Box:
        """The same elements in the coordinates of ``outer``, which must contain them."""
        return Box(
            tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes
        )

    def inside(self, shape: Sequence[int]) -> bool:
        """True when no index of the box lies outside ``shape``."""
        return len(shape) == len(self.sizes) == len(self.offsets) and all(
            a >= 0 and n >= 0 and a + n <= s
            for a, n, s in zip(self.offsets, self.sizes, shape, strict=True)
        )


@dataclass(frozen=True, slots=True, order=True)
class TensorKey:
    """Identity of a stored tensor: its FQN, and the rank for what was declared per rank."""

    fqn: str
    rank: int | None = None

    def __str__(self) -> str:
        return self.fqn if self.rank is None else f"{self.fqn} (rank {self.rank})"


@dataclass(frozen=True, slots=True)
class Slice:
    """One box of one tensor: dtype by name, ``shape`` is the tensor's global shape."""

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.box.elements * element_type(self.dtype).item_bytes


def is_sane(shape: Sequence[int]) -> bool:
    """False for more dimensions or elements than any tensor has: what would take long to count."""
    return len(shape) <= MAX_DIMS and math.prod(max(n, 1) for n in shape) <= MAX_ELEMENTS


def find_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. A sweep along the dimension with most starts."""
    kept = [box for box in boxes if box.elements]
    if len(kept) < 2:
        return None
    dims = len(kept[0].sizes)
    if dims == 0:
        return kept[0], kept[1]
    axis = max(range(dims), key=lambda d: len({box.offsets[d] for box in kept}))
    kept.sort(key=lambda box: box.offsets[axis])
    active: list[Box] = []
    for box in kept:
        start = box.offsets[axis]
        active = [other for other in active if other.offsets[axis] + other.sizes[axis] > start]
        for other in active:
            if other.meet(box) is not None:
                return other, box
        active.append(box)
    return None


def missing_elements(shape: Sequence[int], boxes: Iterable[Box]) -> int:
    """How many elements of ``shape`` the boxes, known not to overlap, leave uncovered."""
    return math.prod(shape) - sum(box.elements for box in boxes)


def runs_of(box: Box, outer: Box) -> list[tuple[int, int]]:
    """Contiguous element runs ``(start, count)`` of ``box`` in the row-major layout of ``outer``.

    Both are in the same coordinates; ``outer`` contains ``box``. Trailing dimensions that are
    taken whole are merged, so a box of full rows is one run.
    """
    if box.elements == 0:
        return []
    inner = box.relative_to(outer)
    dims = len(inner.sizes)
    split = dims
    while split > 0 and inner.sizes[split - 1] == outer.sizes[split - 1]:
        split -= 1
    strides = [1] * dims
    for d in range(dims - 2, -1, -1):
        strides[d] = strides[d + 1] * outer.sizes[d + 1]
    if split == 0:
        return [(0, box.elements)]
    length = math.prod(inner.sizes[split - 1 :])
    starts = [inner.offsets[split - 1] * strides[split - 1]]
    for d in range(split - 2, -1, -1):
        starts = [
            (inner.offsets[d] + i) * strides[d] + s for i in range(inner.sizes[d]) for s in starts
        ]
    return [(start, length) for start in starts]
