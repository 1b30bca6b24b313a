"""Every parser of bytes that come from outside, each as one function: bytes -> None.

Nothing of the package listens for HTTP: the fault proxy and the S3 server are the tests' own.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from forebay.cli.plan_file import parse_yaml
from forebay.commit.catalog import unpack_entries
from forebay.doctor.listener import Listener
from forebay.doctor.peer import _Session
from forebay.drain.cadence import read_word
from forebay.drain.journal import _CHECK_BYTES, Journal, read_journal, still_matter
from forebay.drain.recover import _replay
from forebay.drain.slots import Slots, check_ticket
from forebay.drain.snapshots import Snapshots
from forebay.errors import DeadlineError, FormatError, StoreError
from forebay.format import index, names, paths, tree
from forebay.format.digests import digest
from forebay.format.manifest import read_manifest
from forebay.format.messages import frame_bytes, read_agent_config, read_message
from forebay.format.packed import pack
from forebay.format.record import read_record
from forebay.format.shard import PAGE_BYTES, read_header
from forebay.format.slot import WORD_BYTES, read_head, read_ticket, read_words
from forebay.plan.arithmetic import work, work_fleet
from forebay.plan.document import document_of
from forebay.plan.resolve import resolve
from forebay.storage.endpoint import parse_remote
from forebay.storage.pace import Pace
from forebay.storage.probe import read_finding
from forebay.storage.replies import from_text
from forebay.storage.s3 import S3, Reply
from forebay.testing.faulty import read_rules
from tests.fuzz import seeds

STATUSES = (200, 503, 404, 403, 301, 500, 507)
POOL_BYTES = 64 * 2**20

logging.getLogger("forebay").setLevel(logging.CRITICAL + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser, what makes its valid seeds, how many cases of it a run of the tests does."""

    parse: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    cases: int = 1000


def shard_header(data: bytes) -> None:
    """The size of a file, then its first bytes."""
    size = int.from_bytes(data[:8], "little")
    text = data[16:]
    read_header(len(text).to_bytes(8, "little") + text, size)


def record(data: bytes) -> None:
    """The JSON of a record, packed as it would be stored."""
    read_record(pack(data))


def read_index(data: bytes) -> None:
    """An index as a committer reads it and as a restore does."""
    for fqns in (None, ["b"], ["w", "zzz"]):
        for stored in index.read_index(data, fqns):
            names.parse_data_key(stored.key)
    most = pa.default_memory_pool().max_memory() or 0
    assert most <= POOL_BYTES, f"{most} bytes in pyarrow"


def sealed_manifest(data: bytes) -> None:
    """The JSON of a manifest, with the seal it would have."""
    seal = b',"digest":"' + digest(data[:-1]).hex().encode() + b'"}'
    read_manifest(data[:-1] + seal)


def entries(data: bytes) -> None:
    """A tree, the values in it, and the parts of their paths."""
    for entry in tree.read_tree(data):
        for part in paths.split(entry.path):
            paths.read_part(part)
        if isinstance(entry, tree.Value):
            tree.decode_value(entry.data, entry.path)


def arena(data: bytes) -> None:
    """An arena file as agent and restart look at it."""
    view = memoryview(data)
    head = read_head(view[:PAGE_BYTES], len(data), "arena")
    for slot in range(head.slots):
        start = head.control_start(slot)
        control = view[start : start + head.control_bytes]
        words = read_words(control[:WORD_BYTES], head, "arena")
        check_ticket(*read_ticket(control, words, "arena"), head, "arena")


def frames(data: bytes) -> None:
    """What comes over the agent's socket."""
    while data:
        size = frame_bytes(data[:4])
        if len(data) < 4 + size:
            raise FormatError("cut")
        read_message(data[4 : 4 + size])
        data = data[4 + size :]


_SLOTS = mock.create_autospec(Slots, instance=True)
_JOURNAL = mock.create_autospec(Journal, instance=True)


_ACCEPTED = seeds.lines()[0]


def _framed(line: bytes) -> bytes:
    return len(line).to_bytes(4, "big") + digest(line)[:_CHECK_BYTES] + line


def journal(data: bytes) -> None:
    """One line after another in whole frames, replayed as the next agent does it."""
    known = Snapshots(node=0, slots=_SLOTS, journal=_JOURNAL, tell=lambda _: None)
    whole = _framed(_ACCEPTED) + _framed(data) + _framed(data)
    for line in still_matter([line for line, _ in read_journal(whole)]):
        _replay(known, line)


def raw_journal(data: bytes) -> None:
    """A journal as it lies on the disk."""
    list(read_journal(data))


def plan(data: bytes) -> None:
    """A file for ``forebay plan``, and the plan that is worked from it."""
    chosen, figures = parse_yaml(data, Path("plan.yaml"))
    worked = work(resolve(**chosen, file=figures))  # type: ignore[arg-type]
    json.dumps(document_of(worked, work_fleet(worked)))


_KEYS = ("id", "secret")
_BUCKET = S3(parse_remote("s3://b/run?endpoint=http://127.0.0.1:9&allow_http=true"), _KEYS)


