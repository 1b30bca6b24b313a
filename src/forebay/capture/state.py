"""The parts of a state: what a leaf is, how it lies on ranks, what can be saved. Imports torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from forebay.capture.declare import ValueBox, unwrap
from forebay.capture.optimizer import is_optimizer
from forebay.capture.placement import Split
from forebay.errors import StateError
from forebay.format import paths, tree
from forebay.format.dtypes import ELEMENT_TYPES
from forebay.format.slices import TensorKey

Host: TypeAlias = Literal["cpu", "accelerator", "numpy"]

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in ELEMENT_TYPES if hasattr(torch, name)
}


@dataclass(frozen=True, slots=True)
class Spread:
    """How a tensor lies on ranks: the splits of this rank, and who holds equal copies.

    ``holders`` names the ranks with the same elements; None stands for every rank of the component.
    """

    splits: tuple[Split, ...]
    holders: tuple[int, ...] | None


class Spreads:
    """Spreads already worked out, by mesh and placements. One for the life of a checkpointer."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Any, Spread, tuple[int, ...]]] = {}

    def of(self, item: DTensor, path: str) -> tuple[Spread, tuple[int, ...]]:
        """Spread of a DTensor on this rank, and the ranks of its mesh."""
        mesh = item.device_mesh
        key = (id(mesh), item.placements, item.dim())
        known = self._known.get(key)
        if known is None or known[0] is not mesh:
            known = self._known[key] = (mesh, *spread_of(item, path))
        return known[1], known[2]


EVERYWHERE = Spread((), None)
OWN = Spread((), ())


class Leaf(NamedTuple):  # made anew for every tensor at every save: cheaper than a dataclass
    """A tensor of the state: ``tensor`` is the local one, ``shape`` the global shape."""

    path: str
    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    spread: Spread
    tensor: torch.Tensor
    host: Host

    @property
    def sign(self) -> tuple[object, ...]:
        """What must be equal from save to save for the layout to stay."""
        return (self.key, self.dtype, self.shape, self.spread, tuple(self.tensor.shape))


@dataclass(slots=True)
class Walked:
    """The state as found: entries held in common, entries of this rank alone, and the tensors.

    A tied tensor has an entry for each path and one leaf. ``meshes`` has, by top-level entry, the
    ranks of the largest device mesh seen in it. ``slots_of`` has, by the path of a parameter's
    optimizer state, the path of the parameter's own leaf; ``waiting`` those whose state the
    optimizer will only make at its first step.
    """

    common: list[tree.Entry] = field(default_factory=list)
    own: list[tree.Entry] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    meshes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    slots_of: dict[str, str] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)

    @property
    def sign(self) -> tuple[object, ...]:
        """Equal signs have equal layouts."""
        return tuple(leaf.sign for leaf in self.leaves)

    @property
    def accelerator(self) -> torch.device | None:
        """The device of the first tensor that is not on the CPU, or None."""
        devices = (leaf.tensor.device for leaf in self.leaves)
        return next((device for device in devices if device.type != "cpu"), None)


def parameter_names(state: Any) -> dict[int, str]:
    """``id(parameter)`` -> its name in the modules of a state; a name met twice gets a path."""
    found: dict[int, str] = {}
    taken: set[str] = set()
    for path, module in stateful(state, ""):
        if not isinstance(module, torch.nn.Module):
            continue
        for name, parameter in module.named_parameters():
            if id(parameter) not in found:
                full = f"{path}.{name}" if name in taken else name
                taken.add(full)
                found[id(parameter)] = full
    return found


