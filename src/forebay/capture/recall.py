"""What walks found in modules and optimizers, used again while nothing of it has moved.

A state is walked at every save, inside the pause, and is nearly always the same tensors in the same
places. What is remembered holds only while the state has the same modules and optimizers, each
place of theirs still has the very tensor at the same address, and no place came or went; if
anything differs, all of it is walked anew. What is no plain tensor in a known place (extra state, a
number in an optimizer's slots, a tensor made by a hook) is never remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from forebay.capture.optimizer import is_optimizer, names_of
from forebay.capture.state import Leaf, Spreads
from forebay.format import paths, tree


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor where it is kept: ``kept[key] is tensor``, its local part at ``address``."""

    kept: Any
    key: Any
    tensor: torch.Tensor | None
    local: torch.Tensor | None
    address: int

    @classmethod
    def of(cls, kept: Any, key: Any) -> Place:
        """The place as it is now."""
        tensor = kept[key]
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001
        return cls(kept, key, tensor, local, 0 if local is None else local.data_ptr())

    def stands(self) -> bool:
        """True while nothing of it has changed."""
        found = self.kept.get(self.key)
        if found is not self.tensor:
            return False
        if found is None:
            return self.key in self.kept
        local = found._local_tensor if isinstance(found, DTensor) else found  # noqa: SLF001
        return local is self.local and bool(local.data_ptr() == self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """The part of a walk that one object gave, and the places that must stand for it to hold.

    ``options_at`` is where among the entries an optimizer's options stand; ``marks`` are the walk's
    notes on which tensors it has seen.
    """

    item: Any
    own: bool
    places: tuple[Place, ...]
    shape: tuple[Any, ...]
    entries: tuple[tree.Entry, ...]
    leaves: tuple[Leaf, ...]
    marks: tuple[tuple[Any, str], ...]
    mesh: tuple[int, ...]
    options_at: int | None
    parameters: tuple[tuple[str | int, Any], ...]

    def holds(self) -> bool:
        """True while the object is as it was."""
        return shape_of(self.item) == self.shape and all(place.stands() for place in self.places)


def keepers(item: Any) -> list[Any]:
    """The dictionaries in which a module or an optimizer keeps its tensors."""
    if isinstance(item, torch.nn.Module):
        kept: list[Any] = []
        for module in item.modules():
            kept += (module._parameters, module._buffers)  # noqa: SLF001
        return kept
    return list(item.state.values())


def shape_of(item: Any) -> tuple[Any, ...]:
    """How many places there are, and for an optimizer which parameters are in which group."""
    sizes = tuple(map(len, keepers(item)))
    if isinstance(item, torch.nn.Module):
        return sizes
    return (*(tuple(map(id, group["params"])) for group in item.param_groups), sizes)


def can_be_remembered(item: Any) -> bool:
    """True for what states its tensors the way torch's own classes do."""
    if isinstance(item, torch.nn.Module):
        return type(item).state_dict is torch.nn.Module.state_dict
    return is_optimizer(item) and type(item).state_dict is torch.optim.Optimizer.state_dict


class Memory:
    """Spreads and walks of one checkpointer. Used by the thread that trains."""

    def __init__(self) -> None:
        self.spreads = Spreads()
        self._found: dict[str, Remembered] = {}
        self._of: tuple[tuple[str, int], ...] = ()

    def holding(self, places: tuple[tuple[str, int], ...]) -> dict[str, Remembered]:
        """What is remembered, by path, if all of it holds for these objects; else nothing."""
        if places == self._of and all(found.holds() for found in self._found.values()):
            return dict(self._found)
        self._of, self._found = places, {}
        return {}

    def add(
        self,
        item: Any,
        path: str,
        *,
        own: bool,
        entries: Sequence[tree.Entry],
        leaves: Sequence[Leaf],
        wholes: dict[str, torch.Tensor],
        marks: Sequence[tuple[Any, str]],
        mesh: tuple[int, ...],
        known: dict[int, str],
    ) -> None:
        """Remember what was found in ``item``, if it is all plain tensors in known places."""
        options = paths.join(path, "param_groups") if is_optimizer(item) else None
        members = paths.join(path, "params") + "/"
        own_paths = {leaf.path for leaf in leaves}
        options_at = None
        for number, entry in enumerate(entries):
            if isinstance(entry, tree.Tensor) and entry.fqn not in own_paths:
                return  # tied to something that may change by itself
            if isinstance(entry, tree.Value):
                if options is None or not (entry.path == options or entry.path.startswith(members)):
                    return
                options_at = number if entry.path == options else options_at
        kept = [(keeper, key) for keeper in keepers(item) for key in keeper]
        if any(not isinstance(k[key], torch.Tensor | None) for k, key in kept):
            return
        kept_ids = {id(keeper[key]) for keeper, key in kept}
        if any(id(wholes[leaf.path]) not in kept_ids for leaf in leaves):
            return
        self._found[path] = Remembered(
            item=item,
            own=own,
            places=tuple(Place.of(keeper, key) for keeper, key in kept),
            shape=shape_of(item),
            entries=tuple(entries),
            leaves=tuple(leaves),
            marks=tuple(marks),
            mesh=mesh,
            options_at=options_at,
            parameters=()
            if options is None
            else tuple((name, parameter) for name, parameter, _ in names_of(item, known, path)),
        )
