"""A local disk: what it takes with and without the page cache, and what a flush costs."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from forebay.doctor.finding import Expected, Finding, Told, Verdict, compare, failed
from forebay.doctor.samples import summarize
from forebay.errors import UsageError
from forebay.plan.figure import Kind
from forebay.storage import direct, durable
from forebay.units import show_bytes

FILES = 8
"""Written side by side, as many as a node has ranks: one writer does not fill several disks."""

_HOP = "local disk"
_SMALL_BYTES = 4096
_MOST_FLUSHES = 200
_MOST_ROUNDS = 32
_SPARE = 2  # times the bytes that are written must be free
_VOLATILE = {"tmpfs", "ramfs", "devtmpfs"}
_LEFT_OVER_S = 86_400.0  # no visit lasts so long: whoever made it was killed
_OURS = re.compile(r"\.forebay-doctor-[0-9a-f]{12}")
_ESCAPE = re.compile(r"\\([0-7]{3})")
_ON_DISK = "give --local a directory on the node's own disks"
_SLOW = "see its health (nvme smart-log, smartctl), its PCIe link below, and what else writes to it"


def measure(
    directory: Path,
    expected: Expected,
    *,
    seconds: float = 1.0,
    size_bytes: int = 2**28,
    told: Told,
) -> list[Finding]:
    """Room, rates and flush of the filesystem of ``directory``, in ``size_bytes`` of files at once.

    Leaves nothing there, and removes what a visit that was killed left a day ago or longer. Raises
    UsageError where that is no directory; other trouble is a finding.
    """
    check(directory)
    clear_left_over(directory, told)
    block = direct.BLOCK_BYTES
    size_bytes = max(block, size_bytes // block * block)
    kind = filesystem_of(directory)
    room = shutil.disk_usage(directory)
    if not room.total:  # /proc, /sys and their like: views of the kernel
        note = f"{directory} is on {kind or 'a filesystem without a size'}, which is no disk"
        return [failed(_HOP, "write", Kind.RATE, note, _ON_DISK, "cluster.nvme")]
    found = [_room(room.total, room.free, kind, expected)]
    if room.free < _SPARE * size_bytes:
        note = f"{show_bytes(room.free)} free, {show_bytes(_SPARE * size_bytes)} needed"
        advice = "make room, or measure with a smaller --size"
        return [*found, failed(_HOP, "write", Kind.RATE, note, advice, "cluster.nvme")]
    try:
        with _workplace(directory) as place:
            disk = _Disk(place, kind, expected, seconds, told)
            found += disk.rates(size_bytes)
            found.append(disk.flush())
    except OSError as error:
        note = f"{directory}: {error.strerror or error}"
        advice = "allow writing there, or see the kernel's log for that disk"
        found.append(failed(_HOP, "write", Kind.RATE, note, advice, "cluster.nvme"))
    return found


def check(directory: Path) -> None:
    """Raises UsageError where ``directory`` is none."""
    if not directory.is_dir():
        raise UsageError(
            f"--local {directory}: expected a directory that is there: make it, or correct the path"
        )


def clear_left_over(directory: Path, told: Told) -> None:
    """Remove directories that visits killed over a day ago left in ``directory``. Raises nothing.

    One that is in use is younger: files come and go in it all the time.
    """
    before_s = time.time() - _LEFT_OVER_S
    with contextlib.suppress(OSError):
        for path in sorted(directory.iterdir()):
            if _OURS.fullmatch(path.name) is None:
                continue
            with contextlib.suppress(OSError):  # another may be removing it as well
                found = path.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_mtime < before_s:
                    shutil.rmtree(path)
                    told(f"{_HOP}: {path} of an earlier doctor, over a day old, removed")


def filesystem_of(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the filesystem that holds ``directory``, as ``ext4``; empty where not known."""
    path = directory.resolve()
    depth, found = -1, ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text().splitlines():
            _, point, kind, *_ = line.split(" ")
            mount = Path(_ESCAPE.sub(lambda seen: chr(int(seen[1], 8)), point))
            if path.is_relative_to(mount) and len(mount.parts) >= depth:  # a later one hides it
                depth, found = len(mount.parts), kind
    return found


