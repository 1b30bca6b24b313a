"""What no input may do to a parser: another error than ours, much memory, much time, a file."""

from __future__ import annotations

import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forebay.errors import ForebayError

MOST_BYTES = 64 * 2**20
MOST_S = 20.0
OUTSIDE = ("open", "exec", "compile", "import", "subprocess.Popen", "ctypes.dlopen", "os.")
OUTSIDE += ("socket.connect", "socket.bind", "socket.getaddrinfo", "shutil.", "pty.")

_watched: int | None = None
_went_out: list[str] = []
_hooked = False


class ViolationError(AssertionError):
    """An input did what no input may."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched == threading.get_ident() and event.startswith(OUTSIDE):
        _went_out.append(f"{event} {str(arguments)[:80]}")


def _late(*_: object) -> None:
    raise ViolationError(f"not done in {MOST_S:g} s")


@contextmanager
def _timed() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(parse: Callable[[bytes], object], data: bytes, *, alarm: bool = True) -> str:
    """Parse what may be hostile: "" for what was taken, else the kind of our error.

    Raises ViolationError. Memory is measured where tracemalloc runs.
    """
    global _watched, _hooked
    if not _hooked:
        sys.addaudithook(_watch)
        _hooked = True
    _went_out.clear()
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    began_s = time.monotonic()
    outcome = ""
    _watched = threading.get_ident()
    try:
        if alarm:
            with _timed():
                parse(data)
        else:
            parse(data)
    except ForebayError as error:
        outcome = error.kind
        str(error).encode(errors="surrogatepass")
    except ViolationError:
        raise
    except BaseException as error:
        raise ViolationError(f"{type(error).__name__}: {str(error)[:200]}") from error
    finally:
        _watched = None
    if time.monotonic() - began_s > MOST_S:
        raise ViolationError(f"not done in {MOST_S:g} s")
    if tracemalloc.get_traced_memory()[1] - before > MOST_BYTES:
        peak = tracemalloc.get_traced_memory()[1] - before
        raise ViolationError(f"{peak} bytes taken for {len(data)}")
    if _went_out:
        raise ViolationError(f"went outside: {_went_out[:3]}")
    return outcome
