"""The walk: every tensor once, every value typed, everything else refused with its path."""

from __future__ import annotations

import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from forebay.capture.declare import per_rank, rng, value
from forebay.capture.state import Walked
from forebay.capture.walk import walk
from forebay.errors import StateError
from forebay.format import tree
from forebay.format.slices import TensorKey


def paths(entries: list[tree.Entry]) -> list[str]:
    return [entry.path for entry in entries]


def entry(found: Walked, path: str) -> tree.Entry:
    return next(e for e in [*found.common, *found.own] if e.path == path)


def decoded(found: Walked, path: str) -> Any:
    one = entry(found, path)
    assert isinstance(one, tree.Value)
    return tree.decode_value(one.data, path)


def test_a_plain_state() -> None:
    state = {
        "model": torch.nn.Linear(2, 3),
        "args": {"lr": 0.1, 3: "three", "names": ["a", "b"]},
        "history": [torch.zeros(1), 5],
        "step": value(7),
    }
    found = walk(state, 0)
    assert paths(found.common) == [
        "",
        "model",
        "model/weight",
        "model/bias",
        "args",
        "args/lr",
        "args/#3",
        "args/names",
        "history",
        "history/0",
        "history/1",
        "step",
    ]
    assert entry(found, "model") == tree.Container("model", "odict", 2)
    assert entry(found, "history") == tree.Container("history", "list", 2)
    assert entry(found, "model/weight") == tree.Tensor(
        "model/weight", "model/weight", "float32", (3, 2), "cpu", False
    )
    assert decoded(found, "args/names") == ["a", "b"]
    assert (decoded(found, "step"), decoded(found, "history/1")) == (7, 5)
    assert [leaf.path for leaf in found.leaves] == ["model/weight", "model/bias", "history/0"]
    assert found.own == []


def test_no_tensor_is_copied() -> None:
    model = torch.nn.Linear(2, 3)
    found = walk({"model": model}, 0)
    assert found.leaves[0].tensor.data_ptr() == model.weight.data_ptr()
    array = np.zeros(4)
    assert walk({"a": array}, 0).leaves[0].tensor.data_ptr() == array.ctypes.data


def test_tied_parameters_are_stored_once() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    )
    model[1].weight = model[0].weight
    found = walk({"model": model, "again": model[0].weight}, 0)
    assert [leaf.path for leaf in found.leaves] == ["model/0.weight"]
    tied = entry(found, "model/1.weight")
    assert isinstance(tied, tree.Tensor)
    assert tied.fqn == "model/0.weight"
    again = entry(found, "again")
    assert isinstance(again, tree.Tensor)
    assert again.fqn == "model/0.weight"


def test_views_of_one_memory_are_tied_only_when_they_are_the_same() -> None:
    base = torch.arange(8.0)
    state = {"a": base[:4], "b": base[:4], "c": base[4:], "d": base[:4].view(2, 2), "e": base[:2]}
    assert [leaf.path for leaf in walk(state, 0).leaves] == ["a", "c", "d", "e"]
    number = torch.ones(4, dtype=torch.complex64)
    turned = {"a": number, "b": number.conj(), "c": number.conj()}
    assert [leaf.path for leaf in walk(turned, 0).leaves] == ["a", "b"]
    negated = {"a": number.imag, "b": number.conj().imag}
    assert [leaf.path for leaf in walk(negated, 0).leaves] == ["a", "b"]
    empty = {"a": torch.zeros(0), "b": torch.zeros(0)}
    assert [leaf.path for leaf in walk(empty, 0).leaves] == ["a", "b"]


def test_what_is_per_rank_goes_apart() -> None:
    state = {"rng": per_rank(rng()), "own": per_rank({"t": torch.zeros(2), "n": 3}), "n": 1}
    found = walk(state, 5)
    assert paths(found.common) == ["", "n"]
    assert {"rng", "own", "own/t", "own/n"} <= set(paths(found.own))
    leaf = next(leaf for leaf in found.leaves if leaf.path == "own/t")
    assert leaf.key == TensorKey("own/t", 5)
    assert leaf.spread.holders == ()
    inner = walk({"a": {"b": per_rank(per_rank(torch.zeros(1)))}}, 2)
    assert inner.leaves[0].key.rank == 2


def test_a_tensor_held_in_common_and_per_rank_is_stored_for_both() -> None:
    shared = torch.zeros(4)
    found = walk({"a": shared, "b": per_rank(shared)}, 1)
    fqns = {e.path: e.fqn for e in [*found.common, *found.own] if isinstance(e, tree.Tensor)}
    assert fqns == {"a": "a", "b": "b"}
    assert {leaf.key for leaf in found.leaves} == {TensorKey("a"), TensorKey("b", 1)}


def test_numpy_arrays_of_every_native_kind() -> None:
    kinds = ["bool", "uint8", "int16", "uint32", "int64", "float16", "float64", "complex64"]
    state = {kind: np.ones((2, 3), dtype=kind) for kind in kinds} | {"scalar": np.float32(2.5)}
    found = walk(state, 0)
    for kind in kinds:
        assert entry(found, kind) == tree.Tensor(kind, kind, kind, (2, 3), "numpy", False)
    assert entry(found, "scalar") == tree.Tensor("scalar", "scalar", "float32", (), "numpy", False)


