"""A token bucket: bytes leave no faster than a budget, bursts bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from forebay.errors import UsageError

LARGEST_GRAIN_BYTES = 4 * 2**20
_SMALLEST_GRAIN_BYTES = 64 * 2**10
_PAGE_BYTES = 4096


def _grain(bytes_per_s: float | None) -> int:
    if bytes_per_s is None:
        return LARGEST_GRAIN_BYTES
    tenth = int(bytes_per_s / 10) // _PAGE_BYTES * _PAGE_BYTES
    return max(_SMALLEST_GRAIN_BYTES, min(LARGEST_GRAIN_BYTES, tenth))


class Pace:
    """Lets ``bytes_per_s`` through, at most a tenth of a second's worth at once; None is no limit.

    Shared by threads. ``take`` returns once the bytes may go; larger amounts go into debt. Writers
    take ``grain_bytes`` at a time, so that no window of a second sees a burst.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise UsageError(f"pace: expected more than 0 bytes per second, found {bytes_per_s}")
        self._rate = bytes_per_s
        self.grain_bytes = _grain(bytes_per_s)
        self._burst = float(self.grain_bytes)
        self._clock = clock
        self._sleep = sleep
        self._tokens = self._burst
        self._at = clock()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may go."""
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now
            self._tokens -= nbytes
            wait_s = max(0.0, -self._tokens / self._rate)
        if wait_s:
            self._sleep(wait_s)
