"""Memory for wants: each its own, few mappings however many there are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forebay.restore.buffers import SMALL_BYTES, Buffers


def test_many_small_ones_share_mappings() -> None:
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before, buffers = mappings(), Buffers()
    taken = [buffers.take(number % 100) for number in range(100_000)]
    for number, view in enumerate(taken):
        view[:] = bytes([number % 251]) * view.nbytes
    assert all(bytes(v) == bytes([n % 251]) * (n % 100) for n, v in enumerate(taken))
    assert mappings() < before + 100


def test_places_fit_what_is_read_into_them() -> None:
    buffers = Buffers()
    for nbytes, align in ((1, 64), (5, 64), (SMALL_BYTES - 1, 64), (SMALL_BYTES, 4096), (0, 1)):
        view = buffers.take(nbytes)
        assert (view.nbytes, view.readonly) == (nbytes, False)
        if nbytes:
            assert np.frombuffer(view, dtype=np.uint8).ctypes.data % align == 0
