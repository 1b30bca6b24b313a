"""What a node may ask of a store: bytes and requests a second, less while the store pushes back.

Two token buckets with bounded bursts, and a share of both that is halved when the store throttles
or grows slow (503, 429, SlowDown, late replies) and comes back a little every second: additive
increase, multiplicative decrease (Chiu and Jain, 1989, who show that it alone shares fairly).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable

from forebay.errors import UsageError

LARGEST_GRAIN_BYTES = 4 * 2**20
_SMALLEST_GRAIN_BYTES = 4 * 2**10
_PAGE_BYTES = 4096
_BURST_S = 1 / 100  # any window of a second sees at most 1 % above the budget

LEAST_SHARE = 1 / 16
_DECREASE = 0.5
_INCREASE_PER_S = 0.05
_EVENT_S = 1.0  # what many requests are told within a second is one event
_LATE_FACTOR, _LATE_S = 8.0, 1.0
_USUAL_WEIGHT = 0.1


class Bucket:
    """Tokens that come at ``rate`` a second, at most ``burst`` kept. Not locked."""

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self.rate = rate
        self._burst = burst
        self._tokens = burst
        self._at_s = now_s

    def take(self, count: float, now_s: float, share: float) -> float:
        """Take tokens, into debt if need be; how many seconds to wait until the debt is paid."""
        rate = self.rate * share
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * rate) - count
        self._at_s = now_s
        return max(0.0, -self._tokens / rate)


class Share:
    """How much of its budget a node uses now: 1.0 while the store is well. Not locked."""

    def __init__(self, now_s: float) -> None:
        self._value = 1.0
        self._at_s = now_s
        self._event_s = now_s - _EVENT_S
        self._usual_s: float | None = None

    def at(self, now_s: float) -> float:
        """The share at a moment: it grows while nothing happens."""
        grown = self._value + (now_s - self._at_s) * _INCREASE_PER_S
        self._value, self._at_s = min(1.0, grown), now_s
        return self._value

    def pushed_back(self, now_s: float) -> bool:
        """The store asks for less; True when that is news."""
        if now_s - self._event_s < _EVENT_S:
            return False
        self._value = max(LEAST_SHARE, self.at(now_s) * _DECREASE)
        self._event_s = now_s
        return True

    def replied(self, seconds: float, now_s: float) -> bool:
        """A request took this long from its last byte on; True when that was a push back."""
        usual_s = seconds if self._usual_s is None else self._usual_s
        late = seconds > max(_LATE_S, _LATE_FACTOR * usual_s)
        self._usual_s = usual_s + _USUAL_WEIGHT * (min(seconds, 2 * usual_s) - usual_s)
        return late and self.pushed_back(now_s)


class Pace:
    """The budget of one node towards one store. Shared by threads.

    ``bytes_per_s`` and ``requests_per_s`` None mean no limit; the share then only bounds how many
    requests run side by side.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        requests_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        for what, rate in (("bytes", bytes_per_s), ("requests", requests_per_s)):
            if rate is not None and not rate > 0:
                raise UsageError(f"pace: expected more than 0 {what} per second, found {rate}")
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        now_s = clock()
        self.grain_bytes = _grain(bytes_per_s)
        """How much a writer takes at a time, so that no window of a second sees a burst."""
        self._bytes = bytes_per_s and Bucket(bytes_per_s, self.grain_bytes, now_s)
        self._requests = requests_per_s and Bucket(
            requests_per_s, max(1.0, requests_per_s * _BURST_S), now_s
        )
        self._share = Share(now_s)

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may go; more than the grain goes into debt."""
        self._take(self._bytes, nbytes)

    def ask(self) -> None:
        """Wait until one more request may go."""
        self._take(self._requests, 1)

    def _take(self, bucket: Bucket | float | None, count: int) -> None:
        if not isinstance(bucket, Bucket):
            return
        with self._lock:
            now_s = self._clock()
            wait_s = bucket.take(count, now_s, self._share.at(now_s))
        if wait_s:
            self._sleep(wait_s)

    @property
    def share(self) -> float:
        """How much of the budget is used now: 1.0 while the store is well, at least 1/16."""
        with self._lock:
            return self._share.at(self._clock())

    @property
    def bytes_per_s(self) -> float | None:
        """What bytes may leave at now, or None."""
        return self._bytes.rate * self.share if isinstance(self._bytes, Bucket) else None

    def lanes(self, limit: int) -> int:
        """How many of ``limit`` requests may run side by side now: at least one."""
        return max(1, round(limit * self.share))

    def pushed_back(self) -> bool:
        """The store throttled: go on with half. True when nobody had said so just now."""
        with self._lock:
            return self._share.pushed_back(self._clock())

    def replied(self, seconds: float) -> bool:
        """A request was answered ``seconds`` after its last byte; a late answer is a push back."""
        with self._lock:
            return self._share.replied(seconds, self._clock())


def _grain(bytes_per_s: float | None) -> int:
    if bytes_per_s is None:
        return LARGEST_GRAIN_BYTES
    pages = int(bytes_per_s * _BURST_S) // _PAGE_BYTES * _PAGE_BYTES
    return max(_SMALLEST_GRAIN_BYTES, min(LARGEST_GRAIN_BYTES, pages))


def start_delay_s(name: str, window_s: float) -> float:
    """When within a window a node begins: by a hash of its name, the same at every checkpoint.

    2,048 nodes in a window of 10 s begin 205 a second, whatever order they are named in.
    """
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return window_s * number / 2**64
