"""Verified bytes -> targets. One of the doors to torch.

Binding walks the target beside the stored entries and writes down what is wanted; it changes
nothing and reads no tensor. Filling copies fetched bytes in place and then puts values back, so
that a checkpoint that does not fit, or is damaged, leaves the target as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate

from forebay.capture import state as walking
from forebay.capture.copy import carried_as
from forebay.capture.declare import ValueBox, unwrap
from forebay.capture.optimizer import is_optimizer, load_named, missing_slots, named_state
from forebay.capture.placement import held_boxes
from forebay.errors import MismatchError
from forebay.format import paths, tree
from forebay.format.slices import Box, TensorKey
from forebay.restore.reads import Want
from forebay.restore.replicas import Holders

Finish = Callable[[], Any]
_SHOWN = 5


@dataclass(slots=True)
class _Fill:
    """Copy want ``want`` into box ``local`` of ``tensor``."""

    want: int
    tensor: torch.Tensor
    local: Box
    path: str


@dataclass(slots=True)
class Stored:
    """Entries of one scope by path, and the paths below each container in stored order."""

    entries: dict[str, tree.Entry] = field(default_factory=dict)
    children: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Sequence[tree.Entry]) -> Stored:
        """Index entries by path and by parent."""
        stored = cls()
        for entry in entries:
            stored.entries[entry.path] = entry
            if entry.path:
                stored.children.setdefault(paths.parent_of(entry.path), []).append(entry.path)
        return stored


def named_constant(constant: tree.Named) -> Any:
    """Torch's own constant for a stored name."""
    try:
        if constant.kind == "torch.dtype":
            found = getattr(torch, constant.text.removeprefix("torch."), None)
            if not isinstance(found, torch.dtype):
                raise ValueError(f"torch has no dtype {constant.text!r}")
            return found
        if constant.kind == "torch.device":
            return torch.device(constant.text)
        return torch.Size(int(n) for n in constant.text.split(",") if n)
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"{constant.kind} {constant.text[:40]!r}: {error}") from None


