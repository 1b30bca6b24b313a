"""Small real filesystems: to be full, read-only or gone."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

UNMOUNTED_IN_S = 30.0


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A tmpfs of this size (``256k``, ``4m``), mounted at a path that is made for it."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(path)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if made.returncode:
        pytest.skip(f"mounting a small tmpfs is not permitted: {made.stderr.strip()}")
    try:
        yield path
    finally:
        unmount(path)


def unmount(path: Path) -> None:
    """Unmount, once the processes that used it are gone.

    The kernel takes a dying process's command line, by which the tests know it, before it closes
    its files: for some milliseconds the disk is busy with a process that nobody finds any more.
    """
    deadline = time.monotonic() + UNMOUNTED_IN_S
    while True:
        done = subprocess.run(["umount", str(path)], capture_output=True, text=True, check=False)
        if not done.returncode:
            return
        if "busy" not in done.stderr or time.monotonic() > deadline:
            pytest.fail(f"after {UNMOUNTED_IN_S:g} s still mounted: {done.stderr.strip()}")
        time.sleep(0.05)