def reply(data: bytes) -> None:
    """An answer of a bucket to each question that reads one."""
    status, pages = STATUSES[data[0] % len(STATUSES) if data else 0], 0
    answer = Reply(status=status, headers={"etag": data[1:9].hex()}, data=data[1:])

    def send(*_: object, **__: object) -> Reply:
        nonlocal pages
        pages += 1
        if pages > 50:
            raise DeadlineError("the test's own end of a list")
        return answer

    failures = []
    pace = Pace(clock=lambda: 0.0)
    from_text("get", data.decode(errors="replace"))
    with mock.patch.object(_BUCKET, "send", send):
        for ask in (
            lambda: _BUCKET.begin("k", pace),
            lambda: _BUCKET.parts("k", "u", pace),
            lambda: list(_BUCKET.uploads("data/", pace)),
            lambda: _BUCKET.expect(
                _BUCKET.complete("k", "u", {1: "t"}, pace, create=True), "", pace
            ),
            lambda: _BUCKET.abort("k", "u", pace),
        ):
            pages = 0
            try:
                ask()
            except (StoreError, DeadlineError) as error:
                failures.append(error)
    assert not any("\n" in str(error) for error in failures), failures
    if failures:
        raise failures[0]


class Wire:
    """A connection whose other side says what is given."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.sent = b""

    def recv(self, count: int) -> bytes:
        part, self.data = self.data[:count], self.data[count:]
        return part

    def recv_into(self, into: memoryview) -> int:
        part = self.recv(len(into))
        into[: len(part)] = part
        return len(part)

    def sendall(self, data: bytes) -> None:
        self.sent += bytes(data)[:4096]

    def settimeout(self, seconds: float | None) -> None:
        assert seconds is None or 0 <= seconds < math.inf

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def setsockopt(self, *_: object) -> None: ...
    def shutdown(self, _: int) -> None: ...
    def close(self) -> None: ...


def caller(data: bytes) -> None:
    """What the doctor's listener is told, by one who knows the token."""
    said = mock.MagicMock(return_value=True)
    made: Any = Listener.__new__(Listener)
    made._token, made._told, made._session = "word", lambda _: None, "ab"
    made._lock, made.sessions = said, 0
    wire: Any = Wire(len(data).to_bytes(4, "big") + data)
    module = "forebay.doctor.listener"
    with (
        mock.patch(f"{module}.proof", return_value="x"),
        mock.patch(f"{module}.send_for"),  # for at most a minute, whatever is asked
    ):
        made._talk(wire)


def _wires(data: bytes) -> Callable[..., Wire]:
    def connect(*_: object, **__: object) -> Wire:
        return Wire(data)

    return connect


def listener(data: bytes) -> None:
    """What the doctor is told by what it measures."""
    made = _Session("127.0.0.1", 1, "word", 0.0, 1.0)
    with mock.patch.object(socket, "create_connection", side_effect=_wires(data)), made:
        made._send(made._connect("up")[0])


TARGETS: dict[str, Target] = {
    "shard_header": Target(parse=shard_header, seeds=seeds.headers),
    "record": Target(parse=record, seeds=seeds.records, cases=800),
    "packed_record": Target(parse=read_record, seeds=seeds.packed_records),
    "index": Target(parse=read_index, seeds=seeds.indexes, cases=500),
    "manifest": Target(parse=read_manifest, seeds=seeds.manifests),
    "sealed_manifest": Target(parse=sealed_manifest, seeds=seeds.unsealed_manifests),
    "tree": Target(parse=entries, seeds=seeds.trees),
    "value": Target(parse=lambda d: tree.decode_value(d, "v"), seeds=seeds.values),
    "state": Target(parse=lambda d: unpack_entries(d, "state"), seeds=seeds.packed_trees),
    "arena": Target(parse=arena, seeds=seeds.arenas),
    "frames": Target(parse=frames, seeds=seeds.frames),
    "journal": Target(parse=journal, seeds=seeds.lines, cases=500),
    "raw_journal": Target(parse=raw_journal, seeds=lambda: [*map(_framed, seeds.lines())]),
    "config": Target(parse=lambda d: read_agent_config(d, "c"), seeds=seeds.configs),
    "word": Target(parse=lambda d: read_word(d, "word"), seeds=seeds.words),
    "finding": Target(parse=lambda d: read_finding(d, "found"), seeds=seeds.words),
    "plan": Target(parse=plan, seeds=seeds.plans, cases=120),
    "faults": Target(parse=lambda d: read_rules(d, "faults"), seeds=seeds.faults),
    "reply": Target(parse=reply, seeds=seeds.replies, cases=500),
    "caller": Target(parse=caller, seeds=seeds.callers, cases=500),
    "listener": Target(parse=listener, seeds=seeds.listeners, cases=500),
}


def warm(target: Target) -> None:
    """Load what is loaded once, so that only an input can open something later."""
    tempfile.gettempdir()
    for data in target.seeds():
        try:
            target.parse(data)
        except (StoreError, FormatError, DeadlineError):
            continue
