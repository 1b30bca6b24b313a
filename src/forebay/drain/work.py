"""The agent's threads and tasks: what runs, what is tried again, how it all stops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from forebay.errors import DeniedError, FullError, StoreError
from forebay.storage.patience import Patience
from forebay.watch.events import emit

_BYTE_THREADS = 8  # two lanes of spill and two of upload, each with a hashing or waiting peer
_CUT_S = 2.0
_COMMIT_THREADS = 16  # mostly asleep: a commit waits for other nodes

_T = TypeVar("_T")


class Stopped(Exception):  # noqa: N818 - no error: the next agent goes on
    """This agent ends, or the snapshot has ended: the work in hand is left where it is."""


class Work:
    """Runs byte work and commits beside the loop. Belongs to the loop's thread.

    ``patience_s`` is for how long a tier that fails is tried again while nothing comes through.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._bytes = ThreadPoolExecutor(_BYTE_THREADS, thread_name_prefix="bytes")
        self._commits = ThreadPoolExecutor(_COMMIT_THREADS, thread_name_prefix="commit")
        self._tasks: set[asyncio.Task[None]] = set()
        self._aside: set[asyncio.Task[None]] = set()
        self._nap = threading.Event()
        self._awake = asyncio.Event()
        self.stopping = False
        self.cut = False

    @property
    def busy(self) -> bool:
        """True while a task is under way."""
        return bool(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], *, aside: bool = False) -> None:
        """Run a coroutine beside all others; an error that it lets out is a bug and is told.

        What runs ``aside`` keeps no agent alive, and ends when the agent does.
        """
        task = asyncio.get_running_loop().create_task(work)
        (self._aside if aside else self._tasks).add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._aside.discard(task)
        if not task.cancelled() and task.exception() is not None:
            emit("agent.bug", level=50, why=repr(task.exception()))

    async def changed(self, timeout_s: float) -> None:
        """Return once a task has ended, or after ``timeout_s``."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(timeout_s)

    async def move(self, work: Callable[..., _T], *args: Any) -> _T:
        """Run byte work in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._bytes, work, *args)

    async def commit(self, work: Callable[..., _T], *args: Any) -> _T:
        """Run a commit, or what belongs to one, in a thread that may wait long."""
        return await asyncio.get_running_loop().run_in_executor(self._commits, work, *args)

    async def again(
        self,
        work: Callable[[], _T],
        *,
        moved: Callable[[], bool] | None = None,
        trouble: Callable[[str], None] | None = None,
        commits: bool = False,
        limit_s: float | None = None,
    ) -> _T:
        """Run work on a tier, again after each failure that may pass, until patience ends.

        ``moved`` says whether anything came through since it was last asked: that moves the
        deadline. ``trouble`` hears why it has to be tried again, and "" when it went well. A
        refusal is tried again as well, since keys and buckets are mended while the bytes wait. A
        full tier is not: somebody has to make room. ``limit_s`` replaces the usual patience.
        Raises what the last try raised.
        """
        patience = Patience(self._patience_s if limit_s is None else limit_s)
        run = self.commit if commits else self.move
        while True:
            try:
                result = await run(work)
            except StoreError as error:
                if self.stopping:
                    raise Stopped from error
                if isinstance(error, FullError):
                    raise
                if moved is not None and moved():
                    patience.progressed()
                wait_s = patience.next_wait_s()
                if wait_s is None:
                    raise
                if trouble is not None:
                    trouble(str(error))
                level = 40 if isinstance(error, DeniedError) else 30
                emit("store.retry", level=level, why=error, wait_s=round(wait_s, 3))
                await self.sleep(wait_s)
            else:
                if trouble is not None:
                    trouble("")
                return result

    async def sleep(self, seconds: float) -> None:
        """Sleep in the loop. Raises Stopped as soon as the agent stops."""
        if seconds > 0 and not self.stopping:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._awake.wait(), seconds)
        if self.stopping:
            raise Stopped

    def nap(self, seconds: float) -> None:
        """Sleep in a thread. Raises Stopped as soon as the agent stops."""
        if self._nap.wait(seconds):
            raise Stopped

    async def stop(self, limit_s: float) -> None:
        """Let the work in hand end, for ``limit_s``; then cut it off between two writes."""
        self.stopping = True
        self._nap.set()
        self._awake.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        self.cut = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=min(limit_s, _CUT_S))
        self._bytes.shutdown(wait=False)
        self._commits.shutdown(wait=False)
