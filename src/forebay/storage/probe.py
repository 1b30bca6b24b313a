"""Whether a store lets exactly one of many creators win: asked before the first step.

Without that, two jobs could both commit one step. The answer is kept for the run.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from forebay.errors import FormatError, NotFoundError, StoreError
from forebay.storage.patience import Patience
from forebay.storage.store import CreateOutcome, Store
from forebay.watch.events import emit

CREATORS = 16
_START_S = 60.0
_PATIENCE_S = 10.0
_MAX_BYTES = 2**16


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe found. ``winners`` of ``creators`` racing ones were told that they had won.

    ``again`` is what a second create of one key was told; ``kept`` says that the object then still
    was the first's; ``seconds`` is how long it all took, ``at_s`` when (Unix time).
    """

    url: str
    again: str
    kept: bool
    creators: int
    winners: int
    winner_kept: bool
    seconds: float
    at_s: float

    @property
    def exclusive(self) -> bool:
        """True when exactly one of many creators wins here."""
        return (
            self.again == CreateOutcome.EXISTS.value
            and self.kept
            and self.winners == 1
            and self.winner_kept
        )

    def __str__(self) -> str:
        if self.exclusive:
            return (
                f"{self.url}: of {self.creators} creators at once exactly one won "
                f"({self.seconds:.2f} s)"
            )
        return (
            f"{self.url}: a second create of one object was told {self.again!r}"
            f"{'' if self.kept else ' and replaced it'}, and {self.winners} of {self.creators} "
            "creators at once were told that they had won"
        )


def probe(store: Store, name: Callable[[str], str], *, creators: int = CREATORS) -> Finding:
    """Create one object twice, then another by many at once. Leaves nothing behind.

    ``name`` makes a key of a word. Raises StoreError when the store cannot be used at all.
    """
    began_s = time.monotonic()
    mark = secrets.token_hex(8)
    twice, race = name(f"{mark}-twice"), name(f"{mark}-race")
    try:
        first, second = b"first " + mark.encode(), b"second " + mark.encode()
        if store.create(twice, first) is CreateOutcome.UNKNOWN:
            raise StoreError(f"{store.url}/{twice}: its creation was not answered")
        again = store.create(twice, second)
        kept = store.get(twice, max_bytes=_MAX_BYTES) == first
        gate = threading.Barrier(creators, timeout=_START_S)
        bodies = [f"{mark} {number}".encode() for number in range(creators)]

        def create(body: bytes) -> CreateOutcome:
            gate.wait()
            return store.create(race, body)

        with ThreadPoolExecutor(creators, thread_name_prefix="probe") as pool:
            try:
                outcomes = list(pool.map(create, bodies))
            except BaseException:
                gate.abort()  # without a thread for each, those begun would wait for the others
                raise
        there = store.get(race, max_bytes=_MAX_BYTES)
    finally:
        for key in (twice, race):
            with contextlib.suppress(StoreError, NotFoundError):
                store.delete(key)
    told = [b for b, o in zip(bodies, outcomes, strict=True) if o is CreateOutcome.COMMITTED]
    return Finding(
        url=store.url,
        again=again.value,
        kept=kept,
        creators=creators,
        winners=len(told),
        winner_kept=there in told,
        seconds=time.monotonic() - began_s,
        at_s=time.time(),
    )


def require_exclusive(
    store: Store, result_key: str, name: Callable[[str], str], *, single_writer: bool
) -> Finding:
    """The finding kept for the run, or a new one, which is kept. Shown as an event.

    Raises StoreError for a store that lets several creators win, unless ``single_writer``.
    """
    finding = _known(store, result_key)
    if finding is None:
        finding = Patience(_PATIENCE_S).again(lambda: probe(store, name))
        with contextlib.suppress(StoreError):  # another start may keep its own at this moment
            store.delete(result_key)
            store.create(result_key, msgspec.json.encode(finding))
    emit(
        "store.probed",
        level=20 if finding.exclusive else 30,
        exclusive=finding.exclusive,
        winners=finding.winners,
        creators=finding.creators,
        seconds=round(finding.seconds, 3),
    )
    if not (finding.exclusive or single_writer):
        raise StoreError(
            f"{finding}: commits would not be exclusive: use a store that honours conditional "
            "creates, or commit_mode='single-writer' if only one job ever writes to this run"
        )
    return finding


def read_finding(data: bytes, name: str) -> Finding:
    """A finding that was kept. Raises FormatError."""
    try:
        return msgspec.json.decode(data, type=Finding)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FormatError(f"{name}: not what a probe found: {error}") from None


def _known(store: Store, result_key: str) -> Finding | None:
    """A finding of this very store that was good; one that was not is probed again."""
    try:
        finding = read_finding(store.get(result_key, max_bytes=_MAX_BYTES), result_key)
    except (NotFoundError, FormatError):
        return None
    return finding if finding.exclusive and finding.url == store.url else None