def stateful(item: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The modules and optimizers of a state, with their paths. Raises StateError for a cycle."""
    if depth > tree.MAX_DEPTH:
        raise StateError(f"{path}: nested deeper than {tree.MAX_DEPTH}: a reference to itself?")
    item, _ = unwrap(item)
    if isinstance(item, torch.nn.Module) or is_optimizer(item):
        yield path, item
    elif type(item) in (dict, OrderedDict):
        for key, child in item.items():
            yield from stateful(child, paths.join(path, key), depth + 1)
    elif type(item) in (list, tuple):
        for position, child in enumerate(item):
            yield from stateful(child, paths.join(path, paths.Position(position)), depth + 1)


def plain_state(item: Any) -> Any:
    """What an object with a state gives for saving, and anything else as it is."""
    if isinstance(item, torch.nn.Module):
        return item.state_dict(keep_vars=True)
    if isinstance(item, ValueBox):
        return item.value
    if hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
        return item.state_dict()
    return item


def viewable(array: np.ndarray[Any, Any]) -> bool:
    """True when torch can use the array's own memory: writable, and not run through backwards."""
    return array.flags.writeable and min(array.strides, default=0) >= 0


def has_state(item: object) -> bool:
    """True for an object that saves and restores through its own methods."""
    return isinstance(item, torch.nn.Module | ValueBox) or (
        hasattr(item, "state_dict") and hasattr(item, "load_state_dict")
    )


def holds_parts(item: Any, depth: int = 0) -> bool:
    """True when a list or tuple holds, at any depth, a tensor or an object with a state."""
    item, own = unwrap(item)
    if own or isinstance(item, torch.Tensor | np.ndarray | np.generic) or has_state(item):
        return True
    if depth > tree.MAX_DEPTH:
        return False
    if type(item) in (list, tuple):
        return any(holds_parts(child, depth + 1) for child in item)
    if type(item) in (dict, OrderedDict):
        return any(holds_parts(child, depth + 1) for child in item.values())
    return False


def check_tensor(local: torch.Tensor, path: str) -> None:
    """Raise StateError for a tensor whose bytes cannot be taken as they are."""
    if local.dtype not in DTYPE_NAMES or local.layout != torch.strided or local.is_quantized:
        raise StateError(
            f"{path}: a tensor of dtype {local.dtype} and layout {local.layout} cannot be saved; "
            "save its parts as plain tensors"
        )
    if local.is_nested:
        raise StateError(f"{path}: a nested tensor cannot be saved; save its parts")
    if local.device.type == "meta":
        raise StateError(f"{path}: a tensor on the meta device has no bytes to save")
    if not _has_memory(local):
        raise StateError(
            f"{path}: the memory of this tensor was freed (FSDP frees whole parameters between "
            "their uses): give what is sharded, or what is not freed"
        )
    if type(local) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise StateError(
            f"{path}: a tensor of type {type(local).__name__} cannot be saved; "
            "only torch.Tensor, Parameter and DTensor can: save its parts"
        )


def _has_memory(local: torch.Tensor) -> bool:
    """Whether the storage of a tensor is as large as the tensor needs.

    Torch copies from one whose storage was cut without a look: that ends the process.
    """
    there = local.untyped_storage().nbytes()
    count = local.numel()
    if local.is_contiguous() or not count:  # nearly all are: no look at the dimensions
        last = count - 1
    else:
        last = sum((n - 1) * int(step) for n, step in zip(local.shape, local.stride(), strict=True))
    return not count or there >= (int(local.storage_offset()) + last + 1) * local.itemsize


def spread_of(item: DTensor, path: str) -> tuple[Spread, tuple[int, ...]]:
    """Splits and equal holders of a DTensor on this rank, and the ranks of its mesh."""
    mesh = item.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise StateError(f"{path}: this rank is not part of the tensor's device mesh")
    splits: list[Split] = []
    select: list[int | slice] = []
    for dim, placement in enumerate(item.placements):
        if isinstance(placement, Replicate):
            select.append(slice(None))
            continue
        if isinstance(placement, Partial):
            raise StateError(
                f"{path}: placement {placement} holds partial sums; redistribute it before save"
            )
        stride = int(getattr(placement, "split_factor", 1))
        if not isinstance(placement, Shard) and stride == 1:
            raise StateError(f"{path}: placement {placement} is of a kind unknown to forebay")
        axis = int(getattr(placement, "dim"))  # noqa: B009 - every sharding placement has one
        splits.append(Split(axis % max(item.dim(), 1), mesh.size(dim), coordinate[dim], stride))
        select.append(coordinate[dim])
    ranks = mesh.mesh
    holders = tuple(int(r) for r in ranks[tuple(select)].reshape(-1).tolist())
    everyone = tuple(int(r) for r in ranks.reshape(-1).tolist())
    return Spread(tuple(splits), holders), everyone
