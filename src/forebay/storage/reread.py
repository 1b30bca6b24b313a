"""A small object, read and checked; read anew before what was wrong on the way is called damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from forebay.errors import DamagedError
from forebay.storage.store import Store
from forebay.watch.events import emit

TRIES = 4

_T = TypeVar("_T")


def read_checked(store: Store, key: str, max_bytes: int, check: Callable[[bytes], _T]) -> _T:
    """What ``check`` makes of the object's bytes. Raises as ``get``, and as ``check`` did last."""
    return reread(lambda: check(store.get(key, max_bytes=max_bytes)))


def reread(read: Callable[[], _T]) -> _T:
    """What ``read`` returns, which reads and checks. Raises as it did last.

    A transfer may go wrong where the object is right: only what is found damaged each time is
    damaged.
    """
    for left in reversed(range(TRIES)):
        try:
            return read()
        except DamagedError as error:
            if not left:
                raise
            emit("store.reread", level=30, why=error)
    raise AssertionError
