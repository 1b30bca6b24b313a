"""A local disk: what it takes with and without the page cache, and what a flush costs."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from forebay.doctor.finding import Expected, Finding, Verdict, compare
from forebay.doctor.samples import summarize
from forebay.errors import UsageError
from forebay.plan.figure import Kind
from forebay.storage import direct, durable
from forebay.units import show_bytes

_HOP = "local disk"
_SMALL_BYTES = 4096
_MOST_FLUSHES = 100
WRITERS = 4
"""Files at once: one alone leaves a set of several drives idle in turns."""
_SPARE = 2  # times the bytes that are written must be free

Told = Callable[[str], None]


def measure(
    directory: Path,
    expected: Expected,
    *,
    seconds: float = 1.0,
    size_bytes: int = 2**28,
    told: Told,
) -> list[Finding]:
    """Rates, flush and room of the filesystem of ``directory``. Leaves nothing there.

    A rate is of ``size_bytes`` that are durable at its end. Raises UsageError where the directory
    is not one; other trouble is a finding.
    """
    if not directory.is_dir():
        raise UsageError(f"--local {directory}: expected a directory that is there")
    grain = WRITERS * direct.BLOCK_BYTES
    size_bytes = max(grain, size_bytes // grain * grain)
    room = shutil.disk_usage(directory)
    kind = filesystem_of(directory)
    found = [_room(room.total, room.free, kind, expected)]
    if room.free < _SPARE * size_bytes:
        note = f"{show_bytes(room.free)} free, {show_bytes(_SPARE * size_bytes)} needed"
        return [*found, _failed("write", note, "make room, or measure with a smaller --size")]
    image = memoryview(mmap.mmap(-1, size_bytes))
    block = os.urandom(2**20)  # neither zeros nor one repeated page: some disks compress
    for at in range(0, size_bytes, len(block)):
        image[at : at + len(block)] = block
    with _workplace(directory) as place:
        try:
            found += _rates(place, image, kind, expected, told)
            found.append(_flushes(place, seconds, told))
        except OSError as error:
            found.append(
                _failed("write", f"{place.parent}: {error.strerror}", "see the kernel's log")
            )
    return found


def filesystem_of(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the filesystem that holds ``directory``, as ``ext4``; empty where not known."""
    path = str(directory.resolve())
    best, found = -1, ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text().splitlines():
            _, point, kind, *_ = line.split(" ")
            point = point.replace("\\040", " ")
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= best:
                best, found = len(point), kind
    return found


def _rates(
    place: Path, image: memoryview, kind: str, expected: Expected, told: Told
) -> list[Finding]:
    nbytes = image.nbytes
    told(f"{_HOP}: {show_bytes(nbytes)} with O_DIRECT")
    each = nbytes // WRITERS // direct.BLOCK_BYTES * direct.BLOCK_BYTES
    paths = [place / f"direct-{number}" for number in range(WRITERS)]
    parts = [image[number * each : (number + 1) * each] for number in range(WRITERS)]
    path = paths[0]
    with ThreadPoolExecutor(WRITERS) as writers:
        write = _rate_of(writers, durable.write_new, paths, parts)
    with path.open("rb", buffering=0) as file:
        by_direct = direct.switch(file.fileno(), True)
    told(f"{_HOP}: the same read back")
    with ThreadPoolExecutor(WRITERS) as readers:
        read = _rate_of(readers, _read, paths, parts)
    for path in paths:
        path.unlink()
    told(f"{_HOP}: {show_bytes(nbytes)} through the page cache, then flushed")
    buffered = _buffered_rate(place / "buffered", image)
    note = (
        f"{WRITERS} files at once, flushed"
        if by_direct
        else f"{kind} has no O_DIRECT: through the page cache"
    )
    volatile = kind in ("tmpfs", "ramfs")
    if volatile:
        note = f"{kind}: memory, no disk; nothing survives a reboot"
    advice = "see its health (smartctl, nvme smart-log), its PCIe link, and what else writes to it"
    first = compare(
        name="write, O_DIRECT",
        hop=_HOP,
        kind=Kind.RATE,
        measured=write,
        expected=expected,
        field="cluster.nvme",
        note=note,
        advice=advice,
    )
    if volatile:
        first = _failed("write, O_DIRECT", note, "give --local a directory on the node's own disk")
    elif not by_direct:
        first = _off(first, "use ext4 or xfs for the local tier: every byte goes through the cache")
    return [
        first,
        compare(
            name="read, O_DIRECT",
            hop=_HOP,
            kind=Kind.RATE,
            measured=read,
            expected={} if volatile else expected,
            field="" if volatile else "cluster.nvme_read",
            note="read back" if by_direct else "read back, perhaps from the page cache",
            advice=advice,
        ),
        Finding(
            name="write, page cache and fsync",
            hop=_HOP,
            kind=Kind.RATE,
            verdict=Verdict.MEASURED,
            measured=buffered,
            note=f"O_DIRECT is {write / buffered:.1f} times as fast",
        ),
    ]


def _off(found: Finding, advice: str) -> Finding:
    return replace(found, verdict=Verdict.OFF, advice=advice)


def _rate_of(
    pool: ThreadPoolExecutor,
    work: Callable[[Path, memoryview], None],
    paths: list[Path],
    parts: list[memoryview],
) -> float:
    """Bytes/s of all files together, from the first to the last."""
    began_s = time.perf_counter()
    list(pool.map(work, paths, parts))
    return sum(part.nbytes for part in parts) / (time.perf_counter() - began_s)


def _read(path: Path, into: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        direct.read_at(fd, 0, into)
    finally:
        os.close(fd)


def _buffered_rate(path: Path, image: memoryview) -> float:
    began_s = time.perf_counter()
    durable.write_cached(path, image)
    return image.nbytes / (time.perf_counter() - began_s)


def _flushes(place: Path, seconds: float, told: Told) -> Finding:
    """Time of a small file made durable: what a record or a manifest costs."""
    told(f"{_HOP}: small files made durable")
    small = memoryview(os.urandom(_SMALL_BYTES))
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while not times or (time.perf_counter() < end_s and len(times) < _MOST_FLUSHES):
        path = place / f"small-{len(times)}"
        began_s = time.perf_counter()
        durable.write_new(path, small)
        times.append(time.perf_counter() - began_s)
        path.unlink()
    found = summarize(times)
    return Finding(
        name="a small durable file",
        hop=_HOP,
        kind=Kind.SECONDS,
        verdict=Verdict.MEASURED,
        measured=found.median_s,
        note=f"written, flushed, linked, its directory flushed; {found}",
    )


def _room(total: int, free: int, kind: str, expected: Expected) -> Finding:
    return compare(
        name="room",
        hop=_HOP,
        kind=Kind.BYTES,
        measured=float(total),
        expected=expected,
        field="cluster.nvme_capacity",
        note=f"{kind or 'filesystem'}, {show_bytes(free)} free",
        advice="mount the node's large disks there, or plan with less",
    )


def _failed(name: str, note: str, advice: str) -> Finding:
    return Finding(
        name=name, hop=_HOP, kind=Kind.RATE, verdict=Verdict.FAILED, note=note, advice=advice
    )


@contextlib.contextmanager
def _workplace(directory: Path) -> Iterator[Path]:
    """A hidden directory of ours, removed whatever happens."""
    place = directory / f".forebay-doctor-{secrets.token_hex(6)}"
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
