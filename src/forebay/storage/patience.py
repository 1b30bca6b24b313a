"""How long a passing failure is put up with: jittered back-off under one deadline that moves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from forebay.errors import DeniedError, FullError, StoreError

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 20.0

_T = TypeVar("_T")


class Patience:
    """Waits between tries: each drawn below a bound that doubles (full jitter), until a deadline.

    Progress moves the deadline and starts the waits anew: what goes on, however slowly, is not
    given up; what stands still is, ``limit_s`` after it stood still, but not before ``least_tries``
    failed: one try may take that long alone. For one thread at a time.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        longest_s: float = LONGEST_WAIT_S,
        least_tries: int = 1,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.limit_s = limit_s
        self._longest_s = longest_s
        self._least_tries = least_tries
        self._clock = clock
        self._draw = draw
        self.progressed()

    def progressed(self) -> None:
        """Something came through."""
        self._deadline = self._clock() + self.limit_s
        self._bound_s = FIRST_WAIT_S
        self._failed = 0

    def next_wait_s(self) -> float | None:
        """How long to wait before the next try; None when the deadline has come."""
        self._failed += 1
        left_s = self._deadline - self._clock()
        if self._failed < self._least_tries:
            left_s = max(left_s, FIRST_WAIT_S)
        if left_s <= 0:
            return None
        wait_s = self._bound_s * (0.5 + 0.5 * self._draw())
        self._bound_s = min(2 * self._bound_s, self._longest_s)
        return min(wait_s, left_s)

    def again(self, call: Callable[[], _T], sleep: Callable[[float], None] = time.sleep) -> _T:
        """What ``call`` returns, called again after each failure that may pass by itself.

        A refusal and a full store do not. Raises what the last try raised.
        """
        while True:
            try:
                return call()
            except (DeniedError, FullError):
                raise
            except StoreError:
                wait_s = self.next_wait_s()
                if wait_s is None:
                    raise
                sleep(wait_s)
