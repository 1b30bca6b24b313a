"""The walk: a state dict becomes tree entries and tensor leaves. One of the doors to torch.

Reads what an object's ``state_dict()`` gives and copies no tensor. A DTensor becomes its local
tensor and the boxes of the global shape that it covers.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from forebay.capture.declare import unwrap
from forebay.capture.optimizer import group_options, is_optimizer, named_state, names_of
from forebay.capture.recall import Memory, Remembered, can_be_remembered
from forebay.capture.state import (
    DTYPE_NAMES,
    EVERYWHERE,
    OWN,
    Host,
    Leaf,
    Spread,
    Walked,
    check_tensor,
    holds_parts,
    parameter_names,
    plain_state,
    stateful,
    viewable,
)
from forebay.errors import StateError
from forebay.format import paths, tree
from forebay.format.slices import TensorKey


def walk(state: Any, rank: int, memory: Memory | None = None) -> Walked:
    """Walk a state. Copies no tensor; takes no collective. Raises StateError naming a path.

    ``memory`` makes the next walk of the same state a matter of checking that nothing has moved.
    """
    if type(state) not in (dict, OrderedDict):
        raise StateError(f"state: expected a dict, found {type(state).__name__}")
    with torch.no_grad():
        walker = _Walk(state, rank, memory or Memory())
        walker.visit(state, "", own=False)
    return walker.found


class _Walk:
    def __init__(self, state: Any, rank: int, memory: Memory) -> None:
        self.rank = rank
        self.found = Walked()
        self._state = state
        self._memory = memory
        self._recalled = memory.holding(tuple((p, id(item)) for p, item in stateful(state, "")))
        self._seen: dict[object, str] = {}
        self._wholes: dict[str, torch.Tensor] = {}  # kept: an id is free once its object is gone

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Names of parameters, worked out only where something is walked anew."""
        return parameter_names(self._state)

    def visit(self, item: Any, path: str, own: bool, depth: int = 0) -> None:
        item, declared = unwrap(item)
        own = own or declared
        entries = self.found.own if own else self.found.common
        if isinstance(item, torch.Tensor):  # first: a state is mostly tensors
            entries.append(self._tensor(item, path, own))
            return
        if depth > tree.MAX_DEPTH:
            raise StateError(f"{path}: nested deeper than {tree.MAX_DEPTH}: a reference to itself?")
        known = self._recalled.get(path)
        if known is not None and known.item is item and known.own is own:
            self._recall(known, path)
        elif can_be_remembered(item):
            self._walk_and_remember(item, path, own, depth)
        else:
            self._plain(item, path, own, depth)

    def _plain(self, item: Any, path: str, own: bool, depth: int) -> None:
        """Walk what an object gives as its state, or anything else as it is."""
        entries = self.found.own if own else self.found.common
        if is_optimizer(item):
            self._note_slots(names_of(item, self.names, path), path, own, item.state)
            item = named_state(item, self.names, path)
        else:
            item = plain_state(item)
        if type(item) in (dict, OrderedDict):
            kind: Literal["dict", "odict"] = "dict" if type(item) is dict else "odict"
            entries.append(tree.Container(path, kind, len(item)))
            for key, child in item.items():
                self.visit(child, paths.join(path, key), own, depth + 1)
        elif isinstance(item, torch.Tensor):
            entries.append(self._tensor(item, path, own))
        elif isinstance(item, np.ndarray | np.generic):
            entries.append(self._array(np.asarray(item), path, own))
        elif type(item) in (list, tuple) and holds_parts(item):
            entries.append(
                tree.Container(path, "list" if type(item) is list else "tuple", len(item))
            )
            for position, child in enumerate(item):
                self.visit(child, paths.join(path, paths.Position(position)), own, depth + 1)
        else:
            entries.append(tree.Value(path, tree.encode_value(item, path)))

    def _walk_and_remember(self, item: Any, path: str, own: bool, depth: int) -> None:
        entries, leaves = self.found.own if own else self.found.common, self.found.leaves
        first_entry, first_leaf, first_mark = len(entries), len(leaves), len(self._seen)
        self._plain(item, path, own, depth)
        self._memory.add(
            item,
            path,
            own=own,
            entries=entries[first_entry:],
            leaves=leaves[first_leaf:],
            wholes=self._wholes,
            marks=list(self._seen.items())[first_mark:],
            mesh=self.found.meshes.get(paths.component(path), ()),
            known=self.names if is_optimizer(item) else {},
        )

    def _recall(self, known: Remembered, path: str) -> None:
        """Take over what an earlier walk found; only an optimizer's options are read anew."""
        entries = self.found.own if known.own else self.found.common
        first = len(entries)
        entries.extend(known.entries)
        if known.options_at is not None:
            options = paths.join(path, "param_groups")
            data = tree.encode_value(group_options(known.item.param_groups), options)
            entries[first + known.options_at] = tree.Value(options, data)
        self.found.leaves.extend(known.leaves)
        self._seen.update(known.marks)
        if known.mesh:
            self.found.meshes[paths.component(path)] = known.mesh
        rows = ((name, parameter, 0) for name, parameter in known.parameters)
        self._note_slots(rows, path, known.own, None)

    def _note_slots(
        self, rows: Iterable[tuple[str | int, Any, int]], path: str, own: bool, slots: Any
    ) -> None:
        """Note whose state stands where, and with ``slots`` who has none yet."""
        home = paths.join(path, "state")
        for name, parameter, _ in rows:
            leaf = self._seen.get((id(parameter), own))
            if leaf is not None:
                self.found.slots_of[paths.join(home, name)] = leaf
                if slots is not None and not slots.get(parameter):
                    self.found.waiting.add(leaf)

    def _array(self, array: np.ndarray[Any, Any], path: str, own: bool) -> tree.Tensor:
        if array.dtype.hasobject or array.dtype.names or not array.dtype.isnative:
            raise StateError(
                f"{path}: a numpy array of dtype {array.dtype} cannot be saved; "
                "convert it to a native numeric dtype"
            )
        try:
            tensor = torch.from_numpy(array if viewable(array) else array.copy())
        except TypeError:
            raise StateError(
                f"{path}: a numpy array of dtype {array.dtype} cannot be saved; "
                "convert it to a native numeric dtype"
            ) from None
        return self._add(tensor, tensor, path, own, OWN if own else EVERYWHERE, "numpy")

    def _tensor(self, item: torch.Tensor, path: str, own: bool) -> tree.Tensor:
        spread = OWN if own else EVERYWHERE
        local = item
        if isinstance(item, DTensor):
            local = item.to_local()
            if not own:
                spread, mesh = self._memory.spreads.of(item, path)
                component = paths.component(path)
                if len(mesh) > len(self.found.meshes.get(component, ())):
                    self.found.meshes[component] = mesh
        check_tensor(local, path)
        host: Host = "cpu" if local.device.type == "cpu" else "accelerator"
        whole = local if own else item
        return self._add(whole, local, path, own, spread, host)

    def _add(
        self,
        whole: torch.Tensor,
        local: torch.Tensor,
        path: str,
        own: bool,
        spread: Spread,
        host: Host,
    ) -> tree.Tensor:
        shape, dtype = tuple(whole.shape), DTYPE_NAMES[local.dtype]
        fqn = self._tied_to(whole, local, (own, dtype, shape, spread), path)
        if fqn == path:
            key = TensorKey(path, self.rank if own else None)
            self.found.leaves.append(Leaf(path, key, dtype, shape, spread, local, host))
        sharded = isinstance(whole, DTensor)
        return tree.Tensor(path, fqn, dtype, shape, host, sharded)

    def _tied_to(
        self, whole: torch.Tensor, local: torch.Tensor, sign: tuple[object, ...], path: str
    ) -> str:
        """The path that stores the bytes: an earlier one when it is the same tensor or memory.

        Identity comes first: an empty shard has no memory to compare. What is per rank is never
        tied to what is held in common: ``sign`` begins with which of the two it is.
        """
        known = self._seen.get((id(whole), sign[0]))
        if known is not None:
            return known
        self._wholes[path] = whole
        if local.numel():
            pending = local.is_conj(), local.is_neg()  # torch conjugates and negates when read
            memory = (local.data_ptr(), local.stride(), pending, sign)
            path = self._seen.setdefault(memory, path)
        self._seen[id(whole), sign[0]] = path
        return path
