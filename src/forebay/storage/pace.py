"""A token bucket: bytes leave no faster than a budget, bursts bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Lets ``bytes_per_s`` through, at most ``burst_bytes`` at once; None means no limit.

    Shared by threads. ``take`` returns once the bytes may go; larger amounts go into debt, so a
    part bigger than the burst waits once for all of it.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        burst_bytes: int = 4 * 2**20,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_s
        self._burst = float(burst_bytes)
        self._clock = clock
        self._sleep = sleep
        self._tokens = float(burst_bytes)
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
