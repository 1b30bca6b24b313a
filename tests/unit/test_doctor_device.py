"""Copies off the GPU, with a made-up torch: the arithmetic, and what is let go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.doctor import device
from forebay.doctor.finding import Verdict
from forebay.plan.figure import Figure

MIB = 2**20


def silent(_: str) -> None:
    pass


class Event:
    """Says when it was recorded, on the stand-in's clock."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.at_s = cuda, 0.0

    def record(self, _: Any) -> None:
        self.at_s = self.cuda.clock_s[self.cuda.current]

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return (other.at_s - self.at_s) * 1e3


class Host:
    """Host memory that a GPU copies to."""

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self.cuda, self.nbytes = cuda, nbytes

    def zero_(self) -> None:
        pass

    def data_ptr(self) -> int:
        return id(self)

    def copy_(self, _: Any, *, non_blocking: bool) -> None:
        rates = self.cuda.rates if non_blocking else self.cuda.pageable
        self.cuda.clock_s[self.cuda.current] += self.nbytes / rates[self.cuda.current]


class Cuda:
    """As much of ``torch.cuda`` as the bench calls; each GPU copies at a rate of its own."""

    def __init__(self, rates: list[float], pageable: float = 8e9, refuse: int = 0) -> None:
        self.rates, self.pageable, self.refuse = rates, [pageable] * len(rates), refuse
        self.clock_s, self.current = [0.0] * len(rates), 0
        self.registered: set[int] = set()

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.rates)

    @contextlib.contextmanager
    def device(self, number: int) -> Iterator[None]:
        before, self.current = self.current, number
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def stream(self, _: Any) -> Iterator[None]:
        yield

    def synchronize(self, _: int) -> None:
        pass

    def Stream(self, device: int) -> int:  # noqa: N802 - torch's own name
        return device

    def Event(self, enable_timing: bool) -> Event:  # noqa: N802
        assert enable_timing
        return Event(self)

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert nbytes
        assert flags == 0
        if not self.refuse:
            self.registered.add(pointer)
        return self.refuse

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        self.registered.remove(pointer)
        return 0


class Torch:
    """As much of torch as the bench calls."""

    uint8 = "uint8"
    __version__ = "0.0"

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def frombuffer(self, buffer: Any, dtype: str) -> Host:
        return Host(self.cuda, len(buffer))

    def zeros(self, count: int, dtype: str, device: str) -> str:
        return device


def expect(d2h: float) -> dict[str, Figure]:
    return {"cluster.d2h": Figure(value=d2h, source="test")}


def test_without_an_accelerator_it_says_so(tmp_path: Path) -> None:
    (found,) = device.measure(expect(55e9), told=silent, devices=tmp_path)
    assert found.verdict is Verdict.NONE
    assert "no accelerator" in found.note


def test_without_torch_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    (found,) = device.measure(expect(55e9), told=silent, devices=tmp_path)
    assert found.verdict is Verdict.NONE
    assert "torch" in found.to_do


def test_a_torch_that_sees_no_gpu_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda([])
    (found,) = device.measure({}, told=silent, torch=Torch(cuda))
    assert found.verdict is Verdict.FAILED
    assert "sees no GPU" in found.note


def test_the_slowest_of_all_counts() -> None:
    cuda = Cuda([55e9, 55e9, 27.5e9, 55e9])
    told: list[str] = []
    found = device.measure(
        expect(55e9), seconds=0.01, size_bytes=8 * MIB, told=told.append, torch=Torch(cuda)
    )
    alone, together, pageable = found
    assert alone.measured == pytest.approx(55e9)
    assert alone.expected is None
    assert together.measured == pytest.approx(27.5e9)
    assert together.verdict is Verdict.SLOW
    assert together.field == "cluster.d2h"
    assert pageable.measured == pytest.approx(8e9)
    assert pageable.field == "cluster.d2h_pageable"
    assert "noisy" not in together.note
    assert len(told) == 3
    assert cuda.registered == set()


def test_one_gpu_alone_is_the_nodes_figure() -> None:
    cuda = Cuda([50e9])
    found = device.measure(
        expect(55e9), seconds=0.01, size_bytes=MIB, told=silent, torch=Torch(cuda)
    )
    assert [each.name for each in found] == ["one GPU to pinned", "one GPU to pageable"]
    assert found[0].verdict is Verdict.GOOD


def test_memory_that_cannot_be_pinned() -> None:
    cuda = Cuda([50e9, 50e9], refuse=2)
    found = device.measure(
        expect(55e9), seconds=0.01, size_bytes=MIB, told=silent, torch=Torch(cuda)
    )
    assert [each.verdict.value for each in found] == ["failed", "failed", "measured"]
    assert "cudaHostRegister" in found[0].note
    assert cuda.registered == set()
    assert "memlock" not in found[0].note
    assert "CUDA pins past ulimit -l" in found[0].to_do


def test_rounds_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([[0.5], [0.001], [0.002], [0.001]])
    monkeypatch.setattr(device._Bench, "_batch", lambda *_: next(seen))  # the first warms up
    monkeypatch.setattr(device, "_MOST_BATCHES", 3)
    bench = device._Bench(Torch(Cuda([1e9])), 1, 10**6, 60.0)
    found = bench.alone("one GPU to pinned", {}, True)
    assert found.measured == pytest.approx(3 * 4e6 / 0.004)
    assert "noisy, 3 rounds of 2 GB/s to 4 GB/s" in found.note
