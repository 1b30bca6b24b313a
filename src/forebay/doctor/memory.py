"""Host memory: what copies reach together, and what the first touch of a page costs."""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forebay.doctor.finding import Expected, Finding, Told, Verdict, compare
from forebay.doctor.numa import node_cpus, stay_near
from forebay.doctor.samples import spread
from forebay.doctor.starved import starved
from forebay.plan.figure import Kind
from forebay.units import parse_bytes, show_bytes, show_rate

_HOP = "memory"
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap names it only from 3.14 on
_TOUCH_BYTES = 2**28
_ROUNDS = 3
_BEYOND_CACHE = 4
"""Buffers this many times the last-level cache are copied from memory, not from the cache."""

Bytes = npt.NDArray[np.uint8]


def measure(
    expected: Expected, *, seconds: float = 1.0, size_bytes: int = 2**30, told: Told
) -> list[Finding]:
    """Copy rate with 1, 2, 4 ... threads, and first touch. Holds about ``size_bytes`` at once.

    For ``cluster.host_bandwidth`` stands the traffic of the best of them: a byte that is copied is
    read once and written once.
    """
    cores = len(os.sched_getaffinity(0))
    size_bytes = max(size_bytes, 2 * cores * mmap.PAGESIZE)
    told(f"{_HOP}: copies by 1 to {cores} threads")
    try:
        rounds = _copy_rates(size_bytes // 2, counts(cores), seconds)
    except (MemoryError, RuntimeError) as error:
        return [starved(_HOP, "host memory traffic", error)]
    rates = {count: statistics.median(seen) for count, seen in rounds.items()}
    best = max(rates, key=lambda count: rates[count])
    listed = ", ".join(f"{count}: {show_rate(rate)}" for count, rate in rates.items())
    cache = last_level_cache_bytes()
    cached = cache * _BEYOND_CACHE > size_bytes
    note = f"{best} threads copying {show_bytes(size_bytes / 2)}, read and write"
    note += f"; copies in {spread(rounds[best])}"
    if cached:
        note += f"; partly in the cache of {show_bytes(cache)}: take a larger --size"
    traffic = compare(
        name="host memory traffic",
        hop=_HOP,
        kind=Kind.RATE,
        measured=2 * rates[best],
        expected=expected,
        field="cluster.host_bandwidth",
        note=note,
        advice="see that every memory channel has its module (dmidecode -t memory) and that ranks "
        "are bound to the NUMA node of their GPU (numactl --hardware, nvidia-smi topo -m)",
    )
    copies = Finding(
        name="host copy",
        hop=_HOP,
        kind=Kind.RATE,
        verdict=Verdict.MEASURED,
        measured=rates[best],
        note=f"by threads: {listed}",
    )
    if cached:  # good enough to tell, not to plan with
        traffic = replace(traffic, field="")
    told(f"{_HOP}: first touch of fresh pages")
    try:
        touches = _touches(min(_TOUCH_BYTES, size_bytes // 2), rates[1])
    except (MemoryError, OSError):  # a mapping that is refused is an OSError
        touches = [starved(_HOP, "first touch", MemoryError())]
    return [traffic, copies, *touches]


def counts(cores: int) -> list[int]:
    """1, 2, 4 ... and the number of cores."""
    found = [1]
    while found[-1] * 2 <= cores:
        found.append(found[-1] * 2)
    return found if found[-1] == cores else [*found, cores]


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Bytes of all last-level caches together; 0 where the system does not say."""
    found: dict[str, int] = {}
    for index in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        with contextlib.suppress(OSError, ValueError):
            shared = (index / "shared_cpu_list").read_text().strip()
            kib = (index / "size").read_text().strip()
            found[shared] = parse_bytes(kib.replace("K", "KiB").replace("M", "MiB"))
    return sum(found.values())


def _copy_rates(nbytes: int, threads: list[int], seconds: float) -> dict[int, list[float]]:
    """Bytes/s of each round by number of threads, between buffers of ``nbytes``.

    Raises MemoryError, and RuntimeError where there is no further thread.
    """
    each = seconds / len(threads) / _ROUNDS
    return {count: _Copies(nbytes, count, node_cpus()).rates(each) for count in threads}


class _Copies:
    """Threads that copy, each a part of its own, which it touches first: on the node it runs on."""

    def __init__(self, nbytes: int, threads: int, nodes: list[set[int]]) -> None:
        self._source: Bytes = np.empty(nbytes, np.uint8)
        self._target: Bytes = np.empty(nbytes, np.uint8)
        self._each, self._threads, self._nodes = nbytes // threads, threads, nodes
        self._turn = threading.Barrier(threads + 1)
        self._stop = threading.Event()
        self._rates = [0.0] * threads
        self._errors: list[BaseException] = []

    def rates(self, seconds: float) -> list[float]:
        """Bytes/s of all threads together in each round of ``seconds``."""
        workers: list[threading.Thread] = []
        found = []
        try:
            for number in range(self._threads):
                worker = threading.Thread(target=self._run, args=(number,), name="copies")
                worker.start()
                workers.append(worker)
            self._turn.wait()  # every page has been touched
            for _ in range(_ROUNDS):
                self._stop.clear()
                self._turn.wait()
                time.sleep(seconds)
                self._stop.set()
                self._turn.wait()
                found.append(sum(self._rates))
        except threading.BrokenBarrierError:
            raise self._errors[0] from None
        finally:
            self._stop.set()
            self._turn.abort()  # nobody waits there any more, unless something went wrong
            for worker in workers:
                worker.join()
        return found

    def _run(self, number: int) -> None:
        try:
            stay_near(number, self._nodes)
            part = slice(number * self._each, (number + 1) * self._each)
            self._source[part], self._target[part] = 1, 0
            self._turn.wait()
            for _ in range(_ROUNDS):
                self._turn.wait()
                self._rates[number] = self._round(part)
                self._turn.wait()
        except threading.BrokenBarrierError:
            return
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self._errors.append(error)
            self._turn.abort()

    def _round(self, part: slice) -> float:
        """Bytes/s of one thread until it is stopped; one copy at least, however short the time."""
        began_s, copied = time.perf_counter(), 0
        while not copied or not self._stop.is_set():
            np.copyto(self._target[part], self._source[part])  # without the interpreter's lock
            copied += self._each
        return copied / max(time.perf_counter() - began_s, 1e-9)


def _touches(nbytes: int, warm_bytes_per_s: float) -> list[Finding]:
    """First touch by a copy, and by asking the kernel for the pages at once."""
    source = np.ones(nbytes, np.uint8)
    found = []
    for name, at_once in (("first touch by a copy", False), ("first touch by the kernel", True)):
        mapping = mmap.mmap(-1, nbytes)
        target: Bytes = np.frombuffer(mapping, np.uint8)
        how = "MADV_POPULATE_WRITE"
        try:
            began_s = time.perf_counter()
            if not at_once:
                np.copyto(target, source)
            elif not _populate(mapping):
                how = "a byte a page: the kernel has no MADV_POPULATE_WRITE"
                target[:: mmap.PAGESIZE] = 0
            rate = nbytes / (time.perf_counter() - began_s)
        finally:
            del target
            mapping.close()
        times = f"a warm copy is {warm_bytes_per_s / rate:.1f} times as fast"
        found.append(
            Finding(
                name=name,
                hop=_HOP,
                kind=Kind.RATE,
                verdict=Verdict.MEASURED,
                measured=rate,
                note=f"{how}; {times}" if at_once else times,
            )
        )
    return found


def _populate(mapping: mmap.mmap) -> bool:
    """Whether the kernel filled the mapping."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError:  # before Linux 5.14
        return False
    return True
