"""Device to host: what one GPU copies alone, and what each gets when all of the node copy."""

from __future__ import annotations

import importlib.util
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from forebay.doctor.finding import Expected, Finding, Verdict, compare
from forebay.doctor.samples import spread
from forebay.errors import DeadlineError
from forebay.plan.figure import Kind
from forebay.units import show_bytes, show_rate

TIMEOUT_S = 30.0
"""The deadline of one batch of copies."""

_HOP = "device to host"
_COPIES = 4  # queued at once on a stream: time between copies does not count
_MOST_BATCHES = 1000
_POLL_S = 0.0005
_ADVICE = (
    "see the link of the GPU (nvidia-smi -q: PCIe generation and width), bind each rank to the "
    "NUMA node of its GPU, and see what else uses memory"
)

Told = Callable[[str], None]


def measure(
    expected: Expected,
    *,
    seconds: float = 1.0,
    size_bytes: int = 2**28,
    told: Told,
    torch: Any = None,
    devices: Path = Path("/dev"),
) -> list[Finding]:
    """Copies to pinned and to pageable memory, a finding each; one that says so where no GPU is.

    ``size_bytes`` is what all GPUs together copy at a time, and as much host memory is taken.
    ``torch`` is given by tests; otherwise it is imported, where it and a GPU are there.
    Raises nothing: trouble is a finding.
    """
    if torch is None:
        if not any(devices.glob("nvidia[0-9]*")) and not (devices / "kfd").exists():
            return [_nothing("no accelerator here")]
        if importlib.util.find_spec("torch") is None:
            return [_nothing("torch is not installed here", "install forebay[torch]")]
        import torch
    try:
        count = int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    except RuntimeError as error:
        return [_failed("device", error)]
    if not count:
        text = f"torch {torch.__version__} sees no GPU though there is one"
        advice = "install a torch built for this driver; see nvidia-smi and CUDA_VISIBLE_DEVICES"
        return [
            Finding(
                name="device",
                hop=_HOP,
                kind=Kind.RATE,
                verdict=Verdict.FAILED,
                note=text,
                advice=advice,
            )
        ]
    bench = _Bench(torch, count, max(mmap.PAGESIZE, size_bytes // count), seconds)
    found = []
    lines: list[tuple[str, Callable[[str], Finding]]] = [
        ("one GPU to pinned", lambda name: bench.alone(name, expected if count == 1 else {}, True))
    ]
    if count > 1:
        lines.append((f"{count} GPUs to pinned", lambda name: bench.together(name, expected)))
    lines.append(("one GPU to pageable", lambda name: bench.alone(name, expected, False)))
    for name, line in lines:
        told(f"{_HOP}: {name} memory")
        try:
            found.append(line(name))
        except (RuntimeError, DeadlineError, OSError) as error:  # torch's own are RuntimeErrors
            found.append(_failed(name, error))
    return found


class _Bench:
    """The GPUs of this node and how long each is measured."""

    def __init__(self, torch: Any, count: int, nbytes: int, seconds: float) -> None:
        self._torch, self._cuda = torch, torch.cuda
        self._count, self._nbytes, self._seconds = count, nbytes, seconds

    def alone(self, name: str, expected: Expected, pinned: bool) -> Finding:
        """The first GPU by itself."""
        with self._lane(0, pinned) as lane:
            (rounds,) = self._run([lane])
        return self._finding(name, rounds, expected, pinned, "the others idle")

    def together(self, name: str, expected: Expected) -> Finding:
        """All GPUs at once; the slowest counts, since the pause ends with it."""
        lanes = [self._lane(number, True) for number in range(self._count)]
        entered: list[Any] = []
        try:
            for lane in lanes:
                entered.append(lane.__enter__())  # noqa: PERF401 - those entered are left
            lanes_rounds = self._run(entered)
        finally:
            for lane in reversed(lanes[: len(entered)]):
                lane.__exit__(None, None, None)
        slowest = min(lanes_rounds, key=harmonic_mean)
        fastest = max(map(harmonic_mean, lanes_rounds))
        note = f"slowest of {self._count}, fastest {show_rate(fastest)}"
        return self._finding(name, slowest, expected, True, note)

    def _finding(
        self, name: str, rounds: list[float], expected: Expected, pinned: bool, note: str
    ) -> Finding:
        return compare(
            name=name,
            hop=_HOP,
            kind=Kind.RATE,
            measured=harmonic_mean(rounds),  # of rounds of one size: all bytes by all the time
            expected=expected,
            field="cluster.d2h" if pinned else "cluster.d2h_pageable",
            note=f"{show_bytes(self._nbytes)} a copy, {note}; {spread(rounds)}",
            advice=_ADVICE,
        )

    @contextmanager
    def _lane(self, number: int, pinned: bool) -> Iterator[_Lane]:
        """Memory on both sides and a stream. Pinned as the arena is: registered, then let go."""
        torch, cuda = self._torch, self._cuda
        host = torch.frombuffer(mmap.mmap(-1, self._nbytes), dtype=torch.uint8)
        host.zero_()  # the first touch of a page is no part of a copy
        registered = False
        try:
            with cuda.device(number):
                if pinned:
                    code = int(cuda.cudart().cudaHostRegister(host.data_ptr(), self._nbytes, 0))
                    if code:
                        raise RuntimeError(
                            f"cudaHostRegister of {show_bytes(self._nbytes)}: CUDA error {code}: "
                            "saves would copy to pageable memory"
                        )
                    registered = True
                device = torch.zeros(self._nbytes, dtype=torch.uint8, device=f"cuda:{number}")
                cuda.synchronize(number)  # the side stream does not wait for the zeroes
                lane = _Lane(cuda, number, host, device, pinned)
            yield lane
        finally:
            if registered:
                try:
                    cuda.synchronize(number)
                finally:
                    cuda.cudart().cudaHostUnregister(host.data_ptr())

    def _run(self, lanes: list[_Lane]) -> list[list[float]]:
        """Bytes/s of each lane by round, all copying at the same time, for the time given."""
        self._batch(lanes, 1)
        rounds: list[list[float]] = [[] for _ in lanes]
        ends_s = time.monotonic() + self._seconds
        while not rounds[0] or (time.monotonic() < ends_s and len(rounds[0]) < _MOST_BATCHES):
            for rates, spent_s in zip(rounds, self._batch(lanes, _COPIES), strict=True):
                rates.append(_COPIES * self._nbytes / max(spent_s, 1e-9))
        return rounds

    def _batch(self, lanes: list[_Lane], copies: int) -> list[float]:
        """Seconds that so many copies take, of each lane."""
        for lane in lanes:
            lane.begin(copies)
        return [lane.wait_s() for lane in lanes]


class _Lane:
    """The copies of one GPU."""

    def __init__(self, cuda: Any, number: int, host: Any, device: Any, pinned: bool) -> None:
        self._cuda, self._number = cuda, number
        self._host, self._device, self._pinned = host, device, pinned
        self._stream = cuda.Stream(device=number)
        self._start = cuda.Event(enable_timing=True)
        self._end = cuda.Event(enable_timing=True)

    def begin(self, copies: int) -> None:
        """Queue copies between two events."""
        with self._cuda.device(self._number), self._cuda.stream(self._stream):
            self._start.record(self._stream)
            for _ in range(copies):
                self._host.copy_(self._device, non_blocking=self._pinned)
            self._end.record(self._stream)

    def wait_s(self) -> float:
        """Seconds between the events. Raises DeadlineError for a GPU that does not get there."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._end.query():
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"GPU {self._number}: copies not done within {TIMEOUT_S:g} s: see dmesg"
                )
            time.sleep(_POLL_S)
        return float(self._start.elapsed_time(self._end)) / 1e3


def _nothing(note: str, advice: str = "") -> Finding:
    return Finding(
        name="device", hop=_HOP, kind=Kind.RATE, verdict=Verdict.NONE, note=note, advice=advice
    )


def _failed(name: str, error: Exception) -> Finding:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return Finding(
        name=name,
        hop=_HOP,
        kind=Kind.RATE,
        verdict=Verdict.FAILED,
        note=lines[0],
        advice="see nvidia-smi and the kernel's log, free memory of the GPU and of the host (the "
        "container's memory limit), then measure again; CUDA pins past ulimit -l",
    )
