"""Random layouts of random tensors: as they lie on each rank of a job that is not there.

Torch's own placements cut the tensors (``_split_tensor``), so what is expected owes nothing to the
product. A mesh takes the place of each rank in turn: no process group, no other process.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from forebay.capture.state import DTYPE_NAMES

DTYPES = list(DTYPE_NAMES)
MEMORIES = ("dense", "dense", "transposed", "strided", "offset")
_PAD = 0xA5


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as bytes, row-major."""
    dense = tensor.detach().contiguous()  # of one element or none, with any stride
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def noise(draw: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits, so that there are NaNs of every kind; a bool is 0 or 1."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.frombuffer(bytearray(draw.randbytes(max(count, 1))), dtype=torch.uint8)[:count]
    if dtype is torch.bool:
        raw = raw & 1
    return raw.clone().view(dtype).view(shape)


@functools.lru_cache(maxsize=4096)
def _mesh(ranks: tuple[int, ...], shape: tuple[int, ...], rank: int) -> DeviceMesh:
    """A mesh as a rank sees it."""
    grid = torch.tensor(ranks).view(shape)
    return DeviceMesh("cpu", grid, _init_backend=False, _rank=rank)


@dataclass(frozen=True)
class Laid:
    """How one tensor lies: the ranks of its mesh, by its shape, and a placement for each dimension.

    Without a mesh it is a plain tensor, whole on every rank.
    """

    ranks: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Any, ...]

    @property
    def plain(self) -> bool:
        """True for a tensor that knows of no ranks."""
        return not self.mesh

    def holds(self, rank: int) -> bool:
        """True when the tensor has an entry on this rank."""
        return self.plain or rank in self.ranks

    def cut(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What torch gives a rank of a tensor, placement by placement from the left."""
        local = whole
        at = self.ranks.index(rank) if not self.plain else 0
        for dim, placement in enumerate(self.placements):
            index = at // math.prod(self.mesh[dim + 1 :]) % self.mesh[dim]
            if not isinstance(placement, Replicate):
                parts, _ = placement._split_tensor(
                    local, self.mesh[dim], with_padding=False, contiguous=False
                )
                local = parts[index]
        return local

    def put(self, local: torch.Tensor, shape: torch.Size, rank: int) -> torch.Tensor:
        """A local tensor as the state holds it."""
        if self.plain:
            return local
        mesh = _mesh(self.ranks, self.mesh, rank)
        stride = torch.empty(shape, device="meta").stride()
        made: torch.Tensor = DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=shape, stride=stride
        )
        return made


def random_layout(draw: random.Random, world: int, ndim: int) -> Laid:
    """A plain tensor, or one on a mesh of one to three dimensions over some or all ranks."""
    if draw.random() < 0.2:
        return Laid((), (), ())
    count = world if draw.random() < 0.7 else draw.randint(1, world)
    first = draw.randint(0, world - count)
    ranks = list(range(first, first + count))
    if draw.random() < 0.2:
        draw.shuffle(ranks)
    mesh: list[int] = []
    left = count
    for _ in range(draw.randint(0, 2)):
        size = draw.choice([n for n in range(1, left + 1) if left % n == 0])
        mesh.append(size)
        left //= size
    mesh.append(left)
    axes = [draw.randrange(ndim) if ndim and draw.random() < 0.75 else None for _ in mesh]
    strided = draw.random() < 0.5
    placements: list[Any] = []
    for dim, axis in enumerate(axes):
        later = math.prod(
            n for n, a in zip(mesh[dim + 1 :], axes[dim + 1 :], strict=True) if a == axis
        )
        if axis is None:
            placements.append(Replicate())
        elif strided and later > 1:  # as fully_shard does over tensor parallel
            placements.append(_StridedShard(axis, split_factor=later))
        else:
            placements.append(Shard(axis))
    return Laid(tuple(ranks), tuple(mesh), tuple(placements))


def random_shape(draw: random.Random) -> tuple[int, ...]:
    """None to four dimensions, often uneven, at times empty, at times above 256 KiB."""
    if draw.random() < 0.04:
        return (draw.choice([257, 513]), draw.choice([300, 1031]))
    return tuple(draw.choice([0, 1, 1, 2, 3, 5, 7, 8, 11]) for _ in range(draw.randint(0, 4)))


class Memory:
    """A tensor of random bits that lies in memory in one of several ways."""

    def __init__(self, draw: random.Random, like: torch.Tensor) -> None:
        kind = draw.choice(MEMORIES)
        count, dtype, shape = like.numel(), like.dtype, like.shape
        self._gaps: torch.Tensor | None = None
        if kind == "transposed":
            turned = noise(draw, dtype, tuple(reversed(shape)))
            self.tensor = turned.permute(list(reversed(range(like.dim()))))
        elif kind == "dense":
            self.tensor = noise(draw, dtype, tuple(shape))
        else:
            step = 2 if kind == "strided" else 1
            pad = torch.full(((2 * count + 4) * dtype.itemsize,), _PAD, dtype=torch.uint8)
            base = (pad & 1 if dtype is torch.bool else pad).view(dtype)
            self.tensor = base[3::step][:count].view(shape)
            self._base, self._step, self._count = base, step, count
            self._gaps = self._around().clone()

    def _around(self) -> torch.Tensor:
        raw = self._base.view(torch.uint8).view(-1, self._base.dtype.itemsize).clone()
        raw[3 :: self._step][: self._count] = 0
        return raw

    def overrun(self) -> bool:
        """True when something beside the tensor has changed."""
        return self._gaps is not None and not torch.equal(self._around(), self._gaps)
