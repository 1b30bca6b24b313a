"""A shuffled data loader that knows its position: torchdata's, or ours where that is missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from forebay.demo.text import Windows


class Loader(Protocol):
    """Batches of (inputs_BT, targets_BT), int64; its state says how far it is in which shuffle."""

    def __iter__(self) -> Iterator[list[Tensor]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def make_loader(windows: Windows, *, batch: int, seed: int) -> Loader:
    """Shuffles ``windows`` by ``seed`` and drops the last short batch."""
    try:
        torchdata = importlib.import_module("torchdata.stateful_dataloader")
    except ImportError:
        return ShuffledLoader(windows, batch=batch, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    loader: Loader = torchdata.StatefulDataLoader(
        windows, batch_size=batch, shuffle=True, drop_last=True, generator=generator
    )
    return loader


class ShuffledLoader:
    """One process, one shuffle an epoch; the state is the epoch and the batches taken of it."""

    def __init__(self, windows: Windows, *, batch: int, seed: int) -> None:
        self._windows = windows
        self._batch = batch
        self._seed = seed
        self._epoch = 0
        self._taken = 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * self._epoch)
        order = torch.randperm(len(self._windows), generator=generator).tolist()
        for at in range(self._taken * self._batch, len(order) - self._batch + 1, self._batch):
            self._taken += 1
            batch: list[Tensor] = default_collate(
                [self._windows[i] for i in order[at : at + self._batch]]
            )
            yield batch
        self._epoch, self._taken = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "taken": self._taken}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._epoch, self._taken = int(state_dict["epoch"]), int(state_dict["taken"])
