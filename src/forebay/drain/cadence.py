"""Which snapshots go to the durable tier, where ``durable_every`` is a time: decided once a job.

Clocks of ranks differ, and a step of which one node kept its part near is no checkpoint. So node 0
decides by its own clock and writes the word into the run; the other nodes read it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from forebay.errors import DeadlineError, FormatError, NotFoundError
from forebay.format import names
from forebay.storage.store import CreateOutcome, Store

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_MAX_BYTES = 4096
_KEPT = 8


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What node 0 decided of a snapshot that was staged at ``staged_s`` (Unix time)."""

    durable: bool
    staged_s: float


class Cadence:
    """Decides, or asks. Called from one thread at a time.

    ``every_s`` None leaves the decision to the ranks: every snapshot here is for the durable tier.
    """

    def __init__(
        self,
        store: Store,
        *,
        node: int,
        every_s: float | None,
        limit_s: float,
        nap: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._node = node
        self._every_s = every_s
        self._limit_s = limit_s
        self._nap = nap
        self._clock = clock
        self._last_s: float | None = None
        self._said: list[str] = []

    def durable(self, step: int, attempt: str, staged_s: float, nodes: int) -> bool:
        """Whether this snapshot goes to the durable tier; the same on every node.

        Raises DeadlineError when node 0 says nothing, StoreError when it cannot be asked.
        """
        if self._every_s is None:
            return True
        key = names.cadence_key(step, attempt)
        word = self._decide(key, staged_s, nodes) if self._node == 0 else self._ask(key, step)
        return word.durable

    def _decide(self, key: str, staged_s: float, nodes: int) -> Word:
        """Say the word, or repeat what an agent before this one said."""
        assert self._every_s is not None
        # Far ahead: the clock was set back, and nothing would be due until it has caught up.
        due = self._last_s is None or abs(staged_s - self._last_s) >= self._every_s
        word = Word(durable=due, staged_s=staged_s)
        if nodes > 1:
            if self._store.create(key, msgspec.json.encode(word)) is not CreateOutcome.COMMITTED:
                word = self._read(key)
            self._forget(key)
        if word.durable:
            near = self._last_s is not None and abs(word.staged_s - self._last_s) < self._every_s
            self._last_s = max(word.staged_s, self._last_s or 0.0) if near else word.staged_s
        return word

    def _forget(self, key: str) -> None:
        """Delete words of snapshots so old that nobody asks for them any more."""
        self._said.append(key)
        while len(self._said) > _KEPT:
            self._store.delete(self._said.pop(0))

    def _ask(self, key: str, step: int) -> Word:
        deadline_s, wait_s = self._clock() + self._limit_s, _FIRST_WAIT_S
        while True:
            try:
                return self._read(key)
            except NotFoundError:
                if self._clock() >= deadline_s:
                    raise DeadlineError(
                        f"step {step}: node 0 has not said within {self._limit_s:g} s whether it "
                        "goes to the durable tier"
                    ) from None
            self._nap(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _read(self, key: str) -> Word:
        return read_word(self._store.get(key, max_bytes=_MAX_BYTES), f"{self._store.url}/{key}")


def read_word(data: bytes, name: str) -> Word:
    """Node 0's word. Raises FormatError."""
    try:
        return msgspec.json.decode(data, type=Word)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"{name}: not a word on a snapshot: {error}") from None
