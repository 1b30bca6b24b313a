"""Host memory: what copies reach together, and what the first touch of a page costs."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forebay.doctor.finding import Expected, Finding, Told, Verdict, compare, failed
from forebay.plan.figure import Kind
from forebay.units import parse_bytes, show_bytes, show_rate

_HOP = "memory"
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap names it only from 3.14 on
_TOUCH_BYTES = 2**28
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
        rates = _copy_rates(size_bytes // 2, counts(cores), seconds)
    except MemoryError:
        note, advice = f"no {show_bytes(size_bytes)} to be had", "measure with a smaller --size"
        return [failed(_HOP, "host memory traffic", Kind.RATE, note, advice)]
    best = max(rates, key=lambda count: rates[count])
    listed = ", ".join(f"{count}: {show_rate(rate)}" for count, rate in rates.items())
    cache = last_level_cache_bytes()
    cached = cache * _BEYOND_CACHE > size_bytes
    note = f"{best} threads copying {show_bytes(size_bytes / 2)}, read and write"
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
    told(f"{_HOP}: first touch of fresh pages")
    return [traffic, copies, *_touches(min(_TOUCH_BYTES, size_bytes // 2), rates[1])]


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


def _copy_rates(nbytes: int, threads: list[int], seconds: float) -> dict[int, float]:
    """Bytes/s by number of threads, which share one pair of touched buffers of ``nbytes``."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    each = seconds / len(threads)
    return {count: _copy_rate(source, target, count, each) for count in threads}


def _copy_rate(source: Bytes, target: Bytes, threads: int, seconds: float) -> float:
    each = source.nbytes // threads
    copied = [0] * threads
    begin = threading.Barrier(threads + 1)
    stop = threading.Event()

    def work(number: int) -> None:
        part = slice(number * each, (number + 1) * each)
        begin.wait()
        while True:  # once at least, however short the time
            np.copyto(target[part], source[part])  # without the interpreter's lock
            copied[number] += each
            if stop.is_set():
                return

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
