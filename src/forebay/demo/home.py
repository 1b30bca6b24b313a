"""The demo's directory: taken for one demo at a time, cleaned of an earlier one, never of more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from forebay.errors import BusyError, FullError, UsageError
from forebay.units import show_bytes

NEEDED_BYTES = 2_500_000_000
MARK = ".forebay-demo"
RUNS = ("reference", "killed")
RESTORES = {2: "restored-on-2", 1: "restored-on-1"}
_OURS = (
    "text.u8",
    "summary.json",
    "logs",
    "reference.safetensors",
    "s3",
    *RUNS,
    *RESTORES.values(),
)


@contextlib.contextmanager
def take_home(home: Path) -> Iterator[Path]:
    """The directory, ours alone while this lasts, and without what an earlier demo left in it."""
    if home.exists() and not home.is_dir():
        raise UsageError(f"demo: {home} is not a directory: give another one")
    if home.is_dir() and any(home.iterdir()) and not (home / MARK).exists():
        raise UsageError(f"demo: {home} holds files that are not a demo's: give another directory")
    try:
        home.mkdir(exist_ok=True)
        fd = os.open(home / MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"demo: cannot write in {home}: {error.strerror}") from None
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(f"demo: another demo runs in {home}: wait, or give another") from None
        for name in _OURS:
            path = home / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        free_bytes = shutil.disk_usage(home).free
        if free_bytes < NEEDED_BYTES:
            raise FullError(
                f"demo: {home} has {show_bytes(free_bytes)} free, expected "
                f"{show_bytes(NEEDED_BYTES)}: free some, or give another directory"
            )
        yield home
    finally:
        os.close(fd)


@contextlib.contextmanager
def exit_on_terminate() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that what was started is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
