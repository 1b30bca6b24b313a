"""One large object sent in parts: side by side, each tried again, none sent twice once it is there.

The store itself is the memory of what has arrived: an upload's id is noted before its first part,
and whoever goes on with it asks the store which parts it has.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from forebay.errors import DeniedError, FullError, StoreError
from forebay.storage.pace import Pace
from forebay.storage.patience import Patience
from forebay.watch.events import emit

PART_BYTES = 64 * 2**20
MOST_PARTS = 10_000
LANES = 4
_MIB = 2**20
_LOOK_S = 0.1
_AHEAD = 2  # parts that are hashed, or wait for their answer, while others are on the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """How an object of ``nbytes`` is cut: parts of ``part_bytes``, ``lanes`` at a time."""

    nbytes: int
    part_bytes: int
    lanes: int

    @property
    def count(self) -> int:
        """How many parts there are."""
        return max(1, -(-self.nbytes // self.part_bytes))

    def range_of(self, number: int) -> tuple[int, int]:
        """Start and size of a part, numbered from 1."""
        start = (number - 1) * self.part_bytes
        return start, min(self.part_bytes, self.nbytes - start)


def plan_parts(nbytes: int, part_bytes: int = PART_BYTES) -> PartPlan:
    """Parts of 64 MiB, larger whole MiB where an object would have more than 10,000 of them.

    64 MiB keep 405B on 2,048 nodes at 98,000 requests a checkpoint, where S3 takes 3,500 a second.
    """
    least = -(-nbytes // MOST_PARTS)
    size = part_bytes if least <= part_bytes else -(-least // _MIB) * _MIB
    return PartPlan(nbytes=nbytes, part_bytes=size, lanes=max(1, min(LANES, -(-nbytes // size))))


class Gate:
    """Lets so many parts be on the wire at once as the pace allows at the moment."""

    def __init__(self, pace: Pace, lanes: int) -> None:
        self._pace = pace
        self._lanes = lanes
        self._inside = 0
        self._changed = threading.Condition()

    def enter(self) -> None:
        """Wait for a place."""
        with self._changed:
            while self._inside >= self._pace.lanes(self._lanes):
                self._changed.wait(_LOOK_S)  # the pace changes by itself
            self._inside += 1

    def leave(self) -> None:
        """Give it back."""
        with self._changed:
            self._inside -= 1
            self._changed.notify()


class UploadLog(Protocol):
    """Remembers an object's upload past the death of the process. Called from any thread."""

    def known(self) -> tuple[str, int] | None:
        """Id and part size in bytes of an upload that was begun and may go on."""

    def begun(self, upload_id: str, part_bytes: int) -> None:
        """An upload was begun: noted, and durable, before its first part is sent."""

    def trouble(self, why: str) -> None:
        """A part failed and goes again, for this reason; "" once parts arrive again."""


class Parts(Protocol):
    """What a store can do with the parts of one object."""

    def begin(self) -> str:
        """Open an upload; returns its id."""

    def there(self, upload_id: str) -> Mapping[int, tuple[str, int]] | None:
        """Tag and size of each part that has arrived; None when there is no such upload."""

    def put(
        self,
        upload_id: str,
        number: int,
        start: int,
        nbytes: int,
        *,
        sent: Callable[[int], None],
        gate: Gate,
    ) -> str:
        """Send a part, its bytes through the gate; returns its tag.

        ``sent`` hears of blocks as they leave.
        """


class Upload:
    """Sends the parts of one object. Used once, by one thread; the parts go in threads of its own.

    ``told`` hears how many bytes have left, in the calling thread; what has to go again is told as
    less than nothing. What it raises ends the upload at once and leaves it to be gone on with.
    """

    def __init__(
        self,
        parts: Parts,
        plan: PartPlan,
        *,
        what: str,
        pace: Pace,
        told: Callable[[int], None],
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = parts
        self._plan = plan
        self._what = what
        self._pace = pace
        self._told = told
        self._patience = patience
        self._clock = clock
        self._cut = threading.Event()
        self._lock = threading.Lock()
        self._gate = Gate(pace, plan.lanes)
        self._unsaid = 0
        self._log: UploadLog | None = None
        self._troubled = False
        self.tags: dict[int, str] = {}

    def run(self, log: UploadLog | None) -> str:
        """Send what has not arrived; returns the upload's id, all of whose parts are there then.

        Raises StoreError when nothing came through for as long as patience lasts.
        """
        self._log = log
        upload_id = self._resume(log)
        todo = deque(n for n in range(1, self._plan.count + 1) if n not in self.tags)
        running: dict[Future[str], tuple[int, list[int]]] = {}
        not_before_s = self._clock()
        most = self._plan.lanes + _AHEAD
        pool = ThreadPoolExecutor(most, thread_name_prefix="part")
        try:
            while todo or running:
                free = most - len(running)
                while todo and free > 0 and self._clock() >= not_before_s:
                    number, sent = todo.popleft(), [0]
                    running[pool.submit(self._one, upload_id, number, sent)] = number, sent
                    free -= 1
                if running:
                    done, _ = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                else:
                    done = set()
                    self._cut.wait(min(_LOOK_S, max(0.0, not_before_s - self._clock())))
                self._say()
                for future in done:
                    number, sent = running.pop(future)
                    wait_s = self._settle(future, number, sent)
                    if wait_s is not None:
                        # To the end of the list: what is stuck is tried elsewhere, and later.
                        todo.append(number)
                        not_before_s = max(not_before_s, self._clock() + wait_s)
        finally:
            self._cut.set()
            pool.shutdown(wait=False, cancel_futures=True)
        self._say()
        return upload_id

    def _resume(self, log: UploadLog | None) -> str:
        """Go on with the upload that is known, where the store still knows it; else begin one."""
        known = None if log is None else log.known()
        if known is not None and known[1] == self._plan.part_bytes:
            there = self._parts.there(known[0])
            if there is not None:
                for number in range(1, self._plan.count + 1):
                    size = self._plan.range_of(number)[1]
                    if number in there and there[number][1] == size:
                        self.tags[number] = there[number][0]
                        self._told(size)
                return known[0]
        upload_id = self._parts.begin()
        if log is not None:
            log.begun(upload_id, self._plan.part_bytes)
        return upload_id

    def _one(self, upload_id: str, number: int, sent: list[int]) -> str:
        def count(nbytes: int) -> None:
            if self._cut.is_set():
                raise StoreError(f"{self._what}: cut off")
            sent[0] += nbytes
            with self._lock:
                self._unsaid += nbytes

        start, nbytes = self._plan.range_of(number)
        return self._parts.put(upload_id, number, start, nbytes, sent=count, gate=self._gate)

    def _say(self) -> None:
        with self._lock:
            count, self._unsaid = self._unsaid, 0
        self._told(count)

    def _settle(self, future: Future[str], number: int, sent: list[int]) -> float | None:
        """Note a part that has arrived; how long to wait before one that has not goes again."""
        try:
            self.tags[number] = future.result()
        except (DeniedError, FullError):
            raise
        except StoreError as error:
            self._told(-sent[0])
            wait_s = self._patience.next_wait_s()
            if wait_s is None:
                raise
            emit("store.retry", level=30, why=error, wait_s=round(wait_s, 3))
            self._tell(str(error))
            return wait_s
        self._patience.progressed()
        self._tell("")
        return None

    def _tell(self, why: str) -> None:
        if self._log is not None and (why or self._troubled):
            self._log.trouble(why)
        self._troubled = bool(why)
