"""Host memory: what copies reach together, and what the first touch of a page costs."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from forebay.doctor.finding import Expected, Finding, Verdict, compare
from forebay.plan.figure import Kind
from forebay.units import show_bytes, show_rate

_HOP = "memory"
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap names it only from 3.14 on
_MOST_BYTES = 2**28  # a buffer a thread: far above a last-level cache

Told = Callable[[str], None]
Bytes = npt.NDArray[np.uint8]


def measure(
    expected: Expected, *, seconds: float = 1.0, size_bytes: int = 2**30, told: Told
) -> list[Finding]:
    """Copy rate with 1, 2, 4 ... threads, and first touch. Holds at most ``size_bytes`` at once.

    The best copy rate stands for ``cluster.host_bandwidth``: bytes copied, each read and written.
    """
    cores = len(os.sched_getaffinity(0))
    each = min(_MOST_BYTES, max(2**20, size_bytes // (2 * cores)))
    told(f"{_HOP}: copies by 1 to {cores} threads")
    rates = {count: _copy_rate(count, each, seconds / 2) for count in _counts(cores)}
    best = max(rates, key=lambda count: rates[count])
    listed = ", ".join(f"{count}: {show_rate(rate)}" for count, rate in rates.items())
    copies = compare(
        name="host copy",
        hop=_HOP,
        kind=Kind.RATE,
        measured=rates[best],
        expected=expected,
        field="cluster.host_bandwidth",
        note=f"best with {best} threads, {show_bytes(each)} each ({listed})",
        advice="check that every memory channel has its module and that ranks are bound to their "
        "own NUMA node (numactl --hardware)",
    )
    told(f"{_HOP}: first touch of fresh pages")
    return [copies, *_touches(min(_MOST_BYTES, size_bytes // 2), rates[1])]


def _counts(cores: int) -> list[int]:
    """1, 2, 4 ... and the number of cores."""
    found = [1]
    while found[-1] * 2 <= cores:
        found.append(found[-1] * 2)
    return found if found[-1] == cores else [*found, cores]


def _copy_rate(threads: int, nbytes: int, seconds: float) -> float:
    """Bytes/s that so many threads copy together between touched buffers of their own."""
    pairs = [(np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)) for _ in range(threads)]
    copied = [0] * threads
    begin = threading.Barrier(threads + 1)
    stop = threading.Event()

    def work(number: int) -> None:
        source, target = pairs[number]
        begin.wait()
        while not stop.is_set():
            np.copyto(target, source)  # without the interpreter's lock
            copied[number] += nbytes

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    begin.wait()
    began_s = time.perf_counter()
    try:
        time.sleep(seconds)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    return sum(copied) / (time.perf_counter() - began_s)


def _touches(nbytes: int, warm_bytes_per_s: float) -> list[Finding]:
    """First touch by a copy, and by asking the kernel for the pages at once."""
    source = np.ones(nbytes, np.uint8)
    found = []
    for name, populate in (("first touch by a copy", False), ("pages filled at once", True)):
        mapping = mmap.mmap(-1, nbytes)
        target: Bytes = np.frombuffer(mapping, np.uint8)
        try:
            began_s = time.perf_counter()
            if populate:
                _populate(mapping, target)
            else:
                np.copyto(target, source)
            rate = nbytes / (time.perf_counter() - began_s)
        finally:
            del target
            mapping.close()
        found.append(
            Finding(
                name=name,
                hop=_HOP,
                kind=Kind.RATE,
                verdict=Verdict.MEASURED,
                measured=rate,
                note=f"a warm copy is {warm_bytes_per_s / rate:.1f} times as fast: Forebay touches "
                "its arenas before the first step",
            )
        )
    return found


def _populate(mapping: mmap.mmap, target: Bytes) -> None:
    done = False
    with contextlib.suppress(OSError):  # a kernel before 5.14
        mapping.madvise(_MADV_POPULATE_WRITE)
        done = True
    if not done:
        target[:: mmap.PAGESIZE] = 0
