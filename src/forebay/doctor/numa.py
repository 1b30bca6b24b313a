"""NUMA nodes: which cores are near to which memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def node_cpus(allowed: set[int] | None = None, root: Path = Path("/")) -> list[set[int]]:
    """The CPUs of each NUMA node that this process may use, in the nodes' order.

    Nodes without any of them, as those of memory alone, are left out. ``allowed`` is for tests.
    """
    usable = os.sched_getaffinity(0) if allowed is None else allowed
    found: dict[int, set[int]] = {}
    for place in (root / "sys/devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            cpus = _cpus((place / "cpulist").read_text()) & usable
            if cpus:
                found[int(place.name.removeprefix("node"))] = cpus
    return [found[number] for number in sorted(found)]


def stay_near(number: int, nodes: list[set[int]]) -> None:
    """Bind the calling thread to a node, thread ``number`` of several to every node in turn.

    Nothing is done where there is one node alone.
    """
    if len(nodes) > 1:
        with contextlib.suppress(OSError):  # cores may have been taken away meanwhile
            os.sched_setaffinity(0, nodes[number % len(nodes)])


def _cpus(text: str) -> set[int]:
    """Of the kernel's list, as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