class Binder:
    """Binds one target to stored entries. ``own`` is None where per-rank entries are skipped."""

    def __init__(
        self,
        common: Sequence[tree.Entry],
        own: Sequence[tree.Entry] | None,
        *,
        rank: int,
        strict: bool,
        allow_cast: bool,
    ) -> None:
        self.wants: list[Want] = []
        self.holders: list[Holders] = []
        self.missing: list[str] = []
        self.cast: list[str] = []
        self.skipped: list[str] = []
        self.used: set[str] = set()
        self._used_own: set[str] = set()
        self._common = Stored.of(common)
        self._own = None if own is None else Stored.of(own)
        self._rank = rank
        self._strict = strict
        self._allow_cast = allow_cast
        self._problems: list[str] = []
        self._fills: list[_Fill] = []
        self._names: dict[int, str] = {}
        self._finish: Finish = lambda: None
        self._by_memory: dict[tuple[object, ...], int] = {}
        self._must_agree: list[tuple[int, int, str]] = []

    def bind(self, state: dict[Any, Any]) -> None:
        """Bind the whole target. Raises MismatchError with every difference, up to five shown."""
        self._names = walking.parameter_names(state)
        with torch.no_grad():
            self._finish = self._dict(state, "", False, self._common)
        if self._strict:
            self._problems += [f"{path}: not in the checkpoint" for path in self.missing]
        if self._problems:
            more = len(self._problems) - _SHOWN
            text = "; ".join(self._problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
            hint = " (strict=False restores what fits)" if self._strict and self.missing else ""
            raise MismatchError(f"target and checkpoint differ: {text}{hint}")

    def unused_own(self) -> list[str]:
        """Per-rank entries of the checkpoint for which the target has no place."""
        if self._own is None:
            return []
        return [path for path in self._own.entries if path not in self._used_own]

    def check_ties(self, buffers: Sequence[memoryview]) -> None:
        """Raise MismatchError where the target ties what the checkpoint holds as two."""
        for first, second, path in self._must_agree:
            if buffers[first] != buffers[second]:
                raise MismatchError(
                    f"{path}: the target ties it to {self.wants[first].key.fqn}, "
                    "the checkpoint holds two different tensors"
                )

    def fill(self, buffers: Sequence[memoryview]) -> None:
        """Copy the fetched bytes into the targets and put the values back."""
        with torch.no_grad():
            for fill in self._fills:
                want = self.wants[fill.want]
                if not want.box.elements:
                    continue
                target = fill.tensor
                for dim, (at, n) in enumerate(
                    zip(fill.local.offsets, fill.local.sizes, strict=True)
                ):
                    target = target.narrow(dim, at, n)
                dtype = getattr(torch, want.dtype)
                source = torch.frombuffer(buffers[fill.want], dtype=carried_as(dtype))
                source = source.view(want.box.sizes)
                if target.dtype == dtype:
                    target.view(carried_as(dtype)).copy_(source)
                else:
                    target.copy_(source.view(dtype))
            self._finish()

    def _scope(self, own: bool) -> Stored | None:
        return self._own if own else self._common

    def _take(self, path: str, own: bool) -> None:
        (self._used_own if own else self.used).add(path)

    def _take_below(self, path: str, own: bool, stored: Stored) -> None:
        self._take(path, own)
        for child in stored.children.get(path, ()):
            self._take_below(child, own, stored)

    def _visit(self, item: Any, path: str, own: bool) -> Finish:
        item, declared = unwrap(item)
        own = own or declared
        stored = self._scope(own)
        if stored is None:
            self.skipped.append(path)
            return lambda: item
        if path not in stored.entries:
            other = self._scope(not own)
            if other is not None and path in other.entries:
                self._problems.append(
                    f"{path}: saved {'in common' if own else 'per rank'}, "
                    f"the target has it {'per rank' if own else 'in common'}"
                )
            else:
                self.missing.append(path)
            return lambda: item
        if isinstance(item, ValueBox):
            return self._boxed(item, path, own, stored)
        if isinstance(item, torch.nn.Module):
            return self._module(item, path, own, stored)
        if is_optimizer(item):
            return self._optimizer(item, path, own, stored)
        if walking.has_state(item):
            build = self._replace(item.state_dict(), path, own, stored)
            return lambda: (item.load_state_dict(build()), item)[1]
        if isinstance(item, torch.Tensor):
            return self._tensor(item, path, own, stored)
        if isinstance(item, np.ndarray) and walking.viewable(item):
            return self._array(item, path, own, stored)
        if type(item) in (dict, OrderedDict):
            if not item and path:
                return self._into(item, self._replace(None, path, own, stored))
            return self._dict(item, path, own, stored)
        if type(item) is list:
            build = self._replace(item, path, own, stored)
            return self._into(item, build)
        return self._replace(item, path, own, stored)

    def _into(self, item: Any, build: Finish) -> Finish:
        """Replace the contents of a list or dict that others may refer to, keeping the object."""

        def finish() -> Any:
            built = build()
            if type(built) is not type(item):
                return built
            if isinstance(item, list):
                item[:] = built
            else:
                item.clear()
                item.update(built)
            return item

        return finish

    def _boxed(self, item: ValueBox[Any], path: str, own: bool, stored: Stored) -> Finish:
        build = self._replace(item.value, path, own, stored)

        def finish() -> ValueBox[Any]:
            item.value = build()
            return item

        return finish

    def _dict(self, item: dict[Any, Any], path: str, own: bool, stored: Stored) -> Finish:
        entry = stored.entries.get(path)
        if path and not (isinstance(entry, tree.Container) and entry.kind in ("dict", "odict")):
            self._problems.append(f"{path}: the target is a dict, stored is {_what(entry)}")
            return lambda: item
        self._take(path, own)
        parts = {key: self._visit(child, paths.join(path, key), own) for key, child in item.items()}

        def finish() -> dict[Any, Any]:
            for key, part in parts.items():
                built = part()
                if unwrap(item[key])[0] is not built:
                    item[key] = built
            return item

        return finish

    def _module(self, item: torch.nn.Module, path: str, own: bool, stored: Stored) -> Finish:
        found = item.state_dict(keep_vars=True)
        plain = [key for key, child in found.items() if not isinstance(child, torch.Tensor)]
        finish = self._dict(found, path, own, stored)

        def load() -> torch.nn.Module:
            built = finish()
            if plain:
                item.load_state_dict(built)
            return item

        return load

    def _optimizer(self, item: Any, path: str, own: bool, stored: Stored) -> Finish:
        named = named_state(item, self._names, path)
        at_state = paths.join(path, "state")
        for name, parameter in missing_slots(item, self._names, path):
            home = paths.join(at_state, name)
            slots = stored.children.get(home, ())
            if slots or home in stored.entries:
                named["state"][name] = {
                    paths.read_part(p.rpartition("/")[2]): self._slot(stored.entries[p], parameter)
                    for p in slots
                }
        groups = named.pop("param_groups")
        finish = self._dict(named, path, own, stored)
        build = self._replace(groups, paths.join(path, "param_groups"), own, stored)
        at_groups = stored.entries.get(paths.join(path, "param_groups"))
        if at_groups is None:
            self.missing.append(paths.join(path, "param_groups"))
            return lambda: item
        self._check_groups(named, groups, at_groups, path, stored)

        def load() -> Any:
            named["param_groups"] = build()
            load_named(item, finish(), self._names, path)
            return item

        return load

    def _check_groups(
        self,
        named: dict[str, Any],
        groups: list[Any],
        entry: tree.Entry,
        path: str,
        stored: Stored,
    ) -> None:
        count = len(groups)
        if isinstance(entry, tree.Value):
            count = len(tree.decode_value(entry.data, entry.path, named_constant))
        elif isinstance(entry, tree.Container):
            count = entry.length
        if count != len(groups):
            self._problems.append(
                f"{path}: the target has {len(groups)} parameter groups, stored are {count}"
            )
        for name, group in named["params"].items():
            member = stored.entries.get(paths.join(paths.join(path, "params"), name))
            if isinstance(member, tree.Value):
                saved = tree.decode_value(member.data, member.path, named_constant)
                if saved != group:
                    self._problems.append(
                        f"{member.path}: in group {group} of the target, in group {saved} as stored"
                    )

    def _slot(self, entry: tree.Entry, parameter: torch.Tensor) -> Any:
        """Room for one piece of optimizer state that a fresh optimizer does not have yet."""
        if not isinstance(entry, tree.Tensor):
            return None
        dtype = getattr(torch, entry.dtype)
        if entry.shape == tuple(parameter.shape) and (entry.sharded or not _is_sharded(parameter)):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        device = torch.device("cpu") if entry.host == "cpu" else parameter.device
        whole = torch.empty(entry.shape, dtype=dtype, device=device)
        if entry.sharded and isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole

    def _tensor(self, item: torch.Tensor, path: str, own: bool, stored: Stored) -> Finish:
        self._take(path, own)
        entry = stored.entries[path]
        local = item.to_local() if isinstance(item, DTensor) else item
        walking.check_tensor(local, path)
        dtype = walking.DTYPE_NAMES[local.dtype]
        if not isinstance(entry, tree.Tensor):
            self._problems.append(f"{path}: the target is a tensor, stored is {_what(entry)}")
            return lambda: item
        if entry.shape != tuple(item.shape):
            self._problems.append(
                f"{path}: shape {tuple(item.shape)} in the target, {entry.shape} stored"
            )
            return lambda: item
        if entry.dtype != dtype and not self._may_cast(entry.dtype, local.dtype):
            self._problems.append(f"{path}: dtype {dtype} in the target, {entry.dtype} stored")
            return lambda: item
        if not _writable(local):
            self._problems.append(
                f"{path}: the target cannot be written in place (an expanded, conjugated or "
                "negated view): clone it"
            )
            return lambda: item
        if entry.dtype != dtype:
            self.cast.append(f"{path}: {entry.dtype} -> {dtype}")
        boxes = [(Box.whole(entry.shape), Box.whole(entry.shape))]
        holders: Holders = () if own else None
        if isinstance(item, DTensor):
            spread = walking.spread_of(item, path)[0]
            boxes, holders = held_boxes(entry.shape, spread.splits), () if own else spread.holders
        for box, inner in boxes:
            self._want(entry, box, inner, local, path, own)
            self.holders.append(holders)
        return lambda: item

    def _want(
        self, entry: tree.Tensor, box: Box, inner: Box, local: torch.Tensor, path: str, own: bool
    ) -> None:
        key = TensorKey(entry.fqn, self._rank if own else None)
        number = len(self.wants)
        self.wants.append(Want(key, entry.dtype, entry.shape, box))
        self._fills.append(_Fill(number, local, inner, path))
        if local.numel():
            memory = (local.data_ptr(), tuple(local.shape), tuple(local.stride()), inner)
            first = self._by_memory.setdefault(memory, number)
            if first != number and self.wants[first].key != key:
                self._must_agree.append((first, number, path))

    def _may_cast(self, saved: str, target: torch.dtype) -> bool:
        return (
            self._allow_cast
            and getattr(torch, saved).is_floating_point
            and target.is_floating_point
        )

    def _array(self, item: np.ndarray[Any, Any], path: str, own: bool, stored: Stored) -> Finish:
        entry = stored.entries[path]
        if isinstance(entry, tree.Tensor):
            try:
                finish = self._tensor(torch.from_numpy(item), path, own, stored)
            except TypeError:
                self._problems.append(
                    f"{path}: a numpy array of dtype {item.dtype} cannot be filled"
                )
                return lambda: item
            return lambda: (finish(), item)[1]
        self._take(path, own)
        self._problems.append(f"{path}: the target is a numpy array, stored is {_what(entry)}")
        return lambda: item

    def _replace(self, template: Any, path: str, own: bool, stored: Stored) -> Finish:
        """Build what is stored, using tensors and objects of the template where they fit."""
        inner, declared = unwrap(template)
        if declared or walking.has_state(inner):
            return self._visit(template, path, own)
        entry = stored.entries.get(path)
        self._take(path, own)
        if entry is None:
            return lambda: template
        if isinstance(entry, tree.Value):
            value = tree.decode_value(entry.data, path, named_constant)
            return lambda: value
        if isinstance(entry, tree.Tensor):
            return self._fresh(inner, entry, path, own, stored)
        children = stored.children.get(path, [])
        if entry.kind in ("dict", "odict"):
            known = inner if isinstance(inner, dict) else {}
            keys = [paths.read_part(child.rpartition("/")[2]) for child in children]
            parts = [
                (key, self._replace(known.get(key), child, own, stored))
                for key, child in zip(keys, children, strict=True)
            ]
            kind: type[dict[Any, Any]] = dict if entry.kind == "dict" else OrderedDict
            return lambda: kind((key, part()) for key, part in parts)
        known_items = list(inner) if isinstance(inner, list | tuple) else []
        children = sorted(children, key=lambda child: int(child.rpartition("/")[2]))
        known_items += [None] * (len(children) - len(known_items))
        items = [
            self._replace(known_items[n], child, own, stored) for n, child in enumerate(children)
        ]
        sequence: type = list if entry.kind == "list" else tuple
        return lambda: sequence(item() for item in items)

    def _fresh(
        self,
        template: Any,
        entry: tree.Tensor,
        path: str,
        own: bool,
        stored: Stored,
    ) -> Finish:
        dtype = getattr(torch, entry.dtype)
        if (
            isinstance(template, torch.Tensor)
            and tuple(template.shape) == entry.shape
            and template.dtype == dtype
        ):
            return self._tensor(template, path, own, stored)
        made = torch.empty(entry.shape, dtype=dtype)
        finish = self._tensor(made, path, own, stored)
        if entry.host == "numpy":
            return lambda: (finish(), made.numpy()[()])[1]
        return finish


def _writable(local: torch.Tensor) -> bool:
    """True when ``copy_`` takes it as a target: one place for each element, no pending operation.

    Known before any target is touched, so that a restore that fails has changed nothing.
    """
    spread = zip(local.shape, local.stride(), strict=True)
    once = not local.numel() or all(stride or size <= 1 for size, stride in spread)
    return once and not local.is_conj() and not local.is_neg()


def _is_sharded(item: torch.Tensor) -> bool:
    return isinstance(item, DTensor)


def _what(entry: tree.Entry | None) -> str:
    if isinstance(entry, tree.Tensor):
        return f"a tensor {entry.dtype} {entry.shape}"
    if isinstance(entry, tree.Container):
        return f"a {entry.kind}"
    return "a value"
