"""What the system lets a job have: memory, shared and locked memory, open files, cores."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forebay.config import RUNTIME_VARIABLE, runtime_directory
from forebay.doctor.finding import Expected, Finding, Told, Verdict, compare
from forebay.plan.figure import Kind
from forebay.units import show_bytes

_HOP = "limits"
_FILES = 4096
"""Open files that suffice an agent: sockets of ranks and peers, parts in flight, mappings."""
_CGROUP_NONE = 2**60  # version 1 writes a huge number for no limit
_SHARED = Path("/dev/shm")  # noqa: S108 - where Linux has it
_THP = re.compile(r"\[(\w+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """As the system has them, in bytes and numbers; None: unlimited, or not there."""

    memlock_bytes: int | None
    open_files: int | None
    runtime: Path
    """Where the arenas lie, and what ``shared`` is the room of."""
    shared_bytes: int | None
    shared_free_bytes: int | None
    memory_bytes: int
    cgroup_bytes: int | None
    cores: int
    cores_online: int
    huge_shared: str
    """What the kernel does about huge pages in shared memory: never, advise ..., empty."""


def soft_limit(which: int) -> int | None:
    """The limit that holds for this process; None for none."""
    limit, _ = resource.getrlimit(which)
    return None if limit == resource.RLIM_INFINITY else limit


def read_limits(
    root: Path = Path("/"),
    limit_of: Callable[[int], int | None] = soft_limit,
    runtime: Path | None = None,
) -> Limits:
    """The limits of this process and machine; arenas lie in ``runtime``, the one in use for None.

    Raises nothing.
    """
    runtime = (runtime_directory() if runtime is None else runtime).absolute()
    usage = _usage(root, runtime)
    thp = _THP.search(_text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    return Limits(
        memlock_bytes=limit_of(resource.RLIMIT_MEMLOCK),
        runtime=runtime,
        open_files=limit_of(resource.RLIMIT_NOFILE),
        shared_bytes=None if usage is None else usage[0],
        shared_free_bytes=None if usage is None else usage[1],
        memory_bytes=_memory_bytes(root),
        cgroup_bytes=_cgroup_bytes(root),
        cores=len(os.sched_getaffinity(0)),
        cores_online=os.cpu_count() or 1,
        huge_shared="" if thp is None else thp[1],
    )


def judge(
    found: Limits, expected: Expected, *, arena_bytes: float | None, rdma: bool
) -> list[Finding]:
    """A line for each. ``arena_bytes``: the plan's arenas of a node; ``rdma``: a fabric is here."""
    return [
        _memory(found, expected),
        _shared(found, arena_bytes),
        _huge(found),
        _locked(found, arena_bytes if rdma else None),
        _limit(
            "open files",
            Kind.COUNT,
            found.open_files,
            float(_FILES),
            "assumed: sockets of ranks and peers, parts in flight",
            note="soft limit",
            advice=f"ulimit -n {_FILES} (LimitNOFILE= of the unit)",
        ),
        _cores(found),
    ]


def measure(
    expected: Expected, *, arena_bytes: float | None = None, rdma: bool = False, told: Told
) -> list[Finding]:
    """The limits here, judged."""
    told(_HOP)
    return judge(read_limits(), expected, arena_bytes=arena_bytes, rdma=rdma)


def _memory(found: Limits, expected: Expected) -> Finding:
    limit = found.cgroup_bytes
    limited = limit is not None and limit < found.memory_bytes
    usable = limit if limit is not None and limited else found.memory_bytes
    return compare(
        name="host memory",
        hop=_HOP,
        kind=Kind.BYTES,
        measured=float(usable),
        expected=expected,
        field="cluster.host_memory",
        note=f"a cgroup allows it of {show_bytes(found.memory_bytes)}" if limited else "all of it",
        advice="raise the container's memory limit, arenas count towards it"
        if limited
        else "see that every module is found (dmidecode -t memory), or plan with what is here",
    )