def test_a_read_only_array_is_taken_without_a_warning() -> None:
    array = np.arange(4)
    array.flags.writeable = False
    assert walk({"a": array}, 0).leaves[0].tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.zeros(2, dtype=[("x", "i4")]),
        np.zeros(2, dtype=">f4"),
        np.zeros(2, dtype="datetime64[s]"),
        np.zeros(2, dtype=np.longdouble),
    ],
    ids=lambda a: str(a.dtype),
)
def test_other_arrays_are_refused(array: Any) -> None:
    with pytest.raises(StateError, match=r"^data/x: a numpy array of dtype"):
        walk({"data": {"x": array}}, 0)


def test_an_array_that_runs_backwards_is_saved_as_it_reads() -> None:
    found = walk({"a": np.arange(4)[::-1]}, 0)
    assert found.leaves[0].tensor.tolist() == [3, 2, 1, 0]


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def ragged() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def freed(count: int, offset: int = 0, left: int = 0) -> torch.Tensor:
    tensor = torch.ones(offset + count)[offset:]
    tensor.untyped_storage().resize_(left)
    return tensor


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(2, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (quantized, "qint8"),
        (lambda: torch.zeros(2).as_subclass(Sub), "type Sub"),
        (ragged, "nested"),
        (lambda: freed(1000), "freed"),
        (lambda: freed(1000, offset=500), "freed"),
        (lambda: freed(1000, left=3996), "freed"),
    ],
    ids=["meta", "sparse", "quantized", "subclass", "nested", "freed", "part", "cut"],
)
def test_tensors_without_plain_bytes_are_refused(make: Any, why: str) -> None:
    with pytest.raises(StateError, match=f"^a/1: .*{why}"):
        walk({"a": [0, make()]}, 0)


def test_tensors_that_need_less_memory_than_they_have_elements() -> None:
    row = torch.ones(3)
    state = {"a": row.expand(1000, 3), "b": torch.zeros(0)[5:], "c": row[2], "d": row[::2]}
    assert len(walk(state, 0).leaves) == 4


class Foreign:
    pass


@pytest.mark.parametrize(
    "item",
    [
        Foreign(),
        lambda: None,
        namedtuple("Point", "x")(1),  # noqa: PYI024
        np.dtype("f4"),
        [1, [Foreign()]],
        iter([]),
    ],
    ids=lambda i: type(i).__name__,
)
def test_what_cannot_be_saved_is_refused_with_its_path(item: Any) -> None:
    with pytest.raises(StateError, match=r"^outer/inner"):
        walk({"outer": {"inner": item}}, 0)


@pytest.mark.parametrize("key", [(1, 2), b"k", Foreign()])
def test_keys_that_cannot_be_written_are_refused(key: Any) -> None:
    with pytest.raises(StateError, match="keys of a state may be"):
        walk({"a": {key: 1}}, 0)


def test_a_key_of_very_many_digits_is_refused() -> None:
    with pytest.raises(StateError, match="integer of 16610 bits"):
        walk({"a": {10**5000: 1}}, 0)


def test_a_state_in_itself_is_refused() -> None:
    loop: dict[str, Any] = {"t": torch.zeros(1)}
    loop["self"] = loop
    with pytest.raises(StateError, match="reference to itself"):
        walk(loop, 0)
    endless: list[Any] = [torch.zeros(1)]
    endless.append(endless)
    with pytest.raises(StateError, match="reference to itself"):
        walk({"a": endless}, 0)


@pytest.mark.parametrize("state", [[], None, torch.zeros(1), torch.nn.Linear(1, 1)])
def test_a_state_is_a_dict(state: Any) -> None:
    with pytest.raises(StateError, match="state: expected a dict"):
        walk(state, 0)


def test_objects_give_their_own_state() -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"at": 3, "seen": torch.zeros(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    found = walk({"loader": Loader()}, 0)
    assert paths(found.common) == ["", "loader", "loader/at", "loader/seen"]


def test_an_optimizer_is_walked_by_name_and_its_slots_know_their_parameter() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = walk({"model": model, "optimizer": optimizer}, 0)
    assert "optimizer/state/weight/exp_avg" in paths(found.common)
    assert decoded(found, "optimizer/params/bias") == 0
    assert found.slots_of == {
        "optimizer/state/weight": "model/weight",
        "optimizer/state/bias": "model/bias",
    }


def test_the_sign_changes_with_the_layout_alone() -> None:
    def sign(**state: Any) -> tuple[object, ...]:
        return walk(state, 0).sign

    base = sign(a=torch.zeros(2, 3), n=1)
    assert sign(a=torch.ones(2, 3), n=2) == base
    assert sign(a=torch.zeros(3, 2), n=1) != base
    assert sign(a=torch.zeros(2, 3, dtype=torch.float64), n=1) != base
    assert sign(b=torch.zeros(2, 3), n=1) != base
    assert sign(a=per_rank(torch.zeros(2, 3)), n=1) != base


def test_ordered_dicts_stay_ordered_dicts() -> None:
    found = walk(OrderedDict(b=torch.zeros(1), a={}), 0)
    assert found.common[0] == tree.Container("", "odict", 2)
    assert paths(found.common) == ["", "b", "a"]
