"""A store that fails on purpose: ``faulty+file:///directory?script=/path/faults.json``.

The script is a JSON list of rules and is read again whenever it changes, so that a test can switch
faults on and off while an agent lives in another process. A rule::

    {"op": "put_large", "match": "rank-00001", "do": "enospc", "times": 1}

``op`` is put, put_large, create, get, read_into (get_range too), head, list or delete; ``match`` a
regular expression searched in the key. Calls are counted for each process and since the script
last changed; the first rule that is due is the one that is followed. ``do``:

    enospc, eio     fail with that error before anything happens
    partial         put_large only: write nothing visible, be full after ``at_bytes`` were consumed
    delay           wait ``seconds`` first
    kill            SIGKILL this process
    lost_reply      do it, then report an unknown outcome (create) or a failure

Replace the script in one step (write another file, rename it): it may be read at any moment. While
there is no script there are no faults.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import msgspec

from forebay.errors import FullError, StoreError, UsageError
from forebay.storage.address import open_store
from forebay.storage.multipart import UploadLog
from forebay.storage.pace import Pace
from forebay.storage.store import CreateOutcome, ObjectInfo, OnDrop, OnProgress, Store

_BLOCK_BYTES = 64 * 2**10


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault: from the ``after``-th matching call on (1 is the first), ``times`` times."""

    op: Literal["put", "put_large", "create", "get", "read_into", "head", "list", "delete"]
    do: Literal["enospc", "eio", "partial", "delay", "kill", "lost_reply"]
    match: str = ""
    after: int = 1
    times: int | None = None
    seconds: float = 0.0
    at_bytes: int = 0
    message: str = ""

    def __post_init__(self) -> None:
        """Refuse what could never happen."""
        if self.do == "partial" and self.op != "put_large":
            raise ValueError(f"partial goes with put_large, not with {self.op}")
        re.compile(self.match)


def read_rules(data: bytes, name: str) -> list[Rule]:
    """The rules of a script. Raises UsageError when it makes no sense."""
    try:
        return msgspec.json.decode(data, type=list[Rule])
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError, re.error) as error:
        raise UsageError(f"{name}: not a list of faults: {error}") from error


class FaultyStore(Store):
    """Wraps a store and follows a script of faults."""

    def __init__(self, url: str, inner: Store, script: Path) -> None:
        self.url = url
        self.inner = inner
        self.capabilities = inner.capabilities
        self._script = script
        self._stamp: tuple[int, int] | None = None
        self._rules: list[Rule] = []
        self._calls: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def pace(self) -> Pace:
        """The inner store's."""
        return self.inner.pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        self.inner.pace = pace

    def _reload(self) -> None:
        """Read the script again when it changed. Raises UsageError when it makes no sense."""
        try:
            found = self._script.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp != self._stamp:
                self._rules = read_rules(self._script.read_bytes(), str(self._script))
                self._stamp, self._calls = stamp, {}
        except FileNotFoundError:
            self._rules, self._stamp, self._calls = [], None, {}

    def _rule(self, op: str, key: str) -> Rule | None:
        """The fault for this call, if one is due."""
        with self._lock:
            self._reload()
            for number, rule in enumerate(self._rules):
                if rule.op != op or re.search(rule.match, key) is None:
                    continue
                count = self._calls[number] = self._calls.get(number, 0) + 1
                last = None if rule.times is None else rule.after + rule.times
                if count >= rule.after and (last is None or count < last):
                    return rule
        return None

    def _before(self, op: str, key: str) -> Rule | None:
        """Do what comes before the call; returns the rule when something comes after it."""
        rule = self._rule(op, key)
        if rule is None:
            return None
        where = f"{self.url.partition('?')[0]}/{key}"
        if rule.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if rule.do == "delay":
            time.sleep(rule.seconds)
            return None
        if rule.do == "enospc":
            raise FullError(f"{where}: {rule.message or os.strerror(errno.ENOSPC)}")
        if rule.do == "eio":
            raise StoreError(f"{where}: {rule.message or os.strerror(errno.EIO)}")
        return rule

    def _after(self, rule: Rule | None, key: str) -> None:
        if rule is not None:
            raise StoreError(f"{self.url.partition('?')[0]}/{key}: the reply was lost")

    def get(self, key: str, *, max_bytes: int) -> bytes:
        rule = self._before("get", key)
        data = self.inner.get(key, max_bytes=max_bytes)
        self._after(rule, key)
        return data

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        rule = self._before("read_into", key)
        self.inner.read_into(key, start, into)
        self._after(rule, key)

    def head(self, key: str) -> ObjectInfo | None:
        rule = self._before("head", key)
        found = self.inner.head(key)
        self._after(rule, key)
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        rule = self._before("put", key)
        self.inner.put(key, data)
        self._after(rule, key)

    def put_large(
        self,
        key: str,
        view: memoryview,
        *,
        on_progress: OnProgress | None = None,
        on_drop: OnDrop | None = None,
        log: UploadLog | None = None,
    ) -> None:
        rule = self._before("put_large", key)
        if rule is not None and rule.do == "partial":
            for at in range(0, min(rule.at_bytes, view.nbytes), _BLOCK_BYTES):
                step = min(_BLOCK_BYTES, rule.at_bytes - at, view.nbytes - at)
                self.pace.take(step)
                if on_progress is not None:
                    on_progress(step)
            raise FullError(f"{self.url.partition('?')[0]}/{key}: cut off at {rule.at_bytes} bytes")
        self.inner.put_large(key, view, on_progress=on_progress, on_drop=on_drop, log=log)
        self._after(rule, key)

    def create(self, key: str, data: bytes) -> CreateOutcome:
        rule = self._before("create", key)
        outcome = self.inner.create(key, data)
        return outcome if rule is None else CreateOutcome.UNKNOWN

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        rule = self._before("list", prefix)
        yield from self.inner.list(prefix)
        self._after(rule, prefix)

    def delete(self, key: str) -> bool:
        rule = self._before("delete", key)
        gone = self.inner.delete(key)
        self._after(rule, key)
        return gone

    def settle(self, key: str) -> None:
        self.inner.settle(key)

    def sweep(self, prefix: str, *, older_than_s: float) -> int:
        return self.inner.sweep(prefix, older_than_s=older_than_s)

    def local_path(self, key: str) -> Path | None:
        return self.inner.local_path(key)


def open_faulty(url: str) -> Store:
    """Entry point of the scheme ``faulty``. Raises UsageError without a script."""
    parts = urlsplit(url)
    query: dict[str, Any] = parse_qs(parts.query)
    if "script" not in query:
        raise UsageError(f"store: {url!r}: expected ?script=/path/to/faults.json")
    scheme = parts.scheme.partition("+")[2] or "file"
    script = Path(query["script"][0])
    if not script.is_file():
        raise UsageError(f"store: {url!r}: the script {script} does not exist")
    inner = open_store(f"{scheme}://{parts.netloc}{parts.path}")
    return FaultyStore(url, inner, script)