def _shared(found: Limits, arena_bytes: float | None) -> Finding:
    free = found.shared_free_bytes
    if free is None:
        return Finding(
            name="shared memory",
            hop=_HOP,
            kind=Kind.BYTES,
            verdict=Verdict.OFF,
            note=f"{_home(found.runtime)} is not there, or cannot be read",
            advice=f"mount a tmpfs on /dev/shm, or set {RUNTIME_VARIABLE} to one",
        )
    return _limit(
        "shared memory",
        Kind.BYTES,
        free,
        arena_bytes,
        "the plan's arenas of a node",
        note=f"free of {show_bytes(found.shared_bytes or 0)} in {_home(found.runtime)}; arenas lie "
        "there",
        advice="enlarge it (mount -o remount,size=... of that tmpfs; docker --shm-size; an "
        f"emptyDir of medium Memory), set {RUNTIME_VARIABLE} to a larger one, or take fewer slots",
    )


def _huge(found: Limits) -> Finding:
    return Finding(
        name="huge pages of shared memory",
        hop=_HOP,
        kind=Kind.TEXT,
        verdict=Verdict.MEASURED,
        note=f"{found.huge_shared or 'not known'}; advise or within_size make copies some 10 to "
        "20 % faster",
    )


def _locked(found: Limits, pinned_bytes: float | None) -> Finding:
    return _limit(
        "locked memory",
        Kind.BYTES,
        found.memlock_bytes,
        pinned_bytes,
        "the plan's arenas, registered with the fabric",
        note="soft limit; RDMA registers within it, CUDA pins past it",
        advice="ulimit -l unlimited (LimitMEMLOCK=infinity of the unit; --ulimit memlock=-1)",
    )


def _cores(found: Limits) -> Finding:
    few = found.cores < found.cores_online
    return Finding(
        name="cores",
        hop=_HOP,
        kind=Kind.COUNT,
        verdict=Verdict.MEASURED,
        measured=float(found.cores),
        note=f"of {found.cores_online}: this process is bound to them" if few else "all of them",
    )


def _limit(
    name: str,
    kind: Kind,
    have: int | None,
    need: float | None,
    source: str,
    *,
    note: str,
    advice: str,
) -> Finding:
    """A limit against what is needed; too low is off, since nothing runs slower: it fails."""
    if have is None:
        verdict, note = Verdict.GOOD, "no limit"
    elif need is None:
        verdict = Verdict.MEASURED
    else:
        verdict = Verdict.GOOD if have >= need else Verdict.OFF
    return Finding(
        name=name,
        hop=_HOP,
        kind=kind,
        verdict=verdict,
        measured=None if have is None else float(have),
        expected=None if have is None else need,
        source="" if need is None or have is None else source,
        note=note,
        advice=advice,
    )


def _home(runtime: Path) -> Path:
    """What a person knows the directory of the arenas by."""
    return _SHARED if runtime.is_relative_to(_SHARED) else runtime


def _usage(root: Path, runtime: Path) -> tuple[int, int] | None:
    """Bytes in all and free where ``runtime`` is or will be made; None where there is nothing."""
    for place in (runtime, *runtime.parents):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(root / place.relative_to("/"))
            return usage.total, usage.free
        if place == _SHARED:  # what is above it is no shared memory
            return None
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _memory_bytes(root: Path) -> int:
    total = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if total is not None:
        return int(total[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_bytes(root: Path) -> int | None:
    """The least memory limit above this process, of cgroups version 2 or 1; None for none."""
    base = root / "sys/fs/cgroup"
    found: list[int] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, leaf = (
            (base / "memory", "memory.limit_in_bytes") if controllers else (base, "memory.max")
        )
        place = top / own.strip().lstrip("/")
        for directory in (place, *place.parents):
            if not directory.is_relative_to(top):
                break
            text = _text(directory / leaf).strip()
            if text.isdigit() and int(text) < _CGROUP_NONE:
                found.append(int(text))
    return min(found, default=None)
