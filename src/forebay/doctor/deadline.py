"""Calls that may hang, with a deadline: a store that stands still holds up no other line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from forebay.doctor.starved import ADVICE, is_starved
from forebay.errors import DeadlineError
from forebay.units import show_seconds

_T = TypeVar("_T")


class _Call(Generic[_T]):
    """One call in a thread of its own, a daemon: one that hangs does not keep the process alive."""

    def __init__(self, call: Callable[[], _T], late: Callable[[], object] | None) -> None:
        self.result: _T
        self.error: BaseException | None = None
        self._call, self._late = call, late
        self._given_up = False
        self._lock = threading.Lock()
        self.ended = threading.Event()
        threading.Thread(target=self._run, name="doctor", daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self.error = error
        with self._lock:
            self.ended.set()
            late = self._late if self._given_up else None
        if late is not None:
            late()

    def give_up(self) -> None:
        """Nobody waits any more: should it end after all, what it made is taken away."""
        with self._lock:
            self._given_up = not self.ended.is_set()


def side_by_side(
    calls: Sequence[Callable[[], _T]],
    *,
    timeout_s: float,
    what: str,
    late: Callable[[], object] | None = None,
) -> list[_T]:
    """What every call returns, each in a thread of its own, all begun at once.

    ``late`` is called, by its thread, for each call that ends after nobody waited for it any more.
    Raises what the first that failed raised, DeadlineError that names ``what``, or RuntimeError
    where the system gives no further thread.
    """
    started: list[_Call[_T]] = []
    try:
        for call in calls:
            started.append(_Call(call, late))  # noqa: PERF401 - those begun are given up in the end
    except BaseException as error:
        for one in started:
            one.give_up()
        if is_starved(error):
            raise RuntimeError(f"{error}: {ADVICE}") from None
        raise
    return _results(started, timeout_s, what)


def _results(started: Sequence[_Call[_T]], timeout_s: float, what: str) -> list[_T]:
    deadline_s = time.monotonic() + timeout_s
    try:
        for one in started:
            if not one.ended.wait(max(0.0, deadline_s - time.monotonic())):
                raise DeadlineError(f"{what}: no answer within {show_seconds(timeout_s)}")
    finally:
        for one in started:
            one.give_up()
    for one in started:
        if one.error is not None:
            raise one.error
    return [one.result for one in started]


def within(
    call: Callable[[], _T],
    *,
    timeout_s: float,
    what: str,
    late: Callable[[], object] | None = None,
) -> _T:
    """What ``call`` returns. Raises as ``side_by_side``.

    Where there is no further thread it is called in this one, without a deadline: what was written
    has to be taken away all the same.
    """
    try:
        one = _Call(call, late)
    except RuntimeError as error:
        if not is_starved(error):
            raise
        return call()
    return _results([one], timeout_s, what)[0]
