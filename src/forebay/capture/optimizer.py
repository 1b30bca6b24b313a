"""An optimizer's state by parameter name instead of by number, and back.

Numbers depend on which parameters a process holds; names do not, so the same state can be restored
under another parallelism. The named form of ``state_dict()`` is::

    {"state": {<name>: {"exp_avg": ..., "step": ...}},
     "param_groups": [{"lr": ..., ...}],          options only
     "params": {<name>: <index of its group>}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forebay.errors import StateError

_OPTIMIZERS: dict[Any, bool] = {}  # by type; asked for every node of a state


def is_optimizer(item: object) -> bool:
    """True for torch.optim.Optimizer and what is derived from it, judged without torch."""
    return _derives_from_optimizer(type(item))


def _derives_from_optimizer(kind: Any) -> bool:
    known = _OPTIMIZERS.get(kind)
    if known is None:
        known = _OPTIMIZERS[kind] = any(
            base.__name__ == "Optimizer" and base.__module__.startswith("torch.optim")
            for base in kind.__mro__
        )
    return known


def names_of(
    optimizer: Any, known: Mapping[int, str], path: str
) -> list[tuple[str | int, Any, int]]:
    """``(name, parameter, group index)`` in the order of the optimizer's own numbering.

    ``known`` maps ``id(parameter)`` to its name in a module of the state. A parameter of no known
    module keeps its number, which then identifies it.
    """
    rows: list[tuple[str | int, Any, int]] = []
    seen: set[str | int] = set()
    for group, options in enumerate(optimizer.param_groups):
        for parameter in options["params"]:
            name: str | int = known.get(id(parameter), len(rows))
            if name in seen:
                raise StateError(f"{path}: two parameters are named {name!r}")
            seen.add(name)
            rows.append((name, parameter, group))
    return rows


def group_options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options of each group, without its members."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in groups
    ]


def named_state(optimizer: Any, known: Mapping[int, str], path: str) -> dict[str, Any]:
    """The named form of ``optimizer.state_dict()``; tensors are the optimizer's own."""
    rows = names_of(optimizer, known, path)
    plain = optimizer.state_dict()
    extra = set(plain) - {"state", "param_groups"}
    state = {name: plain["state"][n] for n, (name, _, _) in enumerate(rows) if n in plain["state"]}
    named = {
        "state": state,
        "param_groups": group_options(plain["param_groups"]),
        "params": {name: group for name, _, group in rows},
    }
    return named | {key: plain[key] for key in sorted(extra)}


def missing_slots(
    optimizer: Any, known: Mapping[int, str], path: str
) -> Iterator[tuple[str | int, Any]]:
    """Parameters for which the optimizer holds no state yet, as a fresh one does for all."""
    for name, parameter, _ in names_of(optimizer, known, path):
        if not optimizer.state.get(parameter):
            yield name, parameter


def load_named(optimizer: Any, named: dict[str, Any], known: Mapping[int, str], path: str) -> None:
    """Set the optimizer from the named form. Tensors in it become the optimizer's own, uncast.

    ``Optimizer.load_state_dict`` would cast floating state to the parameter's dtype; options go
    into the groups key by key so that schedulers keep the dictionaries they refer to.
    """
    for name, parameter, _ in names_of(optimizer, known, path):
        if name in named["state"]:
            optimizer.state[parameter] = dict(named["state"][name])
    for group, options in zip(optimizer.param_groups, named["param_groups"], strict=True):
        for key, value in options.items():
            group[key] = value
