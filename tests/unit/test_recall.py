"""A walk that remembers gives what a fresh walk gives, whatever happened in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import forebay
from forebay.capture.recall import Memory
from forebay.capture.walk import walk


class Tied(torch.nn.Module):
    """Two layers that share a weight, a buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(4, 4)
        self.two = torch.nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def make() -> dict[str, Any]:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "w": torch.ones(2), "step": forebay.value(1)}


def same(state: dict[str, Any], memory: Memory) -> None:
    """The remembering walk equals a fresh one, tensors included."""
    remembered, fresh = walk(state, 0, memory), walk(state, 0)
    assert remembered.common == fresh.common
    assert remembered.sign == fresh.sign
    assert remembered.slots_of == fresh.slots_of
    assert remembered.meshes == fresh.meshes
    for one, other in zip(remembered.leaves, fresh.leaves, strict=True):
        assert torch.equal(one.tensor, other.tensor), one.path
        assert one.tensor.data_ptr() == other.tensor.data_ptr(), one.path


def replace_parameter(state: dict[str, Any]) -> None:
    state["model"].one.bias = torch.nn.Parameter(torch.full((4,), 5.0))


def replace_data(state: dict[str, Any]) -> None:
    state["model"].one.bias.data = torch.full((4,), 6.0)


def untie(state: dict[str, Any]) -> None:
    state["model"].two.weight = torch.nn.Parameter(torch.zeros(4, 4))


def grow(state: dict[str, Any]) -> None:
    state["model"].three = torch.nn.Linear(2, 2)


def drop(state: dict[str, Any]) -> None:
    del state["model"].two


def replace_moment(state: dict[str, Any]) -> None:
    optimizer = state["optimizer"]
    parameter = state["model"].one.bias
    optimizer.state[parameter]["exp_avg"] = torch.full((4,), 7.0)


def load_optimizer(state: dict[str, Any]) -> None:
    state["optimizer"].load_state_dict(state["optimizer"].state_dict())


def add_group(state: dict[str, Any]) -> None:
    extra = torch.nn.Parameter(torch.ones(3))
    state["optimizer"].add_param_group({"params": [extra], "lr": 0.5})


def change_rate(state: dict[str, Any]) -> None:
    state["optimizer"].param_groups[0]["lr"] = 0.25


def clear_optimizer(state: dict[str, Any]) -> None:
    state["optimizer"].state.clear()


def replace_model(state: dict[str, Any]) -> None:
    state["model"] = Tied()


def remove_model(state: dict[str, Any]) -> None:
    del state["model"]


def tie_from_outside(state: dict[str, Any]) -> None:
    state["w"] = state["model"].one.weight.data


def replace_cache(state: dict[str, Any]) -> None:
    state["model"].cache = torch.ones(2)


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 4)).square().sum().backward()
    state["optimizer"].step()
    state["step"].value += 1


@pytest.mark.parametrize(
    "change",
    [
        *(replace_parameter, replace_data, untie, grow, drop, replace_moment, load_optimizer),
        *(add_group, change_rate, clear_optimizer, replace_model, remove_model),
        *(tie_from_outside, replace_cache, train),
    ],
)
def test_every_change_is_seen(change: Callable[[dict[str, Any]], None]) -> None:
    state, memory = make(), Memory()
    same(state, memory)
    same(state, memory)
    change(state)
    same(state, memory)
    same(state, memory)


def test_what_stays_is_not_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    state, memory = make(), Memory()
    walk(state, 0, memory)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("walked again")

    monkeypatch.setattr(torch.nn.Module, "_save_to_state_dict", refuse)
    train(state)
    change_rate(state)
    assert walk(state, 0, memory).leaves


def test_extra_state_is_read_every_time() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    model, memory = Counting(), Memory()
    first = walk({"m": model}, 0, memory).common
    model.count = 3
    assert walk({"m": model}, 0, memory).common != first
