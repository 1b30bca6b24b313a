"""Threads and memory that the system does not give: a line that failed, and no fault of ours."""

from __future__ import annotations

from forebay.doctor.finding import Finding, failed
from forebay.plan.figure import Kind

NO_THREAD = "can't start new thread"
"""How the interpreter's RuntimeError begins when it gets no thread."""

ADVICE = (
    "raise the limits on processes (ulimit -u, pids.max of the cgroup, docker --pids-limit), on "
    "address space (ulimit -v) and on memory, or measure with a smaller --size and fewer --streams"
)


def is_starved(error: BaseException) -> bool:
    """Whether the system gave no thread, or no memory."""
    no_thread = isinstance(error, RuntimeError) and str(error).startswith(NO_THREAD)
    return no_thread or isinstance(error, MemoryError)


def starved(hop: str, name: str, error: BaseException) -> Finding:
    """A line that failed for want of threads or memory. Raises ``error`` where it is another."""
    if not is_starved(error):
        raise error
    note = "no memory to be had" if isinstance(error, MemoryError) else "no thread to be had"
    return failed(hop, name, Kind.RATE, note, ADVICE)
