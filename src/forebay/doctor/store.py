"""The durable tier as one node sees it: rates, latency, and whether creates are exclusive."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from forebay.doctor.deadline import side_by_side, within
from forebay.doctor.finding import Expected, Finding, Verdict, compare, failed
from forebay.doctor.samples import summarize
from forebay.errors import DeadlineError, DeniedError, ForebayError, FullError, UsageError
from forebay.format.names import probe_key
from forebay.plan.figure import Kind
from forebay.storage import direct
from forebay.storage.address import open_store, resolve_url
from forebay.storage.probe import probe
from forebay.storage.store import Store
from forebay.units import show_bytes

OBJECTS = 8
"""Written and read side by side: as many as a node has ranks."""
TIMEOUT_S = 30.0
"""The deadline of a call, or of a wave of large ones."""

_HOP = "store"
_PATIENCE_S = 5.0  # a request that fails is tried again for so long
_SMALL_BYTES = 4096
_PAGE = mmap.PAGESIZE
_FIRST = 16  # the first wave is so many times smaller: it warms up, and says how much to send
_MOST_SAMPLES = 200
_MOST_WAVES = 32
_LEFT_OVER_S = 86_400.0  # no visit lasts so long: whoever wrote it was killed
_OURS = re.compile(re.escape(probe_key("doctor-")) + "[0-9a-f]{16}/")
_OBJECT = re.compile(r"\S*doctor-[0-9a-f]{16}\S*: [^:]*: ")
"""How the text of an error begins: one of our objects, and what was done to it."""

Told = Callable[[str], None]


def measure(
    url: str,
    expected: Expected,
    *,
    seconds: float = 1.0,
    size_bytes: int = 2**28,
    told: Told,
    objects: int = OBJECTS,
    timeout_s: float = TIMEOUT_S,
) -> list[Finding]:
    """Rates and latency of the store at ``url``, and its exclusive create, a finding each.

    Each is measured for about ``seconds``; at most ``size_bytes`` lie in the store at once, and
    no call is waited for longer than ``timeout_s``. Whatever was written is deleted, also when it
    fails half way, and what a visit that was killed left a day ago or longer. Raises
    nothing: trouble is a finding.
    """
    absent: Path | None = None
    try:
        absent = _absent_directory(url)
        store = within(
            lambda: open_store(url, patience_s=min(_PATIENCE_S, timeout_s)),
            timeout_s=timeout_s,
            what=f"{url}: open",
        )
        key = probe_key(f"doctor-{secrets.token_hex(8)}/there")
        within(lambda: store.head(key), timeout_s=timeout_s, what=f"{store.url}: head")
    except Exception as error:  # noqa: BLE001 - a store of another maker may raise anything
        files = "://" not in url or url.startswith("file:")
        return [_failed("store", Kind.TEXT, error, files=files)]
    visit = _Visit(store, expected, seconds, max(1, objects), timeout_s, told)
    try:
        visit.clear_left_over()
        return visit.all(size_bytes)
    finally:
        visit.leave()
        if absent is not None:
            with contextlib.suppress(OSError):
                absent.rmdir()


class _Visit:
    """One visit to a store. Every key is noted before it is used, and taken away in the end."""

    def __init__(
        self,
        store: Store,
        expected: Expected,
        seconds: float,
        objects: int,
        timeout_s: float,
        told: Told,
    ) -> None:
        self._store = store
        self._volatile = not store.capabilities.durable
        self._expected = {} if self._volatile else expected
        self._seconds, self._objects, self._timeout_s = seconds, objects, timeout_s
        self._told = told
        self._word = f"doctor-{secrets.token_hex(8)}"
        self._keys: set[str] = set()
        self._count = self._each = 0
        self._over = threading.Event()
        self._silent = False
        self._troubles: dict[str, str] = {}  # what went wrong, and the line that says so

    def all(self, size_bytes: int) -> list[Finding]:
        """Every line."""
        each = max(_PAGE, size_bytes // self._objects // _PAGE * _PAGE)
        there: list[str] = []
        return [
            self._line("put rate", Kind.RATE, lambda: self._put_rate(each, there)),
            self._line("get rate", Kind.RATE, lambda: self._get_rate(there))
            if there or self._silent
            else _see("store get rate", Kind.RATE, "store put rate"),
            *(
                self._line(f"{verb} latency", Kind.SECONDS, lambda verb=verb: self._latency(verb))
                for verb in ("put", "head", "get")
            ),
            self._line("exclusive create", Kind.YES_NO, self._exclusive),
        ]

    def _line(self, name: str, kind: Kind, call: Callable[..., Finding]) -> Finding:
        """One line; trouble with it is a finding too."""
        title = f"{_HOP} {name}"
        if self._silent:  # one deadline is waited for, not one for each line
            return _see(title, kind, next(iter(self._troubles.values())))
        self._told(f"{_HOP}: {name} of {self._store.url}")
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a store of another maker may raise anything
            self._silent = isinstance(error, DeadlineError | DeniedError)
            first = self._troubles.setdefault(_OBJECT.sub("", str(error)), title)
            if first != title:  # said once
                return _see(title, kind, first)
            return _failed(title, kind, error, files=self._store.capabilities.local_path)

    def _key(self, what: str) -> str:
        """A new key, noted."""
        self._count += 1
        key = probe_key(f"{self._word}/{what}-{self._count}")
        self._keys.add(key)
        return key

    def _wave(self, calls: Sequence[Callable[[], None]], what: str, keys: list[str]) -> float:
        """Seconds that calls side by side take. One that ends too late takes its object away."""
        began_s = time.monotonic()
        side_by_side(
            calls,
            timeout_s=self._timeout_s,
            what=f"{self._store.url}: {what}",
            late=lambda: self._delete(keys),
        )
        return time.monotonic() - began_s

    def _put_rate(self, most: int, there: list[str]) -> Finding:
        least = max(_PAGE, most // _FIRST // _PAGE * _PAGE)
        source = _pages(least, fill=True)
        first_s = self._put_wave(source, there)
        fitting = round(least * self._seconds / max(first_s, 1e-9)) // _PAGE * _PAGE
        each = self._each = min(most, max(least, fitting))
        source = _pages(each, fill=True)
        done_bytes, spent_s, waves = 0, 0.0, 0
        while not waves or (spent_s < self._seconds and waves < _MOST_WAVES):
            within(
                lambda: self._delete(list(there)),
                timeout_s=self._timeout_s,
                what=f"{self._store.url}: delete",
            )
            spent_s += self._put_wave(source, there)
            done_bytes, waves = done_bytes + each * self._objects, waves + 1
        shown = f"{self._objects} objects of {show_bytes(each)} at once, {waves} times"
        found = compare(
            name="store put rate",
            hop=_HOP,
            kind=Kind.RATE,
            measured=done_bytes / max(spent_s, 1e-9),
            expected=self._expected,
            field="" if self._volatile else "storage.per_node",
            note=f"{shown}, durable",
            advice="plan with this rate (storage.per_node), or look for a nearer endpoint, a "
            "faster network or mount, and what else writes there",
        )
        if not self._volatile:
            return found
        return replace(
            found,
            verdict=Verdict.OFF,
            note=f"{shown}; {self._store.url} is memory, or as good as it: nothing there survives "
            "a power cut",
            advice="name a store that keeps what it has: a bucket, or a directory on disks",
        )

    def _put_wave(self, source: memoryview, there: list[str]) -> float:
        """Seconds to write new objects of ``source`` side by side; ``there`` names them then."""
        there.clear()
        keys = [self._key("put") for _ in range(self._objects)]
        calls = [partial(self._put, key, source) for key in keys]
        spent_s = self._wave(calls, f"{self._objects} objects at once", keys)
        there[:] = keys
        return spent_s

    def _put(self, key: str, source: memoryview) -> None:
        def check(_: int) -> None:
            if self._over.is_set():  # nobody waits any more: cut it off
                raise DeadlineError(f"{self._store.url}/{key}: given up")

        self._store.put_large(key, source, on_progress=check)

    def _get_rate(self, there: list[str]) -> Finding:
        each = self._each
        calls = [partial(self._store.read_into, key, 0, _pages(each)) for key in there]
        done_bytes, spent_s, waves = 0, 0.0, 0
        while not waves or (spent_s < self._seconds and waves < _MOST_WAVES):
            spent_s += self._wave(calls, f"{len(calls)} reads at once", [])
            done_bytes, waves = done_bytes + each * len(calls), waves + 1
        cached = "" if self._uncached(there[0]) else "; perhaps from memory: no O_DIRECT there"
        return compare(
            name="store get rate",
            hop=_HOP,
            kind=Kind.RATE,
            measured=done_bytes / max(spent_s, 1e-9),
            expected=self._expected,
            field="" if self._volatile else "storage.per_node_read",
            note=f"{len(calls)} objects of {show_bytes(each)} at once, {waves} times{cached}",
            advice="plan with this rate (storage.per_node_read): a restart takes as much longer",
        )

    def _uncached(self, key: str) -> bool:
        """Whether a read of a file passes the page cache by; what is no file is not in it."""
        path = self._store.local_path(key)
        if path is None:
            return True
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return direct.switch(fd, True)
        finally:
            os.close(fd)

    def _latency(self, verb: str) -> Finding:
        body = secrets.token_bytes(_SMALL_BYTES)
        shared = self._key("small")
        if verb != "put":
            self._one(lambda: self._store.put(shared, body), "put", shared)
        times_s: list[float] = []
        ends_s = time.monotonic() + self._seconds
        while not times_s or (time.monotonic() < ends_s and len(times_s) < _MOST_SAMPLES):
            key = self._key("small") if verb == "put" else shared
            times_s.append(self._one(self._small(verb, key, body), verb, key))
        seen = summarize(times_s)
        return Finding(
            name=f"store {verb} latency",
            hop=_HOP,
            kind=Kind.SECONDS,
            verdict=Verdict.MEASURED,
            measured=seen.median_s,
            note=f"median, {seen}, {show_bytes(_SMALL_BYTES)}",
        )

    def _small(self, verb: str, key: str, body: bytes) -> Callable[[], object]:
        calls: dict[str, Callable[[], object]] = {
            "put": lambda: self._store.put(key, body),
            "head": lambda: self._store.head(key),
            "get": lambda: self._store.get(key, max_bytes=_SMALL_BYTES),
        }
        return calls[verb]

    def _one(self, call: Callable[[], object], verb: str, key: str) -> float:
        """Seconds that one small call takes."""

        def timed() -> float:
            began_s = time.perf_counter()
            call()
            return time.perf_counter() - began_s

        return within(
            timed,
            timeout_s=self._timeout_s,
            what=f"{self._store.url}/{key}: {verb}",
            late=lambda: self._delete([key]),
        )

    def _exclusive(self) -> Finding:
        seen = within(
            lambda: probe(self._store, lambda word: probe_key(f"{self._word}/{word}")),
            timeout_s=max(self._timeout_s, 1.0),
            what=f"{self._store.url}: exclusive create",
        )
        return Finding(
            name="store exclusive create",
            hop=_HOP,
            kind=Kind.YES_NO,
            verdict=Verdict.GOOD if seen.exclusive else Verdict.OFF,
            measured=seen.exclusive,
            expected=True,
            source="commits need it",
            note=f"{seen.winners} of {seen.creators} creators at once won",
            advice="use a store that honours conditional creates, or commit_mode='single-writer' "
            "where only one job ever writes to this run",
        )

    def _delete(self, keys: list[str]) -> None:
        """Take objects away; those that cannot be stay noted."""
        for key in keys:
            with contextlib.suppress(ForebayError, OSError):
                self._store.delete(key)
                self._keys.discard(key)

    def clear_left_over(self) -> None:
        """Take away what visits that were killed over a day ago left. Raises nothing."""
        before_s = time.time() - _LEFT_OVER_S
        gone: list[str] = []

        def clear() -> None:
            with contextlib.suppress(Exception):  # keys that may not list still measure
                for each in list(self._store.list(probe_key(""))):
                    ours = _OURS.match(each.key) is not None and each.modified_s < before_s
                    if ours and not self._over.is_set() and self._store.delete(each.key):
                        gone.append(each.key)
            with contextlib.suppress(Exception):
                self._store.sweep(probe_key(""), older_than_s=_LEFT_OVER_S)

        with contextlib.suppress(DeadlineError):
            within(clear, timeout_s=self._timeout_s, what=f"{self._store.url}: list")
        if gone:
            self._told(f"{_HOP}: {len(gone)} objects of an earlier doctor, over a day old, removed")

    def leave(self) -> None:
        """Take everything away that is noted, and uploads without an end; tell what stays."""
        self._over.set()

        def clear() -> None:
            self._delete(sorted(self._keys))
            with contextlib.suppress(ForebayError, OSError):
                self._store.sweep(probe_key(f"{self._word}/"), older_than_s=0.0)

        with contextlib.suppress(DeadlineError):
            within(clear, timeout_s=self._timeout_s, what=f"{self._store.url}: delete")
        if self._keys:
            self._told(
                f"{_HOP}: {len(self._keys)} objects below {self._store.url}/"
                f"{probe_key(self._word)} could not be deleted: delete them"
            )


def _pages(nbytes: int, *, fill: bool = False) -> memoryview:
    """Page-aligned memory, as O_DIRECT wants it; filled with what no store makes smaller."""
    view = memoryview(mmap.mmap(-1, nbytes))
    if fill:
        block = secrets.token_bytes(min(nbytes, 2**20))
        for at in range(0, nbytes, len(block)):
            view[at : at + len(block)] = block[: nbytes - at]
    return view


def _absent_directory(url: str) -> Path | None:
    """The directory that opening the store will make, to be taken away again."""
    text = resolve_url(url)
    return Path(text) if "://" not in text and not Path(text).exists() else None


def _see(name: str, kind: Kind, first: str) -> Finding:
    """A line that another stands for: what is wrong is said once."""
    return failed(_HOP, name, kind, f"not measured: see {first}")


def _failed(name: str, kind: Kind, error: Exception, *, files: bool) -> Finding:
    """A line that could not be measured; what the error itself does not say to do is advised."""
    text = " ".join(str(error).split()) or type(error).__name__
    advice = "see that the URL, the keys and the network are right, then measure again"
    if files:
        late = isinstance(error, DeadlineError)
        advice = "see that its mount answers, or wait longer (--timeout)" if late else ""
    elif isinstance(error, FullError | DeniedError | UsageError):
        advice = ""
    return failed(_HOP, name, kind, text, advice)
