"""An optimizer's state by name, and back into a fresh optimizer, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forebay.capture.optimizer import (
    is_optimizer,
    load_named,
    missing_slots,
    named_state,
    names_of,
)
from forebay.errors import StateError

Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def known(module: torch.nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in module.named_parameters()}


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        module(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", MAKERS)
def test_a_restored_optimizer_goes_on_as_the_first_would(name: str) -> None:
    first = model()
    optimizer = MAKERS[name](first.parameters())
    train(first, optimizer, 3)
    named = copy.deepcopy(named_state(optimizer, known(first), "optimizer"))

    second = model()
    second.load_state_dict(first.state_dict())
    again = MAKERS[name](second.parameters())
    load_named(again, named, known(second), "optimizer")
    assert same(again.state_dict(), optimizer.state_dict())
    train(first, optimizer, 2)
    train(second, again, 2)
    assert same(dict(second.state_dict()), dict(first.state_dict()))


def test_the_named_form() -> None:
    module = model()
    weights = [p for n, p in module.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in module.named_parameters() if n.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 0.5}, {"params": biases}])
    train(module, optimizer, 1)
    named = named_state(optimizer, known(module), "optimizer")
    assert named["params"] == {"0.weight": 0, "1.weight": 0, "0.bias": 1, "1.bias": 1}
    assert named["state"]["1.bias"]["exp_avg"] is optimizer.state[biases[1]]["exp_avg"]
    assert [group["lr"] for group in named["param_groups"]] == [0.5, 0.001]
    assert all("params" not in group for group in named["param_groups"])


def test_another_order_of_the_parameters_gets_the_same_state() -> None:
    first = model()
    optimizer = MAKERS["adamw"](first.parameters())
    train(first, optimizer, 2)
    named = copy.deepcopy(named_state(optimizer, known(first), "optimizer"))
    second = model()
    again = MAKERS["adamw"](reversed(list(second.parameters())))
    load_named(again, named, known(second), "optimizer")
    for name, parameter in second.named_parameters():
        assert same(again.state[parameter], named["state"][name])


def test_sgd_without_momentum_has_no_tensors() -> None:
    module = model()
    optimizer = MAKERS["sgd"](module.parameters())
    train(module, optimizer, 1)
    named = named_state(optimizer, known(module), "optimizer")
    slots = [v for slot in named["state"].values() for v in slot.values()]
    assert not any(isinstance(v, torch.Tensor) for v in slots)


def test_a_group_keeps_its_own_dictionary() -> None:
    module = model()
    optimizer = MAKERS["adamw"](module.parameters())
    train(module, optimizer, 1)
    named = copy.deepcopy(named_state(optimizer, known(module), "optimizer"))
    named["param_groups"][0]["lr"] = 7.0
    group = optimizer.param_groups[0]
    load_named(optimizer, named, known(module), "optimizer")
    assert optimizer.param_groups[0] is group
    assert group["lr"] == 7.0
    assert len(group["params"]) == 4


def test_restored_state_is_not_cast() -> None:
    module = model()
    optimizer = MAKERS["adamw"](module.parameters())
    train(module, optimizer, 1)
    named = copy.deepcopy(named_state(optimizer, known(module), "optimizer"))
    half = named["state"]["0.weight"]["exp_avg"].to(torch.bfloat16)
    named["state"]["0.weight"]["exp_avg"] = half
    load_named(optimizer, named, known(module), "optimizer")
    assert optimizer.state[module.get_parameter("0.weight")]["exp_avg"].dtype == torch.bfloat16


def test_a_parameter_of_no_module_keeps_its_number() -> None:
    module = model()
    loose = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([loose, *module.parameters()], lr=0.1)
    assert [name for name, _, _ in names_of(optimizer, known(module), "o")][:2] == [0, "0.weight"]


def test_two_parameters_of_one_name_are_refused() -> None:
    module = model()
    names = dict.fromkeys(known(module), "w")
    with pytest.raises(StateError, match="opt/x: two parameters are named 'w'"):
        named_state(MAKERS["sgd"](module.parameters()), names, "opt/x")


def test_missing_slots_are_those_not_yet_made() -> None:
    module = model()
    optimizer = MAKERS["adamw"](module.parameters())
    names = [name for name, _ in missing_slots(optimizer, known(module), "o")]
    assert names == [name for name, _ in module.named_parameters()]
    train(module, optimizer, 1)
    assert list(missing_slots(optimizer, known(module), "o")) == []


def test_what_is_an_optimizer() -> None:
    module = model()

    class Mine(torch.optim.AdamW):
        pass

    class Optimizer:
        pass

    assert is_optimizer(Mine(module.parameters()))
    assert not is_optimizer(Optimizer())
    assert not is_optimizer(module)
    scheduler = torch.optim.lr_scheduler.StepLR(MAKERS["sgd"](module.parameters()), 1)
    assert not is_optimizer(scheduler)