class _Disk:
    """One filesystem, measured in files below ``place``."""

    def __init__(
        self, place: Path, kind: str, expected: Expected, seconds: float, told: Told
    ) -> None:
        self._place, self._kind, self._seconds, self._told = place, kind, seconds, told
        self._volatile = kind in _VOLATILE
        self._expected = {} if self._volatile else expected

    def rates(self, nbytes: int) -> list[Finding]:
        """Write and read past the page cache, and write through it: several files at once."""
        parts = _parts(nbytes)
        shown = f"{len(parts)} files of {show_bytes(parts[0].nbytes)}"
        paths = [self._place / f"part-{number}" for number in range(len(parts))]
        with ThreadPoolExecutor(len(parts), thread_name_prefix="disk") as pool:
            self._told(f"{_HOP}: {shown} at once, written with O_DIRECT")
            write = self._rate(pool, durable.write_new, paths, parts, remove=True)
            list(pool.map(durable.write_new, paths, parts))
            by_direct = _takes_direct(paths[0])
            self._told(f"{_HOP}: read back")
            read = self._rate(pool, _read, paths, parts, remove=False)
            for path in paths:
                path.unlink()
            self._told(f"{_HOP}: {shown} through the page cache, then flushed")
            cached = self._rate(pool, durable.write_cached, paths, parts, remove=True)
        return [
            self._write(write, shown, by_direct),
            self._line(
                "read, O_DIRECT",
                read,
                "cluster.nvme_read",
                f"{shown} read back at once"
                + ("" if by_direct else ", perhaps from the page cache"),
            ),
            Finding(
                name="write, page cache and fsync",
                hop=_HOP,
                kind=Kind.RATE,
                verdict=Verdict.MEASURED,
                measured=cached,
                note=f"O_DIRECT is {write / cached:.1f} times as fast",
            ),
        ]

    def _write(self, rate: float, shown: str, by_direct: bool) -> Finding:
        name, field = "write, O_DIRECT", "cluster.nvme"
        found = self._line(name, rate, field, f"{shown} at once, durable")
        if self._volatile:
            return replace(
                found,
                field="",
                verdict=Verdict.OFF,
                note=f"{self._kind} is memory: nothing survives a reboot",
                advice=_ON_DISK,
            )
        if not by_direct:
            return replace(
                found,
                verdict=Verdict.OFF,
                note=f"{self._kind} has no O_DIRECT: every byte goes through the page cache",
                advice="use ext4 or xfs for the local tier",
            )
        return found

    def _line(self, name: str, rate: float, field: str, note: str) -> Finding:
        return compare(
            name=name,
            hop=_HOP,
            kind=Kind.RATE,
            measured=rate,
            expected=self._expected,
            field="" if self._volatile else field,
            note=note,
            advice=_SLOW,
        )

    def _rate(
        self,
        pool: ThreadPoolExecutor,
        call: Callable[[Path, memoryview], None],
        paths: list[Path],
        parts: list[memoryview],
        *,
        remove: bool,
    ) -> float:
        """Bytes/s of ``call`` for all parts at once, again and again for the time given."""
        nbytes = sum(part.nbytes for part in parts)
        count, spent_s = 0, 0.0
        while not count or (spent_s < self._seconds and count < _MOST_ROUNDS):
            began_s = time.perf_counter()
            list(pool.map(call, paths, parts))
            spent_s += time.perf_counter() - began_s
            count += 1
            if remove:
                for path in paths:
                    path.unlink()
        return count * nbytes / max(spent_s, 1e-9)

    def flush(self) -> Finding:
        """Time of a small file made durable: what a record or a manifest costs."""
        self._told(f"{_HOP}: small files made durable")
        small = memoryview(secrets.token_bytes(_SMALL_BYTES))
        times_s: list[float] = []
        ends_s = time.perf_counter() + self._seconds
        path = self._place / "small"
        while not times_s or (time.perf_counter() < ends_s and len(times_s) < _MOST_FLUSHES):
            began_s = time.perf_counter()
            durable.write_new(path, small)
            times_s.append(time.perf_counter() - began_s)
            path.unlink()
        seen = summarize(times_s)
        return Finding(
            name="a small durable file",
            hop=_HOP,
            kind=Kind.SECONDS,
            verdict=Verdict.MEASURED,
            measured=seen.median_s,
            note=f"4 KiB written, flushed, linked, its directory flushed; {seen}",
        )


def _parts(nbytes: int) -> list[memoryview]:
    """Page-aligned images of ``nbytes`` together, of what no disk makes smaller."""
    block = direct.BLOCK_BYTES
    count = min(FILES, nbytes // block)
    each = nbytes // count // block * block
    image = memoryview(mmap.mmap(-1, count * each))
    noise = secrets.token_bytes(2**20)
    for at in range(0, image.nbytes, len(noise)):
        image[at : at + len(noise)] = noise
    return [image[number * each : (number + 1) * each] for number in range(count)]


def _takes_direct(path: Path) -> bool:
    """Whether the filesystem takes O_DIRECT and a transfer with it: some take the flag alone."""
    page = memoryview(mmap.mmap(-1, direct.ALIGN_BYTES))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return direct.switch(fd, True) and os.preadv(fd, [page], 0) == page.nbytes
    except OSError:
        return False
    finally:
        os.close(fd)


def _read(path: Path, into: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if direct.read_at(fd, 0, into) != into.nbytes:
            raise OSError(f"{path}: shorter than what was written")
    finally:
        os.close(fd)


def _room(total: int, free: int, kind: str, expected: Expected) -> Finding:
    return compare(
        name="room",
        hop=_HOP,
        kind=Kind.BYTES,
        measured=float(total),
        expected={} if kind in _VOLATILE else expected,
        field="" if kind in _VOLATILE else "cluster.nvme_capacity",
        note=f"{kind or 'filesystem not known'}, {show_bytes(free)} free",
        advice="mount the node's large disks there, or plan with less",
    )


@contextlib.contextmanager
def _workplace(directory: Path) -> Iterator[Path]:
    """A hidden directory of ours, removed whatever happens, and whenever a signal comes."""
    place = directory / f".forebay-doctor-{secrets.token_hex(6)}"
    try:
        place.mkdir(mode=0o700)
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
