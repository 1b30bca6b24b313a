"""What the system lets a job have: locked memory, open files, shared memory, memory, cores."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forebay.doctor.finding import Expected, Finding, Verdict, compare
from forebay.plan.figure import Kind
from forebay.units import show_bytes

_HOP = "limits"
_FILES = 4096
"""Open files with room to spare: arenas and images of 8 ranks, parts in flight, NCCL's sockets."""

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """As the system has them, in bytes and numbers; None: unlimited, or not there."""

    memlock_bytes: int | None
    open_files: int | None
    shared_bytes: int | None
    shared_free_bytes: int | None
    memory_bytes: int
    cgroup_bytes: int | None
    cores: int
    cores_online: int


def read_limits(root: Path = Path("/")) -> Limits:
    """The limits of this process and machine."""
    shm = root / "dev" / "shm"
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    return Limits(
        memlock_bytes=_soft(resource.RLIMIT_MEMLOCK),
        open_files=_soft(resource.RLIMIT_NOFILE),
        shared_bytes=None if usage is None else usage.total,
        shared_free_bytes=None if usage is None else usage.free,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cgroup_bytes=_cgroup(root),
        cores=len(os.sched_getaffinity(0)),
        cores_online=os.cpu_count() or 1,
    )


def judge(
    found: Limits, expected: Expected, *, arena_bytes: float | None, pins: bool
) -> list[Finding]:
    """Findings of ``found``. ``arena_bytes``: the arenas of a node; ``pins``: a GPU is here."""
    rows = [
        _memory(found, expected),
        _shared(found, arena_bytes),
        _locked(found, arena_bytes, pins),
    ]
    files = found.open_files
    rows.append(
        _row(
            "open files",
            Kind.COUNT,
            None if files is None else float(files),
            None if files is None or files >= _FILES else _FILES,
            note="no limit" if files is None else "soft limit",
            advice=f"ulimit -n {_FILES} (LimitNOFILE= of the unit)",
        )
    )
    few = found.cores < found.cores_online
    rows.append(
        Finding(
            name="cores",
            hop=_HOP,
            kind=Kind.COUNT,
            verdict=Verdict.MEASURED,
            measured=float(found.cores),
            note=f"of {found.cores_online}: others are bound away" if few else "all of them",
        )
    )
    return rows


def measure(
    expected: Expected, *, arena_bytes: float | None = None, pins: bool = False, told: Told
) -> list[Finding]:
    """The limits here, judged."""
    told(_HOP)
    return judge(read_limits(), expected, arena_bytes=arena_bytes, pins=pins)


def _memory(found: Limits, expected: Expected) -> Finding:
    limited = found.cgroup_bytes is not None and found.cgroup_bytes < found.memory_bytes
    usable = found.cgroup_bytes if limited else found.memory_bytes
    return compare(
        name="host memory",
        hop=_HOP,
        kind=Kind.BYTES,
        measured=float(usable or 0),
        expected=expected,
        field="cluster.host_memory",
        note=f"a cgroup allows this of {show_bytes(found.memory_bytes)}"
        if limited
        else "all of it",
        advice="raise the container's memory limit: arenas count towards it"
        if limited
        else "plan with what is here",
    )


def _shared(found: Limits, arena_bytes: float | None) -> Finding:
    free = found.shared_free_bytes
    if free is None:
        return Finding(
            name="shared memory",
            hop=_HOP,
            kind=Kind.BYTES,
            verdict=Verdict.OFF,
            note="there is no shared memory",
            advice="mount a tmpfs on /dev/shm, or set FOREBAY_RUNTIME_DIR",
        )
    return _row(
        "shared memory",
        Kind.BYTES,
        float(free),
        None if arena_bytes is None or free >= arena_bytes else arena_bytes,
        note=f"free of {show_bytes(found.shared_bytes or 0)}; arenas lie there",
        advice="enlarge it (mount -o remount,size=..., docker --shm-size, an emptyDir of medium "
        "Memory), or take fewer slots",
    )


def _locked(found: Limits, arena_bytes: float | None, pins: bool) -> Finding:
    have = found.memlock_bytes
    need = arena_bytes if pins and have is not None and have < (arena_bytes or 2**63) else None
    if pins and have is not None and arena_bytes is None:
        need = None
    return _row(
        "locked memory",
        Kind.BYTES,
        None if have is None else float(have),
        need,
        note="no limit" if have is None else "soft limit; CUDA pins past it, RDMA does not",
        advice="ulimit -l unlimited (LimitMEMLOCK=infinity of the unit): RDMA needs it",
    )


def _row(
    name: str, kind: Kind, measured: float | None, short_of: float | None, *, note: str, advice: str
) -> Finding:
    """A limit: good, or off where it is short of what is needed."""
    short = short_of is not None
    return Finding(
        name=name,
        hop=_HOP,
        kind=kind,
        verdict=Verdict.OFF if short else Verdict.GOOD,
        measured=measured,
        expected=short_of,
        note=note,
        advice=advice if short else "",
    )


def _soft(which: int) -> int | None:
    limit, _ = resource.getrlimit(which)
    return None if limit == resource.RLIM_INFINITY else limit


def _cgroup(root: Path) -> int | None:
    """The memory limit of this process's cgroup, version 2 or 1; None for none."""
    own = ""
    try:
        for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = line[3:].strip().lstrip("/")
    except OSError:
        return None
    base = root / "sys" / "fs" / "cgroup"
    for path in (
        base / own / "memory.max",
        base / "memory.max",
        base / "memory" / "memory.limit_in_bytes",
    ):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:  # version 1 writes a huge number for none
            return int(text)
    return None
